"""Sessions that are started ahead, lent out one use each, and never more than a fixed number."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from dsv32_jax.config import require
from train.agents import isolation
from train.agents.isolation import Limits
from train.agents.process import SandboxError
from train.agents.session import Session


class SessionPool:
    """A number of sandboxes; a context manager. Threads may share it.

    Args:
        size: Sandboxes at a time, warm ones and those lent.
        limits: Of each.
        unsafe_local: Run them without isolation.

    Raises:
        UsageError: If there is no isolation here, or a library is missing.
        SandboxError: If the first does not start.
    """

    def __init__(
        self, size: int, limits: Limits = Limits(), *, unsafe_local: bool = False  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        """Start all, and wait for the first to see that it does; the class docstring has the arguments."""
        require(size >= 1, f"size={size} must be at least 1")
        isolation.require_isolation(unsafe_local=unsafe_local)
        self._limits, self._unsafe_local = limits, unsafe_local
        self._closed = False
        self._lock = threading.Lock()
        self._alive: set[Session] = set()
        self._ready: queue.SimpleQueue[Future[Session]] = queue.SimpleQueue()
        self._starters = ThreadPoolExecutor(size, "session-starter")
        for _ in range(size):
            self._replace()
        first = self._ready.get()
        self._ready.put(first)
        try:
            first.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SessionPool":
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """Lend a fresh session for the block, waiting for one if all are lent; afterwards it is killed.

        Yields:
            A session that nobody used.

        Raises:
            SandboxError: If it does not start; the next to ask gets another.
        """
        session = self._take()
        try:
            yield session
        finally:
            self._discard(session)  # before its successor starts, so that there are never more
            self._replace()

    def close(self) -> None:
        """Kill all sessions, those lent too; who waits for one is told."""
        with self._lock:
            self._closed = True
        self._starters.shutdown(cancel_futures=True)
        for session in tuple(self._alive):
            self._discard(session)
        self._replace()  # wakes who waits

    def _take(self) -> Session:
        while True:
            coming = self._ready.get()
            if self._closed:
                self._ready.put(coming)  # for the next who waits
                raise SandboxError("the pool is closed")
            try:
                session = coming.result()
            except Exception:
                self._replace()
                raise
            except BaseException:  # while it was waited for
                self._ready.put(coming)
                raise
            if session.is_alive:
                return session
            self._discard(session)
            self._replace()

    def _discard(self, session: Session) -> None:
        session.close()
        self._alive.discard(session)

    def _replace(self) -> None:
        with self._lock:
            coming = Future[Session]() if self._closed else self._starters.submit(self._start)
        self._ready.put(coming)

    def _start(self) -> Session:
        session = Session(self._limits, unsafe_local=self._unsafe_local)
        self._alive.add(session)
        return session
