"""Processes that work is sent to one item at a time; one that hangs or dies is replaced and the item says so.

Each has a pipe of its own, so nothing that one does can block another. (Pebble's pool stops for good when an idle
worker is killed, and the standard library's when any is.)
"""

import contextlib
import logging
import math
import multiprocessing
import os
import queue
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Literal

from dsv32_jax.errors import UserError, WorkFailedError
from train.rl import fence

logger = logging.getLogger(__name__)

START_S = 120.0  # that a worker may take to start; imports on a busy machine
MAX_STARTS = 5  # of a worker that is killed from outside before it is ready
GRACE_S = 5.0  # after which a worker ends itself, should nobody have done it

Fault = Literal["hung", "killed", "raised"]


class WorkerError(Exception):
    """An item that came to nothing.

    Attributes:
        fault: "hung" beyond the limit, "killed" with its process, or "raised".
    """

    def __init__(self, fault: Fault, message: str) -> None:
        """Say what happened."""
        super().__init__(message)
        self.fault: Fault = fault


class Pool:
    """Worker processes; threads may share it.

    Args:
        n_workers: How many.
        timeout_s: Seconds that an item may take before its process is killed.
        memory_mib: That a process may take beyond what it starts with; limited on Linux only.
        prepare: Run in each process as it starts; picklable.
        preload: Modules to import once for all processes, if no other fork server of this program runs yet.

    Raises:
        UserError: If `prepare` raises one.
        WorkFailedError: If a process does not start.
    """

    def __init__(
        self,
        n_workers: int,
        *,
        timeout_s: float,
        memory_mib: int,
        prepare: Callable[[], None],
        preload: Sequence[str] = (),
    ) -> None:
        """Start one process, to see that it does, and the others when they are needed."""
        # A server that forks: processes start in milliseconds and share what it has imported, which is no accelerator.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", *preload])
        self._timeout_s = timeout_s
        self._arguments = (prepare, memory_mib, math.ceil(timeout_s + GRACE_S))
        self._closed = False
        self._busy: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._idle.put(self._start())
        for _ in range(n_workers - 1):
            self._idle.put(None)
        self._n_workers = n_workers

    def __enter__(self) -> "Pool":
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a process, waiting for one that is idle.

        An item whose process was killed by something else is tried once more, in a new one.

        Args:
            function: Picklable, as are its arguments and its result.
            arguments: Its arguments.

        Returns:
            What it returns.

        Raises:
            WorkerError: If it hung, its process died twice, or it raised.
            WorkFailedError: If no process can be started.
        """
        worker = self._idle.get()
        try:
            for _ in range(2):
                if self._closed:
                    raise WorkerError("killed", "the pool was closed")
                if worker is None or not worker.process.is_alive():
                    worker = self._start()
                self._busy.add(worker)
                try:
                    return worker.call(function, arguments, self._timeout_s)
                except (EOFError, OSError):
                    worker.kill()
                    code = worker.process.exitcode
                    if not self._closed:
                        logger.warning("a reward worker died (exit code %s); it is replaced", code)
                except WorkerError as error:
                    if error.fault == "hung":
                        worker.kill()
                    raise
                finally:
                    self._busy.discard(worker)
            raise WorkerError("killed", f"two processes died on it, the last with exit code {code}")
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the processes; items under way are `WorkerError`s."""
        self._closed = True
        for _ in range(self._n_workers):
            while True:  # one may start while we look
                for busy in tuple(self._busy):
                    busy.process.kill()
                try:
                    worker = self._idle.get(timeout=0.1)
                    break
                except queue.Empty:
                    continue
            if worker is not None:
                worker.kill()
        for _ in range(self._n_workers):
            self._idle.put(None)  # so that who comes later is told, and does not wait

    def _start(self) -> "_Worker":
        """Start a worker; one that is killed from outside before it is ready is no more than one lost."""
        for _ in range(MAX_STARTS - 1):
            with contextlib.suppress(_KilledError):
                return _Worker(self._context, *self._arguments)
        return _Worker(self._context, *self._arguments)


class _KilledError(WorkFailedError):
    """A worker was killed by a signal while it started."""


class _Worker:
    """A process and the pipe to it."""

    def __init__(
        self,
        context: ForkServerContext,
        prepare: Callable[[], None],
        memory_mib: int,
        alarm_s: int,
    ) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, prepare, memory_mib, alarm_s), daemon=True, name="reward"
        )
        self.process.start()
        theirs.close()
        try:
            started = self._receive(START_S)
        except (WorkerError, EOFError, OSError) as error:
            gone = isinstance(error, EOFError | OSError)
            if gone:
                self.process.join()
            self.kill()
            code = self.process.exitcode
            killed = gone and code is not None and code < 0
            raise (_KilledError if killed else WorkFailedError)(
                f"a reward worker does not start (exit code {code}): {error}"
            ) from error
        if isinstance(started, UserError):
            self.kill()
            raise started

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
    ) -> Any:
        """Run a function there."""
        self._pipe.send((function, arguments))
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise WorkerError("hung", f"not done after {timeout_s:g} s")
        good, value = self._pipe.recv()
        if not good:
            raise WorkerError("raised", value)
        return value

    def kill(self) -> None:
        """End the process whatever it does."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _work(pipe: Connection, prepare: Callable[[], None], memory_mib: int, alarm_s: int) -> None:
    """Be a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    fence.install()
    try:
        prepare()
        _limit_memory(memory_mib)
        pipe.send((True, None))
    except UserError as error:
        pipe.send((True, error))
    except Exception as error:  # noqa: BLE001 - the parent says it
        pipe.send((False, f"{type(error).__name__}: {error}"))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        signal.alarm(alarm_s)  # the parent may be gone before it can end an item that hangs
        pipe.send(_outcome(function, arguments))
        signal.alarm(0)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever an item raises is its outcome
        return False, f"{type(error).__name__}: {error}"


def _limit_memory(memory_mib: int) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_mib * 2**20,) * 2)
