"""The engine's thread, and its requests as the event loop sees them.

Commands go to the thread through a queue; what each step reports comes back as one callback on the loop. A client that
reads slowly can not hold the engine up, and its tokens must not pile up either: a request of which more than a bound
lies unread is cancelled.
"""

import asyncio
import collections
import concurrent.futures
import functools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import Event, FinishEvent, Stats
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.serve import errors

logger = logging.getLogger(__name__)

MAX_UNREAD = 1024  # tokens of a request that may wait for its client


class Item(NamedTuple):
    """Something that happened to one of a ticket's texts.

    Attributes:
        choice: Which text.
        event: What happened.
        at: `time.monotonic()` after the step.
    """

    choice: int
    event: Event
    at: float


class Ticket:
    """The texts that one HTTP request asked for. Belongs to the event loop.

    Attributes:
        n_open: Texts that the engine has not ended.
        submitted: `time.monotonic()` when it was made.
    """

    def __init__(self, n: int, *, timeout: float, max_unread: int):
        """Begin with nothing drawn.

        Args:
            n: Texts.
            timeout: Seconds that all of it may take.
            max_unread: Items of each text that may wait.
        """
        self.n_open, self.submitted = n, time.monotonic()
        self._timeout = timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._max_unread = max_unread * n
        self._items: collections.deque[Item] = collections.deque()
        self._ready = asyncio.Event()
        self._failure: errors.ApiError | None = None

    async def next(self) -> Item | None:
        """Wait for what happens next.

        Returns:
            It, or None once all texts are over.

        Raises:
            ApiError: The request failed or took too long.
        """
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self.n_open == 0:
                return None
            self._ready.clear()
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._ready.wait()
            except TimeoutError as error:
                raise errors.timed_out(self._timeout) from error
        return self._items.popleft()

    def put(self, item: Item) -> bool:
        """Add an item.

        Args:
            item: What happened.

        Returns:
            False if there is too much unread, which fails the ticket.
        """
        if self._failure is None:
            self._items.append(item)
            self._ready.set()
            if len(self._items) > self._max_unread:
                self.fail(errors.slow_reader(len(self._items)))
                return False
        return True

    def fail(self, error: errors.ApiError) -> None:
        """Make `next` raise; what is unread is dropped, and what still comes too."""
        self._items.clear()
        self._failure = error
        self._ready.set()


class EngineWorker:
    """Runs an engine in a thread of its own. Its public methods belong to the event loop.

    Attributes:
        failure: What the engine raised, which ends all work; None while it works.
        is_draining: Whether new requests are refused.
        n_live: Texts that the engine has not ended.
    """

    def __init__(self, engine: Engine, *, max_unread: int = MAX_UNREAD):
        """Take over an engine.

        Args:
            engine: Idle; its `max_waiting` bounds how many texts may run and wait together.
            max_unread: Tokens of a text that may wait for its client.
        """
        self.failure: BaseException | None = None
        self.is_draining, self.n_live = False, 0
        self._engine, self._max_unread = engine, max_unread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: set[Ticket] = set()
        self._by_number: dict[int, tuple[Ticket, int]] = {}  # the thread's own
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "engine")
        self._done: asyncio.Future[None] | None = None

    @property
    def capacity(self) -> int:
        """Texts that may run and wait together."""
        return self._engine.cfg.max_waiting

    @property
    def max_len(self) -> int:
        """Longest text, prompt included."""
        return self._engine.cfg.max_len

    @property
    def vocab_size(self) -> int:
        """Ids that prompts may hold."""
        return self._engine.vocab_size

    @property
    def stats(self) -> Stats:
        """The engine's counts."""
        return self._engine.stats

    @property
    def n_running(self) -> int:
        """Texts that have a slot."""
        return self._engine.n_running

    @property
    def n_queued(self) -> int:
        """Texts that have none."""
        return max(self.n_live - self._engine.n_running, 0)

    def start(self) -> None:
        """Start the thread; it calls back to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.run_in_executor(self._executor, self._run)
        self._done.add_done_callback(self._ended)

    def submit(
        self, prompt: list[int], params: Sequence[SamplingParams], *, timeout: float
    ) -> Ticket:
        """Ask for texts after a prompt.

        Args:
            prompt: Ids, which the engine must be able to take.
            params: How each text is drawn.
            timeout: Seconds until the request fails.

        Returns:
            Where the texts arrive.

        Raises:
            ApiError: The queue is full, the server stops, or the engine has failed.
        """
        if self.failure is not None:
            raise errors.engine_failed(self.failure)
        if self.is_draining:
            raise errors.stopping()
        if self.n_live + len(params) > self.capacity:
            raise errors.queue_full(self.capacity)
        ticket = Ticket(len(params), timeout=timeout, max_unread=self._max_unread)
        self._tickets.add(ticket)
        self.n_live += len(params)
        self._commands.put(functools.partial(self._submit, ticket, prompt, list(params)))
        return ticket

    def cancel(self, ticket: Ticket, choice: int | None = None) -> None:
        """End a ticket's texts at the engine's next step; those that are over are left alone.

        Args:
            ticket: The ticket.
            choice: Which of its texts; None for all.
        """
        if ticket.n_open:
            self._commands.put(functools.partial(self._cancel, ticket, choice))

    def fail_all(self, error: errors.ApiError) -> None:
        """Fail every open ticket and cancel its texts."""
        for ticket in list(self._tickets):
            ticket.fail(error)
            self.cancel(ticket)

    async def close(self) -> None:
        """Fail what is open and end the thread after the step it is in."""
        self.is_draining = True
        self.fail_all(errors.stopping())
        self._commands.put(None)
        if self._done is not None:
            await asyncio.wait([self._done])
        self._executor.shutdown()

    def _run(self) -> None:
        """Be the thread: commands between steps, and sleep when there is nothing to do."""
        while True:
            while not (self._engine.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    return
                command()
            events = self._engine.step()
            if events:
                self._loop.call_soon_threadsafe(self._deliver, self._addressed(events))

    def _submit(self, ticket: Ticket, prompt: list[int], params: list[SamplingParams]) -> None:
        for choice, one in enumerate(params):
            self._by_number[self._engine.submit(prompt, one)] = (ticket, choice)

    def _cancel(self, ticket: Ticket, choice: int | None) -> None:
        for number, (whose, which) in self._by_number.items():
            if whose is ticket and choice in (None, which):
                self._engine.cancel(number)

    def _addressed(self, events: Sequence[Event]) -> list[tuple[Ticket, Item]]:
        now = time.monotonic()
        batch = []
        for event in events:
            ticket, choice = self._by_number[event.request]
            batch.append((ticket, Item(choice, event, now)))
            if isinstance(event, FinishEvent):
                del self._by_number[event.request]
        return batch

    def _deliver(self, batch: list[tuple[Ticket, Item]]) -> None:
        for ticket, item in batch:
            if isinstance(item.event, FinishEvent):
                self.n_live -= 1
                ticket.n_open -= 1
                if ticket.n_open == 0:
                    self._tickets.discard(ticket)
            if not ticket.put(item):
                self.cancel(ticket)

    def _ended(self, done: asyncio.Future[None]) -> None:
        self.failure = done.exception()
        if self.failure is not None:
            logger.error("the engine failed", exc_info=self.failure)
            for ticket in self._tickets:
                ticket.fail(errors.engine_failed(self.failure))
