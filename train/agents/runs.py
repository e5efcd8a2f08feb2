"""One program in a sandbox of its own: input in, output and exit code out. For tests that the program must not see."""

import os
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from train.agents.isolation import Limits
from train.agents.process import Process

SIGXCPU_CODE = 128 + 24
CHUNK = 65_536
POLL_S = 0.02  # between looks at a program that writes nothing

Ended = Literal["exited", "timeout", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended.

    Attributes:
        ended: "exited" by itself or a signal; or killed beyond a limit: "timeout" (by the clock or in computing), the
            "memory" of all its processes, or the bytes of its "output".
        exit_code: 128 and more for signals; None where it was killed.
        stdout: Up to `output_bytes`.
        stderr: The same.
        seconds: That it took.
    """

    ended: Ended
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    timeout_s: float = 10.0,
    unsafe_local: bool = False,
) -> Result:
    """Run a program and kill what it leaves behind.

    Args:
        argv: The program, found inside.
        stdin: What it reads.
        files: Path in its working folder -> bytes.
        limits: For it.
        timeout_s: Seconds by the clock.
        unsafe_local: Run it without isolation.

    Returns:
        How it ended, whatever it did.

    Raises:
        SandboxError: If the sandbox failed.
        ValueError: If a path leads out of the working folder.
    """
    started = time.monotonic()
    with Process(argv, limits, unsafe_local=unsafe_local, files=files, stdin=stdin) as process:
        kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        ended = _collect(process, kept, started + timeout_s, limits.output_bytes)
        exit_code = None
        if ended == "exited" and (exit_code := process.wait()) == SIGXCPU_CODE:
            ended = "timeout"
        if process.out_of_memory:
            ended = "memory"
        stdout, stderr = map(bytes, kept.values())
    return Result(
        ended=ended,
        exit_code=exit_code if ended == "exited" else None,
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - started,
    )


def _collect(
    process: Process, kept: Mapping[int, bytearray], deadline: float, max_bytes: int
) -> Ended:
    """Read what a process writes until it ends, its time is out, or it wrote too much."""
    stdout = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        while True:
            alive = process.is_alive()
            events = selector.select(POLL_S if alive else 0)
            for key, _ in events:
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(key.fd)
                room = max_bytes - len(kept[key.fd])
                kept[key.fd].extend(data[:room])
                if len(data) > room and key.fd == stdout:
                    return "output"
            if not alive and not events:
                return "exited"
            if time.monotonic() > deadline:
                return "timeout"
