"""Command: see whether the sandbox works here, and run something in it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv32_jax import command_line
from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents import isolation
from train.agents.isolation import Limits
from train.agents.process import SandboxError
from train.agents.session import CALL_S, Session

SUMMARY = (
    "Run a Python file or a command line in a sandbox that is gone afterwards, or check that sandboxes work on this"
    " machine. Exit status 1 where what was run failed."
)
EXAMPLES = """
python -m train.agents.sandbox check
python -m train.agents.sandbox bash 'id; ls -la / ~; df -h /tmp'
python -m train.agents.sandbox python script.py --timeout 10 --memory-mib 256
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; those of this process by default.

    Returns:
        The exit status.
    """
    with command_line.Boundary(resumes=False) as boundary, command_line.logging_to_stderr():
        args = _parser().parse_args(argv)
        try:
            limits = Limits(
                memory_mib=args.memory_mib, disk_mib=args.disk_mib, processes=args.processes
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from error
        if (args.text is None) != (args.what == "check"):
            raise UsageError(f"{args.what} takes {'nothing' if args.text else 'a text'} behind it")
        isolation.require_isolation(unsafe_local=args.unsafe_local)
        boundary.started = True
        boundary.status = _run(args, limits)
    return boundary.status


def _run(args: argparse.Namespace, limits: Limits) -> int:
    if args.what == "check":
        sys.stdout.write("code of a model can be isolated here\n")
        return 0
    text = args.text if args.what == "bash" else Path(args.text).read_text(encoding="utf-8")
    try:
        with Session(limits, unsafe_local=args.unsafe_local) as session:
            call = session.bash if args.what == "bash" else session.python
            output = call(text, timeout_s=args.timeout)
    except SandboxError as error:
        raise WorkFailedError(str(error)) from error
    # What a terminal obeys is shown as what it is.
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in output.text)
    sys.stdout.write(shown + ("" if not shown or shown.endswith("\n") else "\n"))
    sys.stderr.write(f"{output.status} after {output.seconds:.2f} s\n")
    return int(output.status != "ok")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m train.agents.sandbox", summary=SUMMARY, examples=EXAMPLES
    )
    parser.add_argument("what", choices=["check", "bash", "python"], help="check needs no more")
    parser.add_argument("text", nargs="?", help="the command line, or the Python file")
    default = Limits()
    for name, unit in (("memory_mib", "MiB, "), ("disk_mib", "MiB, "), ("processes", "")):
        value = getattr(default, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help=f"({unit}{value})"
        )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=CALL_S, metavar="S", help=f"seconds it may take ({CALL_S:g})"
    )  # fmt: skip
    parser.add_argument(
        "--unsafe-local", action="store_true", help="run it as you, with your files and network"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
