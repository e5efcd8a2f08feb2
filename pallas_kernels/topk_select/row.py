"""What the steps of a row's selection share: configuration, shared memory, the block's slice, keys, sources."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

BIN_BITS = 11
BINS = 2**BIN_BITS
HIST = BINS + 4  # words of a histogram: one more bin takes the keys below the bracket
SIGN = 0x80000000
KEY_MIN, KEY_MAX = 0x00800000, 0xFF7FFFFF  # keys of the largest negative and positive floats
ALL = 0xFFFFFFFF
MEMORY_UNROLL = 2  # groups a thread has in flight where the row is read again from memory

# Single words that threads publish to the block.
BIN, ABOVE, COUNT, HELD, BOUND, CHOSEN, TOTAL, KTH, LAST, SHARE, SLICE = range(11)
CELL_WORDS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a row is worked on.

    Attributes:
        n_threads: Threads of a block: 128, 256 or 512.
        cluster: Blocks that share a row: 1, 2, 4 or 8.
        capacity: Groups that a block holds in shared memory, a multiple of 4.
        sample: Groups that a block samples of a row too long to hold, a power of two up to the capacity;
            0 if every row fits.
        unroll: Groups that a thread has in flight from memory.
        ahead: Rounds of such loads that are asked into the L2 cache ahead of time.
        map_words: Words of the bit map, a multiple of 4; longer rows take several rounds.
    """

    n_threads: int = 512
    cluster: int = 1
    capacity: int = 4100
    sample: int = 1024
    unroll: int = 4
    ahead: int = 1
    map_words: int = 4096


@dataclasses.dataclass(frozen=True)
class Regions:
    """Word offsets in shared memory."""

    keys: int  # 4 words a group
    groups: int  # the number of each held group
    hist: int  # the block's histogram, later the bit map
    merged: int  # the cluster's histogram; the block's own if it is alone
    totals: int  # a word of each warp
    cell: int  # the single words
    size: int


def regions(config: Config) -> Regions:
    """Lay out the shared memory of a block."""
    groups = 4 * config.capacity
    hist = groups + (config.capacity if config.sample else 0)
    merged = hist if config.cluster == 1 else hist + HIST
    totals = max(merged + HIST, hist + config.map_words)
    return Regions(0, groups, hist, merged, totals, totals + 32, totals + 32 + CELL_WORDS)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A block's share of a row, in groups; positions count elements from the row's first group."""

    first: Any  # first group of the share, of the row's
    n_groups: Any
    row_groups: Any
    head: Any  # position of the row's first valid score, 0 to 3
    length: Any  # valid scores of the row
    start: Any  # index of the row's first valid score


class Row:
    """One thread's view of its row of [n_rows, n_keys] scores."""

    def __init__(self, m: Any, config: Config, k: int, shape: tuple[int, int]):
        """Take a row. Later rows, the longest if causal, are begun first."""
        self.m, self.config, self.k, self.at = m, config, k, regions(config)
        self.n_keys = shape[1]
        self.index = (shape[0] - 1) - m.group

    def locate(self) -> None:
        """Find the row's valid range and the block's share of it, and note them in shared memory."""
        m = self.m
        bounds = [m.read(m.address(name, self.index, 1), 0) for name in ("start", "end")]
        start, end = (m.clip_signed(b, 0, self.n_keys) for b in bounds)
        length = m.select(start < end, end - start, 0)
        head = m.phase(m.address("scores", self.index, self.n_keys, start))
        row_groups = m.select(length > 0, (head + length + 3) >> 2, 0)
        share = (row_groups + (m.cluster - 1)) >> (m.cluster.bit_length() - 1)
        first = m.min(m.rank * share, row_groups)
        n_groups = m.min(share, row_groups - first)
        self.slice = Slice(first, n_groups, row_groups, head, length, start)
        with m.when(m.tid == 0):
            m.store(self.at.cell, SHARE, share)  # the largest of the cluster's blocks
            for i, field in enumerate(dataclasses.fields(Slice)):
                m.store(self.at.cell, SLICE + i, getattr(self.slice, field.name))

    def recall(self) -> None:
        """Read the slice again, so that it need not lie in registers over what went before."""
        m, n = self.m, len(dataclasses.fields(Slice))
        self.slice = Slice(*(m.load(self.at.cell, SLICE + i) for i in range(n)))

    def address(self) -> Any:
        """Return the address of the row's first group."""
        m = self.m
        return m.align(m.address("scores", self.index, self.n_keys, self.slice.start))

    def key(self, score: Any) -> Any:
        """Map float bits to an integer of the same order; NaN and infinities lie outside [KEY_MIN, KEY_MAX]."""
        bits = self.m.fadd_zero(score)
        return bits ^ (self.m.sign_mask(bits) | SIGN)

    def in_range(self, group: Any, values: list[Any], outside: int) -> list[Any]:
        """Replace the values of positions outside the row's valid range."""
        ahead = (self.slice.first + group) * 4 - self.slice.head
        length = self.slice.length
        return [self.m.select(ahead + j < length, v, outside) for j, v in enumerate(values)]

    def clear(self, region: int, n_words: Any) -> None:
        """Zero a region of a multiple of 4 words."""
        m = self.m

        @m.loop(m.tid * 4, n_words, 4 * m.n_threads)
        def _(i: Any) -> None:
            m.store4(region, i, [0, 0, 0, 0])


class Held:
    """The groups in shared memory: scores until the first visit of all, which makes them keys."""

    def __init__(self, row: Row, n_held: Any, floor: Any = None):
        """`floor`: what lies below it or is not finite becomes 0; None leaves all as it is."""
        self.row, self.n_held, self.floor = row, n_held, floor

    def _group(self, slot: Any) -> Any:
        return self.row.m.load(self.row.at.groups, slot) if self.row.config.sample else slot

    def each(
        self, visit: Callable[[Callable[[], Any], list[Any]], None], fresh: bool = False
    ) -> None:
        """Call visit(group(), keys) for each group; `fresh` if they are scores still."""
        m, at, floor = self.row.m, self.row.at, self.floor

        @m.loop(m.tid, self.n_held, m.n_threads)
        def _(slot: Any) -> None:
            keys = m.load4(at.keys, slot * 4)
            if fresh:
                keys = [self.row.key(bits) for bits in keys]
                if floor is not None:
                    keys = [m.select(x - floor <= KEY_MAX - floor, x, 0) for x in keys]
                m.store4(at.keys, slot * 4, keys)
            # Loads have an order, so the compiler keeps even an unused one: hence a function.
            visit(lambda: self._group(slot), keys)


class InMemory:
    """The row in memory: for rows of which the right candidates are not held."""

    def __init__(self, row: Row, low: Any = 0, high: Any = None):
        """Take the groups of the share in [low, high)."""
        self.row, self.low = row, low
        self.high = row.slice.n_groups if high is None else high

    def each(
        self, visit: Callable[[Callable[[], Any], list[Any]], None], fresh: bool = False
    ) -> None:
        """Call visit(group(), keys) for each group."""
        del fresh
        m, row, s = self.row.m, self.row, self.row.slice
        address = row.address()

        @m.loop(self.low, self.high, MEMORY_UNROLL * m.n_threads)
        def _(i: Any) -> None:
            groups = [i + (m.tid + u * m.n_threads) for u in range(MEMORY_UNROLL)]
            last = self.high - 1
            scores = [m.read4(address, s.first + m.min(group, last)) for group in groups]
            for group, bits in zip(groups, scores, strict=True):
                with m.when(group < self.high):
                    keys = row.in_range(group, [row.key(x) for x in bits], 0)
                    visit(functools.partial(_same, group), keys)


def _same(x: Any) -> Any:
    return x
