"""The shell around every command that runs a config: `--config`, `--workdir` and overrides."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from dsv32_jax import command_line, errors
from dsv32_jax.convert import storage
from train import config_file, overrides


@dataclass(frozen=True, kw_only=True)
class CommandHelp:
    """What `--help` says of one command.

    Attributes:
      name: how it is called, such as `python -m train.pretrain`.
      summary: what it does, in a sentence or two.
      examples: whole command lines, one a line.
      default_config: the config where `--config` is not given; None makes it required.
      folder_prefix: begins the name of the default folder, of a command that is no run of its config, and so
        begins anew where it was stopped.
    """

    name: str
    summary: str
    examples: str
    default_config: str | None = None
    folder_prefix: str = ""


def run_command(
    main: Callable[..., int | None],
    argv: Sequence[str] | None = None,
    *,
    about: CommandHelp,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run a command's main function for a command line, inside a `command_line.Boundary`.

    Args:
      main: takes the config and the run's folder, which exists and can be written; returns an exit
        status, None meaning 0.
      argv: the arguments; those of this process by default.
      about: for `--help`.
      add_options: adds what no config holds; `main` then takes the parsed arguments as a third argument.

    Returns:
      The exit status, for `sys.exit`.
    """
    with (
        command_line.Boundary(resumes=not about.folder_prefix) as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        parser = _parser(about)
        if add_options is not None:
            add_options(parser)
        args = parser.parse_intermixed_args(argv)
        boundary.restart_status = args.restart_status
        cfg = overrides.apply_overrides(config_file.load_config(args.config), args.overrides)
        workdir = args.workdir or Path("runs") / f"{about.folder_prefix}{Path(args.config).stem}"
        if problem := storage.writing_problem(workdir):
            raise errors.UsageError(f"workdir {problem}")
        boundary.workdir, boundary.started = workdir, True
        extra = () if add_options is None else (args,)
        boundary.status = main(cfg, workdir, *extra) or 0
        if boundary.status == 0 and command_line.process_index() == 0:
            sys.stdout.write(f"results are in {workdir}\n")
    return boundary.status


class _Parser(command_line.Parser):
    """A parser that knows how config fields are set."""

    def error(self, message: str) -> Never:
        if message.startswith("unrecognized arguments: -"):
            message += " (config fields are set as key=value, without dashes)"
        super().error(message)


def _status(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 255:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 to 255")
    return int(text)


def _parser(about: CommandHelp) -> argparse.ArgumentParser:
    names = ", ".join(config_file.config_names()) or "none"
    parser = _Parser(name=about.name, summary=about.summary, examples=about.examples)
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
        type=storage.locate,
        help=f"the run's folder, gs:// too; one that was begun is resumed (default: runs/{about.folder_prefix}NAME)",
    )
    parser.add_argument(
        "--restart-status",
        metavar="N",
        type=_status,
        help="exit status where a SIGTERM stopped the run (default: 0, or 143 with nothing saved) or another of its "
        "processes is gone (1), so that a scheduler starts it again",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="set a field of the config, such as optimizer.lr=3e-4",
    )
    return parser
