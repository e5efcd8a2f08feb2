"""The shell around every command: errors as one line, an exit status, and logging.

Exit status: 0 done, or stopped by SIGTERM in training with the state saved; 1 the work failed, 2 wrong usage, 130
stopped by SIGINT, 143 by SIGTERM elsewhere.
"""

import argparse
import contextlib
import difflib
import errno
import logging
import math
import os
import signal
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import jax

from dsv32_jax import errors
from dsv32_jax.convert.storage import Location

PACKAGES = ("train", "dsv32_jax", "pallas_kernels", "configs")
TRACEBACK_VARIABLE = "DSV32_TRACEBACK"
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM
BROKEN_PIPE = 141  # 128 + SIGPIPE
CLEAR_LINE = "\r\x1b[K"


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are UsageErrors and whose help ends in examples."""

    def __init__(self, *, name: str, summary: str, examples: str) -> None:
        """Describe a command.

        Args:
          name: how it is called, such as `python -m train.pretrain`.
          summary: what it does, in a sentence or two.
          examples: whole command lines, one a line.
        """
        lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
        super().__init__(
            prog=name,
            description=summary,
            epilog="\n".join(["examples:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse unknown options first: a required one may be among them, mistyped.

        Args:
          args: the words; those of this process by default.
          namespace: as of argparse.

        Returns:
          As argparse.
        """
        words = sys.argv[1:] if args is None else list(args)
        options = [word for word in words[: [*words, "--"].index("--")] if word.startswith("--")]
        unknown = [o for o in options if o.split("=")[0] not in self._option_string_actions]
        if unknown:
            near = difflib.get_close_matches(
                unknown[0].split("=")[0], self._option_string_actions, cutoff=0.8
            )
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return super().parse_known_args(args, namespace)

    def first_word(self, words: Sequence[str], what: str, choices: Sequence[str]) -> str:
        """Read the word that says which of several parsers reads the rest.

        Args:
          words: the command line; `--help` alone shows this parser's.
          what: the word's name for people.
          choices: what it may be.

        Returns:
          The first word.
        """
        if words and words[0] in choices:
            return words[0]
        if words and words[0] in ("-h", "--help"):
            self.print_help()
            self.exit()
        given = f", not {words[0]}" if words else ""
        self.error(f"the {what} comes first, one of {', '.join(choices)}{given}")

    def error(self, message: str) -> Never:
        """Raise a UsageError in place of argparse's two lines.

        Args:
          message: what is wrong.

        Raises:
          UsageError: always.
        """
        end = "" if message.endswith("?") else ";"
        raise errors.UsageError(f"{message}{end} see {self.prog} --help")


def non_negative(text: str) -> float:
    """Read an option that is a number, 0 or above, as argparse's `type`.

    Args:
      text: the option's value.

    Returns:
      The number.

    Raises:
      ArgumentTypeError: it is no finite number, or below 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number, 0 or above")
    return value


@dataclass
class Boundary:
    """Turns what leaves the `with` block into an exit status and one line.

    Errors that tell a person what to change are one line on standard error. Anything else is our
    mistake: its traceback goes to `<workdir>/crash.txt` where there is a workdir, and one line says
    so. With `DSV32_TRACEBACK=1` in the environment each traceback is shown too. It is a context
    manager because it has to see every kind of error, each of which it reports.

    Attributes:
      status: the exit status; the block sets it where nothing is raised.
      started: whether the work itself has begun: an error before that is wrong usage.
      workdir: the run's folder, once it can be written.
      resumes: whether the same command goes on where it was stopped.
      restart_status: exit status in place of its own where nothing was wrong with the run itself, which the same
        command, given again, goes on with: a SIGTERM, or an error that says so; None for its own.
      shows_tracebacks: whether each error's traceback is shown.
    """

    status: int = 0
    started: bool = False
    workdir: Location | None = None
    resumes: bool = True
    restart_status: int | None = None
    shows_tracebacks: bool = field(
        default_factory=lambda: os.environ.get(TRACEBACK_VARIABLE) == "1"
    )

    def __enter__(self) -> "Boundary":
        """Enter the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> bool:
        """Report an error; only what is no Exception and no interrupt passes through."""
        if error is None:
            return True
        if isinstance(error, SystemExit):
            self.status = error.code if isinstance(error.code, int) else int(error.code is not None)
            return True
        if isinstance(error, BrokenPipeError):
            # The reader of our output has left, as `head` does; Python would complain once more when it flushes.
            with contextlib.suppress(OSError):  # it may be no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.status = BROKEN_PIPE
            return True
        if self.shows_tracebacks:
            traceback.print_exception(error)
        if isinstance(error, TerminatedError):
            self.status = self.restart_status or TERMINATED
            _say("stopped by SIGTERM" + "; run the same command to go on" * self.resumes)
        elif isinstance(error, KeyboardInterrupt):
            self.status = INTERRUPTED
            _say("interrupted")
        elif (line := _line_for(error)) is not None:
            usage = 1 if self.started else 2
            self.status = getattr(error, "exit_status", usage)
            if getattr(error, "goes_on", False):
                self.status = self.restart_status or self.status
            _say(f"error: {line}" if self.status else line)
        elif isinstance(error, Exception):
            self.status = 1
            _say(f"error: unexpected {self._report_crash(error)}")
        else:
            return False
        return True

    def _report_crash(self, error: Exception) -> str:
        """Write crash.txt; return the line that names the error and the file."""
        first_line = (str(error).splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first_line}"
        hint = f"set {TRACEBACK_VARIABLE}=1 to see the traceback"
        if self.workdir is None:
            return f"{what}; {hint}"
        number = process_index()
        path = self.workdir / (f"crash.{number}.txt" if number else "crash.txt")
        try:
            path.write_text("".join(traceback.format_exception(error)))
        except OSError as reason:
            return f"{what}; {path} could not be written ({reason.strerror}), {hint}"
        return f"{what}; the traceback is in {path}"


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """Count what a person can put right, raised in the `with` block, as wrong usage: nothing has been started yet.

    Raises:
      UsageError: in place of our own ValueErrors and of files that do not exist.
    """
    try:
        yield
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        line = _line_for(error)
        if line is None:
            raise
        raise errors.UsageError(line) from error


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came where nothing could be saved, such as in a compilation."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into TerminatedError in the `with` block, so that the command says one line before it ends.

    Raises:
      TerminatedError: the signal came.
    """

    def stop(number: int, frame: types.FrameType | None) -> None:
        del number, frame
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def process_index() -> int:
    """Return this process's number without starting JAX's backends in a single process.

    Returns:
      0 unless `jax.distributed` is running, whose numbers begin at 0.
    """
    return jax.process_index() if jax.distributed.is_initialized() else 0


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log this project from INFO on process 0, from WARNING elsewhere and for other libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_is_shown)
    levels = dict.fromkeys(PACKAGES, logging.INFO)
    # Orbax and a bucket's client log each failure with its traceback before they raise; we report what they raise.
    levels |= dict.fromkeys(("absl", "gcsfs", "google"), logging.CRITICAL)
    before = {name: logging.getLogger(name).level for name in levels}
    root = logging.getLogger()
    # Importing Orbax makes absl call logging.basicConfig, which would show each line twice.
    handlers = list(root.handlers)
    root.handlers = [*(h for h in handlers if type(h) is not logging.StreamHandler), handler]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        added = [h for h in root.handlers if h not in handlers and h is not handler]
        root.handlers = handlers + added
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _line_for(error: BaseException) -> str | None:
    """Return the one line for an error meant for people, or None for a mistake of ours."""
    if isinstance(error, OSError):
        return _line_for_os_error(error)
    meant = isinstance(error, errors.UserError) or (
        isinstance(error, ValueError | NotImplementedError) and _raised_by_us(error)
    )
    return " ".join(str(error).splitlines()) if meant else None


def _line_for_os_error(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.filename})" if error.filename else "the disk is full"
    if error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).splitlines())


def _raised_by_us(error: BaseException) -> bool:
    """Tell a check of this project from the same kind of error out of a library's depths."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _module_name(frames[-1]).split(".")[0] in PACKAGES


def _module_name(frame: types.FrameType) -> str:
    # A module run by `python -m` is called __main__; its own name is in its spec.
    spec = frame.f_globals.get("__spec__")
    return spec.name if spec is not None else frame.f_globals.get("__name__", "")


def _say(line: str) -> None:
    start = CLEAR_LINE if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{line}\n")


class _LineFormatter(logging.Formatter):
    """Log lines that wipe a progress line on a terminal instead of running into it."""

    def format(self, record: logging.LogRecord) -> str:
        return (CLEAR_LINE if sys.stderr.isatty() else "") + super().format(record)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or process_index() == 0
