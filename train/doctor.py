"""Command: say in a few seconds why the processes of a run do not find each other, or would not work together.

Start it on every host as the run would be started. Process 0 listens on the run's coordinator port, the others report
to it, and each prints what is wrong: processes that did not come, a port that is taken or not reached, versions or
clocks that differ, folders that cannot be written.
"""

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jax._src import clusters  # what jax.distributed.initialize itself asks; there is no public way

from dsv32_jax import command_line, joining, rendezvous
from dsv32_jax.convert import storage
from dsv32_jax.errors import UsageError
from dsv32_jax.rendezvous import Callers, Greeting, Place

PACKAGES = (
    "dsv32-jax",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
)
MAX_CLOCK_S = 5.0  # cloud storage and certificates refuse more than some minutes; NTP keeps well below a second
HINT = "is process 0 running the doctor, and does a firewall let the port through?"
SUMMARY = (
    "Check that the processes of a run find each other and agree. Start it on every host as the run would be started; "
    "exit status 1 where something is wrong."
)
EXAMPLES = """
python -m train.doctor
python -m train.doctor --storage gs://bucket/runs --timeout 60
JAX_COORDINATOR_ADDRESS=10.0.0.2:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 python -m train.doctor
"""


def find_place(timeout_s: int) -> Place | None:
    """Return this process's place in the run; None where nothing says that there are several.

    Args:
        timeout_s: Seconds that finding out may take.

    Raises:
        UsageError: If the environment is incomplete, or what it names cannot be asked.
    """
    if (place := joining.bare_place()) is not None:
        return place
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, index, _ = detect(None, None, None, None, None, timeout_s)
    except Exception as error:
        raise UsageError(f"the cluster could not be asked for its processes: {error}") from error
    if address is None or count is None or index is None:
        return None
    host, _, port = str(address).rpartition(":")
    return Place(host.strip("[]"), int(port), int(count), int(index))


def report(place: Place, folders: Sequence[str], timeout_s: float = storage.PROBE_S) -> Greeting:
    """Describe this process.

    Args:
        place: Its place.
        folders: To try to write in, all at once, gs:// too.
        timeout_s: Seconds that this may take.

    Returns:
        What it says: `versions` of Python and the packages that matter, and `problems` found by itself.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    with ThreadPoolExecutor(max(1, len(folders))) as threads:
        tried = threads.map(partial(storage.writing_problem, timeout_s=timeout_s), folders)
        problems = [problem for problem in tried if problem]
    said = {"versions": versions, "problems": problems}
    return Greeting(program="train.doctor", index=place.index, count=place.count, said=said)


def differences(callers: Callers) -> list[str]:
    """Compare what the processes said.

    Args:
        callers: By number: what each said, and process 0's clock when it came.

    Returns:
        One line a problem.
    """
    found = [
        f"{c.who}: {p}" for _, (c, _) in sorted(callers.items()) for p in c.said.get("problems", [])
    ]
    base = callers[0][0].said["versions"]
    for _, (other, arrived) in sorted(callers.items()):
        for name, version in other.said.get("versions", {}).items():
            if version != base.get(name):
                found.append(f"{other.who} has {name} {version}, process 0 {base.get(name)}")
        if abs(other.time - arrived) > MAX_CLOCK_S:
            found.append(f"{other.who}: its clock is {other.time - arrived:+.0f} s off process 0's")
    return found


def examine(
    place: Place, own: Greeting, timeout_s: float, show: Callable[[str], None]
) -> list[str]:
    """Meet the other processes and return what is wrong, one line a problem.

    Args:
        place: This process's place.
        own: What it says.
        timeout_s: Seconds to wait for the others.
        show: Takes a line about what is waited for.
    """
    verdict = rendezvous.meet(place, own, timeout_s, compare=differences, show=show, patient=False)
    return [*own.said["problems"], f"{verdict.unmet}: {HINT}"] if verdict.unmet else verdict.lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; those of this process by default.

    Returns:
        The exit status.
    """
    with command_line.Boundary(resumes=False) as boundary, command_line.logging_to_stderr():
        parser = command_line.Parser(
            name="python -m train.doctor", summary=SUMMARY, examples=EXAMPLES
        )
        parser.add_argument(
            "--storage",
            nargs="+",
            metavar="DIR",
            default=[],
            help="folders the run writes in, gs:// too",
        )
        parser.add_argument(
            "--timeout",
            type=int,
            default=30,
            metavar="S",
            help="seconds to wait for the others, and half of it for folders (30)",
        )
        args = parser.parse_args(argv)
        if args.timeout < 1:
            raise UsageError(f"--timeout={args.timeout} must be at least 1")
        place = find_place(args.timeout)
        if place is None:
            sys.stdout.write(
                "one process: no Cloud TPU, GKE, Slurm or MPI job, and no JAX_COORDINATOR_ADDRESS\n"
            )
            place = Place("localhost", 0, 1, 0)
        else:
            sys.stdout.write(
                f"process {place.index} of {place.count}; process 0 is {place.address}\n"
            )
        sys.stdout.flush()
        # Half of it, so that a process whose storage does not answer still comes in time to say so.
        own = report(place, args.storage, args.timeout / 2)
        sys.stdout.write(
            f"{own.hostname}: "
            + ", ".join(f"{name} {version}" for name, version in own.said["versions"].items())
            + "\n"
        )
        sys.stdout.flush()
        found = examine(place, own, float(args.timeout), lambda line: print(line, flush=True))  # noqa: T201
        for problem in found:
            sys.stdout.write(f"wrong: {problem}\n")
        if not found:
            sys.stdout.write(f"all {place.count} processes are there and agree\n")
        boundary.status = 1 if found else 0
    return boundary.status


if __name__ == "__main__":
    sys.exit(main())
