"""The processes of a run meet at process 0's port: each says who it is, and all of them are told what is wrong.

This comes before `jax.distributed`, which ends processes by a signal where a number is given twice or a port is taken.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

CONNECT_S, RETRY_S = 2, 0.2  # an attempt to reach process 0, and between two
SETTLE_S = 0.5  # for another process of a number that came, and for the answers to leave


@dataclass(frozen=True)
class Place:
    """Which process of the run this is.

    Attributes:
        host: Of process 0.
        port: Where process 0 is met.
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
class Greeting:
    """What a process says of itself.

    Attributes:
        program: What it is; process 0 takes those that are the same for its own.
        index: Its number.
        count: How many processes it thinks there are.
        hostname: Its host.
        time: Its clock when it sends this, seconds since 1970.
        said: What else the program wants to know.
    """

    program: str
    index: int
    count: int
    hostname: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def who(self) -> str:
        """The process, for people."""
        return f"process {self.index} ({self.hostname})"


class Verdict(NamedTuple):
    """What process 0 found.

    Attributes:
        wrong: One line a problem that somebody has to put right.
        missing: Which processes did not come; empty where all did.
        unmet: Why this process met nobody at all; empty where it did.
    """

    wrong: list[str]
    missing: str = ""
    unmet: str = ""

    @property
    def lines(self) -> list[str]:
        """All that is wrong, a line each."""
        return [line for line in (*self.wrong, self.missing, self.unmet) if line]


# By number: who came, and process 0's clock then.
type Callers = Mapping[int, tuple[Greeting, float]]


def meet(
    place: Place,
    own: Greeting,
    timeout_s: float,
    *,
    compare: Callable[[Callers], list[str]] = lambda callers: [],
    show: Callable[[str], None] = logger.info,
    patient: bool = True,
) -> Verdict:
    """Meet the other processes of the run; each gets the same verdict.

    Args:
        place: This process's place.
        own: What it says of itself.
        timeout_s: Seconds to wait for the others.
        compare: Finds what else is wrong with those that came; process 0 asks it.
        show: Takes a line about what is waited for.
        patient: Whether to go on asking where something else answers: an earlier run may be about to end there.
    """
    if place.index == 0:
        return asyncio.run(_receive_all(place, own, timeout_s, compare))
    return _ask(place, own, timeout_s, show, patient)


def absent(callers: Callers, place: Place) -> str:
    """Say which processes did not come; empty where all did."""
    came = sum(i < place.count for i in callers)
    if came == place.count:
        return ""
    # Not all of them: the count may be a mistake in the environment, of any size.
    missing = list(itertools.islice((i for i in range(place.count) if i not in callers), 11))
    named = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
    return f"{came} of {place.count} processes came; missing: {named}"


async def _receive_all(
    place: Place, own: Greeting, timeout_s: float, compare: Callable[[Callers], list[str]]
) -> Verdict:
    """Collect the others' greetings, and tell everyone what is wrong; process 0 runs this."""
    callers: dict[int, tuple[Greeting, float]] = {0: (own, time.time())}
    wrong: list[str] = []
    writers: list[asyncio.StreamWriter] = []
    readers: dict[int, asyncio.StreamReader] = {}
    arrivals = itertools.count(2)  # this process is the first
    all_came, verdict = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            other = _read_greeting(await reader.readline(), own.program)
        except (ValueError, TypeError, RecursionError, ConnectionError):
            writer.close()  # somebody else's connection, or a probe of the port
            return
        if other.count != place.count:
            wrong.append(
                f"{other.who} thinks there are {other.count} processes, process 0 {place.count}"
            )
        earlier = readers.get(other.index)
        started_again = earlier is not None and earlier.at_eof()
        if other.index in callers and not started_again:
            hosts = f"on {callers[other.index][0].hostname} and on {other.hostname}"
            wrong.append(f"two processes say that they are number {other.index}: {hosts}")
        else:
            callers[other.index], readers[other.index] = (other, time.time()), reader
        # One that has another's number comes in place of the one that is missing.
        if not started_again and next(arrivals) >= place.count:
            all_came.set()
        # Whoever comes after the verdict, as number of a process that came, is told of it too.
        found = await asyncio.shield(verdict)
        writer.write(json.dumps([_unique([*found.wrong, *wrong]), found.missing]).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it may have ended in the meantime
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(receive, None, place.port)
    except OSError as error:
        return Verdict([], unmet=f"port {place.port} cannot be listened on: {error.strerror}")
    async with server:
        if place.count > 1:
            try:
                await asyncio.wait_for(all_came.wait(), timeout_s)
            except TimeoutError:
                logger.debug("not all came")
            await asyncio.sleep(SETTLE_S)
        found = Verdict(_unique([*wrong, *compare(callers)]), absent(callers, place))
        verdict.set_result(found)
        await asyncio.sleep(SETTLE_S if place.count > 1 else 0)
        # The server's end waits for all of its connections, those too of which nothing ever comes.
        for writer in writers:
            writer.close()
    return Verdict(_unique([*found.wrong, *wrong]), found.missing)


def _read_greeting(line: bytes, program: str) -> Greeting:
    greeting = Greeting(**json.loads(line))
    numbers = (greeting.index, greeting.count)
    if greeting.program != program or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{line!r} must be a greeting of {program}")
    return greeting


def _unique(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _ask(
    place: Place, own: Greeting, timeout_s: float, show: Callable[[str], None], patient: bool
) -> Verdict:
    """Greet process 0 and return what it found wrong; the others run this."""
    until, reason = time.monotonic() + timeout_s, "no answer"
    shown: set[str] = set()
    while time.monotonic() < until:
        try:
            with socket.create_connection(
                (place.host, place.port), timeout=CONNECT_S
            ) as connection:
                # Process 0 may have come a moment ago, and wait for as long.
                connection.settimeout(timeout_s + 4 * SETTLE_S)
                greeting = asdict(replace(own, time=time.time()))
                connection.sendall(json.dumps(greeting).encode() + b"\n")
                line = f"reached {place.address}; waiting for all {place.count} processes"
                if line not in shown:
                    show(line)
                    shown.add(line)
                if answer := connection.makefile().readline():
                    return _read_verdict(answer)
                reason = "process 0 ended before it answered"
        except (ValueError, RecursionError):
            reason = f"what answers there is not process 0 of {own.program}"
            if not patient:
                break
            if reason not in shown:
                show(f"{place.address}: {reason}; asking again for {timeout_s:.0f} s")
                shown.add(reason)
        except OSError as error:
            reason = str(error.strerror or error)
        time.sleep(RETRY_S)
    unmet = f"process 0 was not reached at {place.address} from {own.hostname} ({reason})"
    return Verdict([], unmet=unmet)


def _read_verdict(line: str) -> Verdict:
    """Read process 0's verdict; a ValueError says that the line is none."""
    match json.loads(line):
        case [list(wrong), str(missing)]:
            return Verdict(wrong, missing)
    raise ValueError(f"{line!r} must be a verdict")
