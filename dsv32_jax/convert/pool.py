"""Run independent pieces of work in threads, showing how far they are; an error stops them all."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from dsv32_jax import command_line, progress_line

LINE_SECONDS = 10.0  # between two lines where there is no terminal


class Progress:
    """A line that says how much is done, how fast it goes and how long it has left."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        stream: progress_line.TextStream | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            what: The verb that begins the line.
            total_bytes: All there is to do.
            stream: For the line; standard error by default.
            clock: Seconds.
        """
        self._what, self._total, self._clock = what, total_bytes, clock
        self._done = 0
        self._begun = clock()
        self._lock = threading.Lock()
        self._shows = command_line.process_index() == 0
        self._line = progress_line.ProgressLine(
            stream or sys.stderr, seconds=LINE_SECONDS, clock=clock
        )

    def add(self, n_bytes: int) -> None:
        """Count finished bytes, and show the line where it is due.

        Args:
            n_bytes: How many more.
        """
        with self._lock:
            self._done += n_bytes
            if self._shows:
                self._line.show(self.text())

    def text(self) -> str:
        """Return the line, such as `converting 12.3/689.5 GB  1.21 GB/s  0:09:20 left`."""
        seconds = max(self._clock() - self._begun, 1e-9)
        rate = self._done / seconds
        left = round((self._total - self._done) / rate) if rate else 0
        return (
            f"{self._what} {self._done / 1e9:.1f}/{self._total / 1e9:.1f} GB  {rate / 1e9:.2f} GB/s  "
            f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )

    def close(self) -> None:
        """Show the last line."""
        if self._shows and self._done:
            self._line.show(self.text(), now=True)
            self._line.close()


def run_all[T](work: Callable[[T], None], items: Sequence[T], *, threads: int) -> None:
    """Do work on every item, a few at a time in the order given.

    Args:
        work: Does one item.
        items: The items.
        threads: How many at a time.

    Raises:
        BaseException: What the earliest of the failing items raised, whichever thread was the first to fail; items not
            begun by then are not begun any more. Every item before a failing one has been begun, and what was begun
            is waited for, so that one set of faults is told of in one way.
    """
    stop = threading.Event()
    queue = iter(enumerate(items))
    lock = threading.Lock()
    at = [0] * min(threads, len(items))  # the item that each thread is busy with

    def loop(thread: int) -> None:
        while not stop.is_set():
            with lock:
                entry = next(queue, None)
            if entry is None:
                return
            at[thread], item = entry
            work(item)

    with futures.ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(loop, thread) for thread in range(len(at))]
        try:
            futures.wait(running, return_when=futures.FIRST_EXCEPTION)
        finally:
            stop.set()
    for _, future in sorted(zip(at, running, strict=True), key=lambda pair: pair[0]):
        future.result()
