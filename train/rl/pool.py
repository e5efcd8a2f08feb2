"""Workers that items are sent to one at a time; one that hangs or dies is replaced and the item says so.

Each process has a pipe of its own, so nothing that one does can block another. (Pebble's pool stops for good when an
idle worker is killed, and the standard library's when any is.)
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
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Literal, Protocol, runtime_checkable

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


class LostError(Exception):
    """A worker is gone, whatever became of its item; the message says how it ended."""


@runtime_checkable  # so that the tests' type checks can look at it
class Worker(Protocol):
    """What runs one item at a time."""

    def is_alive(self) -> bool:
        """Tell whether it can be sent an item."""
        ...

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function there; raises `WorkerError` for the item and `LostError` for the worker."""
        ...

    def kill(self) -> None:
        """End it whatever it does."""
        ...


@runtime_checkable  # so that the tests' type checks can look at it
class Workers(Protocol):
    """Where workers come from."""

    def start(self) -> Worker:
        """Start one; raises `UserError` or `WorkFailedError`."""
        ...

    def close(self) -> None:
        """Give back what starting them took."""
        ...


class Pool:
    """A number of workers, replaced as they are lost; threads may share it.

    Args:
        n_workers: How many.
        workers: Starts them.

    Raises:
        UserError: If a worker can not be made ready.
        WorkFailedError: If none starts.
    """

    def __init__(self, n_workers: int, workers: Workers) -> None:
        """Start one worker, to see that it does, and the others when they are needed."""
        self._workers = workers
        self._closed = False
        self._busy: set[Worker] = set()
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._idle.put(workers.start())
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
        """Run a function in a worker, waiting for one that is idle.

        An item whose worker was lost is tried once more, in a new one.

        Args:
            function: Picklable, as are its arguments and its result.
            arguments: Its arguments.

        Returns:
            What it returns.

        Raises:
            WorkerError: If it hung, its worker was lost twice, or it raised.
            WorkFailedError: If no worker can be started.
        """
        worker = self._idle.get()
        try:
            for _ in range(2):
                if self._closed:
                    raise WorkerError("killed", "the pool was closed")
                if worker is None or not worker.is_alive():
                    worker = self._workers.start()
                self._busy.add(worker)
                try:
                    return worker.call(function, arguments)
                except LostError as error:
                    lost = error
                    worker.kill()
                    if not self._closed:
                        logger.warning("a reward worker died (%s); it is replaced", lost)
                except WorkerError as error:
                    if error.fault == "hung":
                        worker.kill()
                    raise
                finally:
                    self._busy.discard(worker)
            raise WorkerError("killed", f"two workers died on it, the last with {lost}")
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the workers; items under way are `WorkerError`s."""
        self._closed = True
        for _ in range(self._n_workers):
            while True:  # one may start while we look
                for busy in tuple(self._busy):
                    busy.kill()
                try:
                    worker = self._idle.get(timeout=0.1)
                    break
                except queue.Empty:
                    continue
            if worker is not None:
                worker.kill()
        for _ in range(self._n_workers):
            self._idle.put(None)  # so that who comes later is told, and does not wait
        self._workers.close()


class LocalWorkers:
    """Workers that are processes of this machine.

    Args:
        timeout_s: Seconds that an item may take before its process is killed.
        memory_mib: That a process may take beyond what it starts with; limited on Linux only.
        prepare: Run in each process as it starts; picklable.
        preload: Modules to import once for all processes, if no other fork server of this program runs yet.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        memory_mib: int,
        prepare: Callable[[], None],
        preload: Sequence[str] = (),
    ) -> None:
        """Start nothing yet."""
        # A server that forks: processes start in milliseconds and share what it has imported, which is no accelerator.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", *preload])
        self._arguments = (prepare, memory_mib, timeout_s)

    def start(self) -> Worker:
        """Start a process; one that is killed from outside before it is ready is no more than one lost."""
        for _ in range(MAX_STARTS - 1):
            with contextlib.suppress(_KilledError):
                return _Process(self._context, *self._arguments)
        return _Process(self._context, *self._arguments)

    def close(self) -> None:
        """Do nothing: the server of forks ends with this process."""


class _KilledError(WorkFailedError):
    """A worker was killed by a signal while it started."""


class _Process:
    """A process and the pipe to it."""

    def __init__(
        self,
        context: ForkServerContext,
        prepare: Callable[[], None],
        memory_mib: int,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._killing = threading.Lock()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work,
            args=(theirs, prepare, memory_mib, math.ceil(timeout_s + GRACE_S)),
            daemon=True,
            name="reward",
        )
        self._process.start()
        theirs.close()
        try:
            started = self._receive(START_S)
        except (WorkerError, EOFError, OSError) as error:
            gone = isinstance(error, EOFError | OSError)
            if gone:
                self._process.join()
            self.kill()
            code = self._process.exitcode
            killed = gone and code is not None and code < 0
            raise (_KilledError if killed else WorkFailedError)(
                f"a reward worker does not start (exit code {code}): {error}"
            ) from error
        if isinstance(started, UserError):
            self.kill()
            raise started

    def is_alive(self) -> bool:
        """Tell whether it runs."""
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function there."""
        try:
            self._pipe.send((function, arguments))
            return self._receive(self._timeout_s)
        except (EOFError, OSError) as error:
            self._process.kill()
            self._process.join()
            raise LostError(f"exit code {self._process.exitcode}") from error

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise WorkerError("hung", f"not done after {timeout_s:g} s")
        good, value = self._pipe.recv()
        if not good:
            raise WorkerError("raised", value)
        return value

    def kill(self) -> None:
        """End the process whatever it does; several threads may want that at once."""
        with self._killing:  # a pipe that is closed twice may be another's by then
            self._process.kill()
            self._process.join()
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
