"""The shell around every command: arguments, logging, and errors as one line.

Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import contextlib
import errno
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import jax

from train import config_file, errors, overrides

PACKAGES = ("train", "dsv32_jax", "pallas_kernels", "configs")
TRACEBACK_VARIABLE = "DSV32_TRACEBACK"
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, kw_only=True)
class CommandHelp:
    """What `--help` says of one command.

    Attributes:
      name: how it is called, such as `python -m train.pretrain`.
      summary: what it does, in a sentence or two.
      examples: whole command lines, one a line.
      default_config: the config where `--config` is not given; None makes it required.
    """

    name: str
    summary: str
    examples: str
    default_config: str | None = None


def run_command(
    main: Callable[[Any, Path], int | None],
    argv: Sequence[str] | None = None,
    *,
    about: CommandHelp,
) -> int:
    """Run a command's main function for a command line.

    Errors that tell a person what to change are one line on standard error. Anything else is our
    mistake: its traceback goes to `<workdir>/crash.txt`, and one line says so. With
    `DSV32_TRACEBACK=1` in the environment each traceback is shown too.

    Args:
      main: takes the config and the run's folder, which exists and can be written; returns an exit
        status, None meaning 0.
      argv: the arguments; those of this process by default.
      about: for `--help`.

    Returns:
      The exit status, for `sys.exit`.
    """
    with _Boundary() as boundary, _logging_to_stderr():
        args = _parser(about).parse_intermixed_args(argv)
        cfg = overrides.apply_overrides(config_file.load_config(args.config), args.overrides)
        workdir = args.workdir or Path("runs") / Path(args.config).stem
        _make_writable(workdir)
        boundary.workdir = workdir
        boundary.status = main(cfg, workdir) or 0
        if boundary.status == 0 and process_index() == 0:
            sys.stdout.write(f"results are in {workdir}\n")
    return boundary.status


def process_index() -> int:
    """Return this process's number without starting JAX's backends in a single process.

    Returns:
      0 unless `jax.distributed` is running, whose numbers begin at 0.
    """
    return jax.process_index() if jax.distributed.is_initialized() else 0


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are UsageErrors."""

    def error(self, message: str) -> Never:
        if message.startswith("unrecognized arguments: -"):
            message += " (config fields are set as key=value, without dashes)"
        raise errors.UsageError(f"{message}; see {self.prog} --help")


def _parser(about: CommandHelp) -> _Parser:
    names = ", ".join(config_file.config_names()) or "none"
    parser = _Parser(
        prog=about.name,
        description=about.summary,
        epilog=f"examples:\n{_indented(about.examples)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="NAME",
        required=about.default_config is None,
        default=about.default_config,
        help=f"a Python file with get_config(), or one of the names: {names}"
        + (f" (default: {about.default_config})" if about.default_config else ""),
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        type=Path,
        help="the run's folder; one that has been begun is resumed (default: runs/NAME)",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="set a field of the config, such as optimizer.lr=3e-4",
    )
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())


def _make_writable(workdir: Path) -> None:
    """Make the folder and prove that a file can be written in it."""
    probe = workdir / f".probe.{os.getpid()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise errors.UsageError(
            f"workdir {workdir} can not be written: {error.strerror}"
        ) from error


@dataclass
class _Boundary:
    """Turns what leaves the `with` block into an exit status and one line.

    A context manager, because it has to see every kind of error, each of which it reports.
    """

    workdir: Path | None = None
    status: int = 0
    shows_tracebacks: bool = field(
        default_factory=lambda: os.environ.get(TRACEBACK_VARIABLE) == "1"
    )

    def __enter__(self) -> "_Boundary":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> bool:
        if error is None:
            return True
        if isinstance(error, SystemExit):
            self.status = error.code if isinstance(error.code, int) else int(error.code is not None)
            return True
        if self.shows_tracebacks:
            traceback.print_exception(error)
        if isinstance(error, KeyboardInterrupt):
            self.status = INTERRUPTED
            _say("interrupted")
        elif (line := _line_for(error)) is not None:
            usage = 2 if self.workdir is None else 1
            self.status = getattr(error, "exit_status", usage)
            _say(f"error: {line}")
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
    return bool(frames) and frames[-1].f_globals.get("__name__", "").split(".")[0] in PACKAGES


def _say(line: str) -> None:
    start = CLEAR_LINE if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{line}\n")


class _LineFormatter(logging.Formatter):
    """Log lines that wipe a progress line on a terminal instead of running into it."""

    def format(self, record: logging.LogRecord) -> str:
        return (CLEAR_LINE if sys.stderr.isatty() else "") + super().format(record)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or process_index() == 0


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Log this project from INFO on process 0, from WARNING elsewhere and for other libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_is_shown)
    levels = dict.fromkeys(PACKAGES, logging.INFO)
    # Orbax logs each failure with its traceback before it raises; we report what it raises.
    levels["absl"] = logging.CRITICAL
    before = {name: logging.getLogger(name).level for name in levels}
    root = logging.getLogger()
    # Importing Orbax makes absl call logging.basicConfig, which would show each line twice.
    basic = [other for other in root.handlers if type(other) is logging.StreamHandler]
    root.handlers = [*(other for other in root.handlers if other not in basic), handler]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.handlers += basic
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
