"""Continuous batching: requests join and leave a running batch, a step at a time."""

import collections
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv32_jax import cache as caches
from dsv32_jax import sharding
from dsv32_jax.config import require
from dsv32_jax.generate import batches, steps
from dsv32_jax.generate import decoder as decoders
from dsv32_jax.generate.pages import ROOT, PagePool
from dsv32_jax.generate.protocol import (
    EngineConfig,
    Event,
    FinishEvent,
    FinishReason,
    QueueFullError,
    Stats,
    TokenEvent,
)
from dsv32_jax.generate.request import Request
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.model import DeepSeekV32

logger = logging.getLogger(__name__)

MIN_TABLE = 4  # times the top-k: below that much context a step's cost hardly depends on it


class Engine:
    """Runs requests. Not thread-safe: one thread calls it.

    A request's draws depend on its seed and on positions alone, so it gives the same tokens whatever else is in the
    batch, as far as the logits are the same: they are equal to rounding, as the page tables' width, lost pages and
    reused prefixes change which step computes a row, and how.
    """

    def __init__(
        self,
        model: DeepSeekV32,
        cfg: EngineConfig,
        *,
        eos_id: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Lay out the cache; steps are compiled when first needed, one per power of two of context.

        Args:
            model: The model.
            cfg: How to run it.
            eos_id: The id that ends a text, if there is one.
            mesh: Where the model lies; None is the context's mesh, or the one device.

        Raises:
            ValueError: If `speculative` is asked of a model without MTP, or a mesh does not divide the batch.
        """
        if cfg.speculative and model.mtp is None:
            raise ValueError("speculative=True needs a model with an MTP module")
        self.cfg, self.stats, self.vocab_size = cfg, Stats(), model.cfg.vocab_size
        self._eos_id, self._mesh = eos_id, mesh
        self._chunk = min(cfg.prefill_chunk, cfg.max_len)
        self._static = steps.Static(model.cfg, cfg.cache.page_size, cfg.mode, cfg.keep_sets)
        with sharding.on_mesh(mesh):
            shards = sharding.axis_size(*sharding.BATCH_AXES)
            require(
                cfg.n_slots % shards == 0,
                f"n_slots={cfg.n_slots} must be a multiple of the mesh's {shards} batch shards",
            )
            self._decoder = decoders.from_model(model)
            self._cache = caches.make_cache(model.cfg, cfg.cache, mtp=cfg.speculative)
            self._draft = (
                steps.empty_draft(cfg.n_slots, self.vocab_size) if cfg.speculative else None
            )
        self._pool = self._new_pool()
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}  # by number, in order of admission
        self._numbers = itertools.count()
        self._cancelled: set[int] = set()
        self._shapes: set[tuple[str, tuple[int, ...], bool]] = set()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._running)

    @property
    def n_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request.

        Args:
            prompt: Ids, at least one.
            params: How its tokens are drawn.

        Returns:
            The request's number, which its events carry.

        Raises:
            QueueFullError: `max_waiting` requests wait already.
            ValueError: The prompt is empty, too long for `max_len`, or has an id outside the vocabulary.
        """
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ValueError("the prompt has no token")
        wrong = next((t for t in tokens if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token {wrong} of the prompt is not in [0, {self.vocab_size})")
        if len(tokens) >= self.cfg.max_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; max_len={self.cfg.max_len} leaves no room for one more"
            )
        if len(self._waiting) >= self.cfg.max_waiting:
            raise QueueFullError(f"max_waiting={self.cfg.max_waiting} requests wait already")
        ends = set(params.stop_ids)
        if self._eos_id is not None and not params.ignore_eos:
            ends.add(self._eos_id)
        sequence = Request(next(self._numbers), tokens, len(tokens), params, frozenset(ends))
        self._waiting.append(sequence)
        return sequence.number

    def cancel(self, request: int) -> None:
        """End a request at the next step; one that is done already is left alone."""
        self._cancelled.add(request)

    def replace_model(self, model: DeepSeekV32) -> None:
        """Go on with other weights of the same model; the rows of earlier texts are forgotten, steps stay compiled.

        Args:
            model: The model.

        Raises:
            RuntimeError: A request is running or waiting.
        """
        if self.has_work:
            raise RuntimeError("weights can only be replaced while there is no request")
        with sharding.on_mesh(self._mesh):
            self._decoder = decoders.from_model(model)
        self.forget()

    def forget(self) -> None:
        """Forget the rows of earlier texts, so that what comes next depends on nothing before, to the last bit.

        Raises:
            RuntimeError: A request is running or waiting.
        """
        if self.has_work:
            raise RuntimeError("rows can only be forgotten while there is no request")
        self._pool = self._new_pool()

    def report_selection(self, on: bool) -> None:
        """Begin or end reporting the keys that tokens select; the rows of earlier texts are forgotten.

        Begun, the cache is larger, see `CacheConfig.keep_selection`, and steps are compiled anew.

        Args:
            on: Whether later requests report them.

        Raises:
            RuntimeError: A request is running or waiting.
            ValueError: The engine's mode selects nothing.
        """
        self.forget()
        if on == self.cfg.cache.keep_selection:
            return
        self.cfg = replace(self.cfg, cache=replace(self.cfg.cache, keep_selection=on))
        with sharding.on_mesh(self._mesh):
            self._cache = caches.with_selection(self._static.cfg, self._cache, on)

    def _new_pool(self) -> PagePool:
        cache = self.cfg.cache
        return PagePool(cache.n_pages, cache.page_size, lookahead=self.cfg.speculative)

    def step(self) -> list[Event]:
        """Admit what fits, run one piece of a prompt, and draw for every sequence that has its prompt behind it.

        Returns:
            What happened, in order.
        """
        events = self._drop_cancelled()
        self._admit()
        with sharding.on_mesh(self._mesh):
            events += self._prefill()
            events += self._decode()
        return events

    def run(self) -> Iterator[Event]:
        """Step until no request is left.

        Yields:
            Events as they come.
        """
        while self.has_work:
            yield from self.step()

    def warm_up(self) -> None:
        """Compile every step that requests may need, so that none of them waits for it.

        Raises:
            RuntimeError: A request is running or waiting.
        """
        if self.has_work:
            raise RuntimeError("steps can only be compiled ahead while there is no request")
        widest = -(-self.cfg.max_len // self._pool.page_size)
        width = self._table([]).shape[1]
        with sharding.on_mesh(self._mesh):
            self._run_idle(width)
            while width < widest:
                width *= 2
                self._run_idle(width)

    def _run_idle(self, width: int) -> None:
        """Run each step once for tables of a width and no sequence; nothing is written."""
        n_slots, size = self.cfg.n_slots, self._chunk
        table, knobs = np.zeros((n_slots, width), np.int32), batches.knobs([None] * n_slots)
        nothing, one = np.full((1, size), -1, np.int32), jax.tree.map(lambda x: x[:1], knobs)
        self._cache, self._draft, _ = self._compiled("prefill", table[:1])(
            self._static, self._decoder, self._cache, self._draft, np.int32(0), 0 * nothing,
            0 * nothing, nothing, table[:1], one, np.bool_(False),
        )  # fmt: skip
        idle = np.full(n_slots, -1, np.int32)
        if self._draft is None:
            self._cache, _ = self._compiled("decode", table)(
                self._static, self._decoder, self._cache, 0 * idle, idle, table, knobs
            )
            return
        self._cache, self._draft, _ = self._compiled("speculate", table)(
            self._static, self._decoder, self._cache, self._draft, 0 * idle, idle, idle > 0,
            table, knobs,
        )  # fmt: skip

    def _drop_cancelled(self) -> list[Event]:
        events: list[Event] = []
        for sequence in [*self._running.values(), *self._waiting]:
            if sequence.number in self._cancelled:
                events.append(self._finish(sequence, "cancelled"))
        self._cancelled.clear()
        return events

    def _admit(self) -> None:
        """Give slots to waiting requests whose prompts have room, in order of arrival."""
        while self._waiting and len(self._running) < self.cfg.n_slots:
            sequence = self._waiting[0]
            needed = sum(self._missing(s) for s in [sequence, *self._running.values()])
            if self._pool.n_available < needed and self._running:
                return
            self._waiting.popleft()
            if self.cfg.reuse_prefixes:
                begin = sequence.tokens[: sequence.n_prefill]
                sequence.pages, sequence.last_name = self._pool.find(begin)
                sequence.named = len(sequence.pages)
                sequence.n_cached = sequence.named * self._pool.page_size
                self.stats.reused_tokens += sequence.n_cached
            taken = {other.slot for other in self._running.values()}
            sequence.slot = next(i for i in range(self.cfg.n_slots) if i not in taken)
            self._running[sequence.number] = sequence

    def _missing(self, sequence: Request) -> int:
        """Return how many pages a sequence still lacks for its prompt and a token after it."""
        wanted = -(-(len(sequence.tokens) + 1) // self._pool.page_size)
        return max(wanted - len(sequence.pages), 0)

    def _prefill(self) -> list[Event]:
        """Run the next piece of the oldest prompt that is not through."""
        sequence = next((s for s in self._running.values() if s.is_prefilling), None)
        if sequence is None:
            return []
        first, size = sequence.n_cached, self._chunk
        last = min(first + size, sequence.n_prefill)
        if not self._make_room(sequence, last):
            return []
        piece = sequence.tokens[first : last + 1]
        pad = size + 1 - len(piece)
        padded = np.asarray(piece + [0] * pad, np.int32)
        position = np.arange(first, first + size, dtype=np.int32)
        draws, table = last == len(sequence.tokens), self._table([sequence])
        self._cache, self._draft, drawn = self._compiled("prefill", table)(
            self._static, self._decoder, self._cache, self._draft, np.int32(sequence.slot),
            padded[None, :-1], padded[None, 1:], np.where(position < last, position, -1)[None],
            table, batches.knobs([sequence]), np.bool_(draws),
        )  # fmt: skip
        self.stats.prompt_tokens += last - first
        sequence.n_cached = last
        if draws:
            return self._collect([sequence], drawn)
        self._remember(sequence)
        return []

    def _decode(self) -> list[Event]:
        """Draw for every sequence whose prompt is through."""
        batch = []
        for sequence in list(self._running.values()):
            if sequence.number not in self._running or sequence.is_prefilling:
                continue  # it lost its pages to an older one, or has nothing to go on from
            wanted = len(sequence.tokens) + self.cfg.speculative
            if self._make_room(sequence, min(wanted, self.cfg.max_len)):
                batch.append(sequence)
        if not batch:
            return []
        by_slot: list[Request | None] = [None] * self.cfg.n_slots
        for sequence in batch:
            by_slot[sequence.slot] = sequence
        token = np.asarray([s.tokens[-1] if s else 0 for s in by_slot], np.int32)
        position = np.asarray([len(s.tokens) - 1 if s else -1 for s in by_slot], np.int32)
        table, knobs = self._table(by_slot), batches.knobs(by_slot)
        if self._draft is None:
            self._cache, drawn = self._compiled("decode", table)(
                self._static, self._decoder, self._cache, token, position, table, knobs
            )
        else:
            uses = np.asarray([s is not None and self._has_room_for_two(s) for s in by_slot])
            self._cache, self._draft, drawn = self._compiled("speculate", table)(
                self._static, self._decoder, self._cache, self._draft, token, position, uses,
                table, knobs,
            )  # fmt: skip
            self.stats.drafts += int(uses.sum())
            self.stats.accepted += int((sharding.to_host(drawn.n)[uses] == 2).sum())
        return self._collect(by_slot, drawn)

    def _compiled(self, step: str, table: np.ndarray) -> Callable[..., Any]:
        """Return a step, saying so when its shape is new, as compiling takes a while."""
        shape = (step, table.shape, self.cfg.cache.keep_selection)
        if shape not in self._shapes:
            self._shapes.add(shape)
            n_tokens = table.shape[1] * self._pool.page_size
            logger.info("compiling: %s with up to %d tokens of context", step, n_tokens)
        return getattr(steps.compiled(), step)

    def _has_room_for_two(self, sequence: Request) -> bool:
        # The draft's row comes after the last token's; what is drawn after it must be wanted too.
        left = min(
            self.cfg.max_len - len(sequence.tokens), sequence.params.max_tokens - sequence.n_drawn
        )
        return left >= 2

    def _collect(self, by_row: Sequence[Request | None], drawn: steps.Drawn) -> list[Event]:
        """Hand drawn tokens to their sequences and end those that are done."""
        token, log_p, n = map(sharding.to_host, (drawn.token, drawn.log_p, drawn.n))
        kept = None if drawn.kept is None else sharding.to_host(drawn.kept)
        events: list[Event] = []
        for row, sequence in enumerate(by_row):
            if sequence is None:
                continue
            reason = None
            for i in range(n[row]):
                sequence.tokens.append(int(token[row, i]))
                # Of two tokens the first is the draft, whose rows the step has written.
                sequence.n_cached = len(sequence.tokens) - 1
                ids = None if kept is None else batches.unpack_kept(kept[row, i], self.vocab_size)
                events.append(
                    TokenEvent(sequence.number, int(token[row, i]), float(log_p[row, i]), ids)
                )
                self.stats.drawn_tokens += 1
                reason = self._reason_to_end(sequence)
                if reason is not None:
                    break
            self._remember(sequence)
            if reason is not None:
                events.append(self._finish(sequence, reason))
        return events

    def _reason_to_end(self, sequence: Request) -> FinishReason | None:
        if sequence.tokens[-1] in sequence.ends:
            return "stop"
        full = len(sequence.tokens) >= self.cfg.max_len
        return "length" if full or sequence.n_drawn >= sequence.params.max_tokens else None

    def _finish(self, sequence: Request, reason: FinishReason) -> FinishEvent:
        experts = self._read(caches.read_experts, sequence)
        selection = self._read(caches.read_selection, sequence)
        self._release(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return FinishEvent(sequence.number, reason, experts, selection)

    def _release(self, sequence: Request) -> None:
        self._running.pop(sequence.number, None)
        for page in reversed(
            sequence.pages
        ):  # so that a text's end is forgotten before its beginning
            self._pool.let_go(page)
        sequence.pages, sequence.n_cached, sequence.named = [], 0, 0
        sequence.last_name, sequence.slot = ROOT, -1

    def _make_room(self, sequence: Request, n_tokens: int) -> bool:
        """Give a sequence pages for its first n tokens; the youngest sequences lose theirs if there are none left.

        Returns:
            False if the sequence itself had to go back to the queue.
        """
        while len(sequence.pages) * self._pool.page_size < n_tokens:
            page = self._pool.take()
            if page is not None:
                sequence.pages.append(page)
                continue
            youngest = next(reversed(self._running.values()))
            self._release(youngest)
            self._waiting.appendleft(youngest)
            self.stats.preempted += 1
            if youngest is sequence:
                return False
        return True

    def _remember(self, sequence: Request) -> None:
        """Make the pages findable that the last step has filled."""
        size, ahead = self._pool.page_size, int(self.cfg.speculative)
        while self.cfg.reuse_prefixes:
            end = (sequence.named + 1) * size
            if end > sequence.n_cached or end + ahead > len(sequence.tokens):
                return
            sequence.last_name = self._pool.remember(
                sequence.tokens, sequence.named, sequence.pages[sequence.named], sequence.last_name
            )
            sequence.named += 1

    def _table(self, by_row: Sequence[Request | None]) -> np.ndarray:
        """Return the page tables, as wide as the next power of two, which is what a step is compiled for."""
        shortest = MIN_TABLE * self._static.cfg.indexer.topk // self._pool.page_size
        return batches.page_table(by_row, shortest=max(shortest, 1))

    def _read(
        self, rows_of: Callable[..., np.ndarray | None], sequence: Request
    ) -> np.ndarray | None:
        """Return what the main layers keep of a sequence's tokens, -1 for those that no step has run."""
        main = self._cache[: self._static.cfg.n_layers]
        read = rows_of(main, sequence.pages, sequence.n_cached, self._pool.page_size)
        n_missing = len(sequence.tokens) - sequence.n_cached
        return (
            None
            if read is None
            else np.pad(read, ((0, 0), (0, n_missing), (0, 0)), constant_values=-1)
        )
