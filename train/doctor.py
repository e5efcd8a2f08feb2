"""Command: say in a few seconds why the processes of a run do not find each other, or would not work together.

Start it on every host as the run would be started. Process 0 listens on the run's coordinator port, the others report
to it, and each prints what is wrong: processes that did not come, a port that is taken or not reached, versions or
clocks that differ, folders that cannot be written.
"""

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import logging
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

from jax._src import clusters  # what jax.distributed.initialize itself asks; there is no public way

from dsv32_jax import command_line
from dsv32_jax.convert import storage
from dsv32_jax.errors import UsageError
from train import hosts

logger = logging.getLogger("train.doctor")  # as a command __name__ is __main__

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
RETRY_S = 0.2
SETTLE_S = 0.5  # for another process of a number that came, and for the answers to leave
SUMMARY = (
    "Check that the processes of a run find each other and agree. Start it on every host as the run would be started; "
    "exit status 1 where something is wrong."
)
EXAMPLES = """
python -m train.doctor
python -m train.doctor --storage gs://bucket/runs --timeout 60
JAX_COORDINATOR_ADDRESS=10.0.0.2:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 python -m train.doctor
"""


@dataclass(frozen=True)
class Place:
    """Which process of the run this is.

    Attributes:
        host: Of process 0.
        port: The coordinator's.
        count: Processes.
        index: This one's number.
    """

    host: str
    port: int
    count: int
    index: int

    @property
    def address(self) -> str:
        """Where process 0 is, as it is written in the environment."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Report:
    """What a process says of itself.

    Attributes:
        index: Its number.
        count: How many processes it thinks there are.
        hostname: Its host.
        versions: Of Python and the packages that matter.
        time: Its clock, seconds since 1970.
        problems: What it found wrong by itself.
    """

    index: int
    count: int
    hostname: str
    versions: dict[str, str]
    time: float
    problems: list[str]


def find_place(timeout_s: int) -> Place | None:
    """Return this process's place in the run; None where nothing says that there are several.

    Args:
        timeout_s: Seconds that finding out may take.

    Raises:
        UsageError: If the environment is incomplete, or what it names cannot be asked.
    """
    place = hosts.bare_process()
    address, count, index = (
        place.get(k) for k in ("coordinator_address", "num_processes", "process_id")
    )
    if address is None:
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        try:
            address, count, index, _ = detect(None, None, None, None, None, timeout_s)
        except Exception as error:
            raise UsageError(
                f"the cluster could not be asked for its processes: {error}"
            ) from error
    if address is None or count is None or index is None:
        return None
    host, _, port = str(address).rpartition(":")
    return Place(host.strip("[]"), int(port), int(count), int(index))


def report(place: Place, folders: Sequence[str], timeout_s: float = storage.PROBE_S) -> Report:
    """Describe this process.

    Args:
        place: Its place.
        folders: To try to write in, all at once, gs:// too.
        timeout_s: Seconds that this may take.
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
    return Report(place.index, place.count, socket.gethostname(), versions, time.time(), problems)


def problems_between(reports: dict[int, tuple[Report, float]], place: Place) -> list[str]:
    """Compare what the processes said.

    Args:
        reports: By number: the report, and this process's clock when it came.
        place: Of process 0.

    Returns:
        One line a problem.
    """
    found = [
        f"process {i} ({r.hostname}): {p}"
        for i, (r, _) in sorted(reports.items())
        for p in r.problems
    ]
    came = sum(i < place.count for i in reports)
    if came < place.count:
        # Not all of them: the count may be a mistake in the environment, of any size.
        missing = list(itertools.islice((i for i in range(place.count) if i not in reports), 11))
        named = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        found.append(f"{came} of {place.count} processes came; missing: {named}")
    base = reports[0][0]
    for i, (other, arrived) in sorted(reports.items()):
        who = f"process {i} ({other.hostname})"
        if other.count != place.count:
            found.append(f"{who} thinks there are {other.count} processes, process 0 {place.count}")
        for name, version in other.versions.items():
            if version != base.versions.get(name):
                found.append(f"{who} has {name} {version}, process 0 {base.versions.get(name)}")
        if abs(other.time - arrived) > MAX_CLOCK_S:
            found.append(f"{who}: its clock is {other.time - arrived:+.0f} s off process 0's")
    return found


async def coordinate(place: Place, own: Report, timeout_s: float) -> list[str]:
    """Collect the others' reports, and tell everyone what is wrong; process 0 runs this.

    Args:
        place: Its place.
        own: Its report.
        timeout_s: Seconds to wait for the others.

    Returns:
        One line a problem.
    """
    reports = {0: (own, own.time)}
    twice: list[str] = []
    callers: list[asyncio.StreamWriter] = []
    complete, verdict = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(writer)
        try:
            other = Report(**json.loads(await reader.readline()))
        except (ValueError, TypeError, ConnectionError):
            writer.close()  # somebody else's connection, or a probe of the port
            return
        if other.index in reports:
            first = reports[other.index][0].hostname
            twice.append(
                f"two processes say that they are number {other.index}: on {first} and on {other.hostname}"
            )
        else:
            reports[other.index] = (other, time.time())
        if sum(i < place.count for i in reports) == place.count:
            complete.set()
        # Whoever comes after the verdict, as number of a process that came, is told of it too.
        told = [*await asyncio.shield(verdict), *twice]
        writer.write(json.dumps(list(dict.fromkeys(told))).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it may have ended in the meantime
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(receive, None, place.port)
    except OSError as error:
        return [*own.problems, f"port {place.port} cannot be listened on: {error.strerror}"]
    async with server:
        if place.count > 1:
            try:
                await asyncio.wait_for(complete.wait(), timeout_s)
            except TimeoutError:
                logger.debug("not all came")
            await asyncio.sleep(SETTLE_S)
        verdict.set_result(problems_between(reports, place) + twice)
        await asyncio.sleep(SETTLE_S)
        # The server's end waits for all of its connections, those too of which nothing ever comes.
        for caller in callers:
            caller.close()
    return list(dict.fromkeys([*verdict.result(), *twice]))


def ask(place: Place, own: Report, timeout_s: float, show: Callable[[str], None]) -> list[str]:
    """Report to process 0 and return what it found wrong; the others run this.

    Args:
        place: This process's place.
        own: Its report.
        timeout_s: Seconds to try to reach process 0, and as many again for its answer.
        show: Takes a line about what is waited for.
    """
    until, reason = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < until:
        try:
            with socket.create_connection((place.host, place.port), timeout=2) as connection:
                show(f"reached {place.address}; waiting for all {place.count} processes")
                connection.settimeout(2 * timeout_s)
                sent = asdict(replace(own, time=time.time()))
                connection.sendall(json.dumps(sent).encode() + b"\n")
                answer = connection.makefile().readline()
                if answer:
                    return _read_answer(answer)
                reason = "process 0 ended before it answered"
        except ValueError:
            reason = "what answers there is not the doctor"
            break
        except OSError as error:
            reason = str(error.strerror or error)
        time.sleep(RETRY_S)
    hint = "is process 0 running the doctor, and does a firewall let the port through?"
    return [
        *own.problems,
        f"{place.address} cannot be reached from {own.hostname} ({reason}): {hint}",
    ]


def _read_answer(line: str) -> list[str]:
    """Read process 0's verdict; a ValueError says that the line is none."""
    found = json.loads(line)
    if not isinstance(found, list):
        raise ValueError(f"{line!r} must be a list")
    return found


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
            f"{own.hostname}: " + ", ".join(f"{k} {v}" for k, v in own.versions.items()) + "\n"
        )
        sys.stdout.flush()
        if place.index == 0:
            found = asyncio.run(coordinate(place, own, args.timeout))
        else:
            found = ask(place, own, args.timeout, lambda line: print(line, flush=True))  # noqa: T201
        for problem in found:
            sys.stdout.write(f"wrong: {problem}\n")
        if not found:
            sys.stdout.write(f"all {place.count} processes are there and agree\n")
        boundary.status = 1 if found else 0
    return boundary.status


if __name__ == "__main__":
    sys.exit(main())
