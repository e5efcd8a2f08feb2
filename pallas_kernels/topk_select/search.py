"""Step 2: find the k-th key by histograms over a bracket that shrinks to one bin."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.topk_select.row import (
    ABOVE,
    ALL,
    BIN,
    BIN_BITS,
    BINS,
    COUNT,
    HIST,
    KEY_MAX,
    Row,
)

FRESH, KEYS, TIES = range(3)  # what the bracket holds; fresh: keys, still to be made of the scores


@dataclasses.dataclass(frozen=True)
class Limit:
    """The chosen keys: those above kth, and those equal to it up to position last."""

    kth: Any
    last: Any
    total: Any  # keys from `low` up


def search(row: Row, source: Any, want: Any, low: Any, slack: Any = None) -> Limit:
    """Find the limit of the best `want` keys, of which none lies between 0 and `low`.

    With `slack`, stop at a key that at most `want + slack` keys reach, and leave ties alone.
    """
    m, at = row.m, row.at

    # While keys are searched the bracket holds keys; then kth is known and it holds ALL - position of its equals.
    @m.repeat(m.word(FRESH), m.word(0), low, m.word(KEY_MAX), want, m.word(0))
    def found(phase: Any, kth: Any, low: Any, high: Any, want: Any, total: Any) -> tuple[Any, ...]:
        span = high - low
        shift = m.max(32 - m.leading_zeros(span), BIN_BITS) - BIN_BITS
        # The bracket is a whole number of bins, or no key lies between its end and its last bin's.
        below = (span >> shift) + 1

        def count(value: Any) -> None:
            m.add(at.hist, m.min((high - value) >> shift, below), 1)

        _count(row, source, phase, kth, count, ties=slack is None)
        m.cluster_barrier()  # all counts are in
        if m.cluster > 1:
            _merge(row)
        counted = _find_bin(row, want, below)
        bin_, above, size = (m.load(at.cell, i) for i in (BIN, ABOVE, COUNT))
        # A bracket that holds no more than is wanted is chosen whole, without looking for a bin.
        everything = counted <= want
        left = want - above
        high = m.select(everything, high, high - (bin_ << shift))
        width = m.word(1) << shift
        low = m.select(everything | (high - low < width), low, high - width + 1)
        done = everything | (size == left)
        if slack is not None:
            done = done | (size <= left + slack) | (shift == 0)
        tie = ~done & (shift == 0)
        kth = m.select(phase == TIES, kth, low)
        total = m.select(phase == FRESH, counted, total)
        phase = m.select(tie | (phase == TIES), TIES, KEYS)
        low = m.select(tie, ALL - row.slice.row_groups * 4, low)
        high = m.select(tie, ALL, high)
        return ~done, phase, kth, low, high, left, total

    phase, kth, low, _, _, total = found
    return Limit(kth, m.select(phase == TIES, ALL - low, ALL), total)


def _count(
    row: Row, source: Any, phase: Any, kth: Any, count: Callable[[Any], None], ties: bool
) -> None:
    """Count all keys, or the positions of those equal to kth."""
    m, s = row.m, row.slice

    def count_keys(_: Any, keys: list[Any]) -> None:
        for key in keys:
            count(key)

    def count_ties(group: Callable[[], Any], keys: list[Any]) -> None:
        position = (s.first + group()) * 4
        for j, key in enumerate(keys):
            count(m.select(key == kth, ALL - (position + j), 0))

    with m.when(phase == FRESH):
        source.each(count_keys, fresh=True)
    with m.when(phase == KEYS):
        source.each(count_keys)
    if ties:
        with m.when(phase == TIES):
            source.each(count_ties)


def _merge(row: Row) -> None:
    """Give every block of the cluster the sum of all histograms. Each block adds up its share of the bins."""
    m, at = row.m, row.at
    quads = BINS // 4 // m.cluster

    @m.loop(m.tid, quads, m.n_threads)
    def _(i: Any) -> None:
        index = (m.rank * quads + i) * 4
        peers = [m.peer_load4(rank, at.hist, index) for rank in range(m.cluster)]
        sums = [sum(same[1:], same[0]) for same in zip(*peers, strict=True)]
        for rank in range(m.cluster):
            m.peer_store4(rank, at.merged, index, sums)

    m.cluster_barrier()  # the sums are there, and everyone has left this block's histogram
    row.clear(at.hist, HIST)


def _find_bin(row: Row, want: Any, below: Any) -> Any:
    """Publish the bin in which the running count reaches `want`, the count before it and its own.

    Returns the count of all bins but the one numbered `below`, and leaves the histogram zero.
    """
    m, at = row.m, row.at
    per_thread = BINS // m.n_threads
    bins = []
    for quad in range(0, per_thread, 4):
        bins += m.load4(at.merged + quad, m.tid * per_thread)
        if m.cluster == 1:
            m.store4(at.merged + quad, m.tid * per_thread, [0, 0, 0, 0])
    bins = [m.select(m.tid * per_thread + i < below, b, 0) for i, b in enumerate(bins)]
    mine = sum(bins[1:], bins[0])
    before, total = scan(row, mine)
    with m.when((before < want) & (want <= before + mine)):
        for i, size in enumerate(bins):
            with m.when((before < want) & (want <= before + size)):
                m.store(at.cell, BIN, m.tid * per_thread + i)
                m.store(at.cell, ABOVE, before)
                m.store(at.cell, COUNT, size)
            before = before + size
    m.barrier()  # the bin is published and the histogram is zero
    return total


def scan(row: Row, value: Any) -> tuple[Any, Any]:
    """Return the sum over the threads before this one, and over all."""
    m, at = row.m, row.at
    running = value
    for distance in (1, 2, 4, 8, 16):
        running = running + m.select(m.lane >= distance, m.shift_lanes(running, distance), 0)
    with m.when(m.lane == 31):
        m.store(at.totals, m.warp, running)
    m.barrier()  # the warps' sums are there
    sums = m.select(m.lane < m.n_threads // 32, m.load(at.totals, m.lane), 0)
    earlier = m.warp_sum(m.select(m.lane < m.warp, sums, 0))
    return earlier + running - value, m.warp_sum(sums)
