"""Step 1: bring the scores that can be among the k largest into shared memory."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.topk_select import search
from pallas_kernels.topk_select.row import ALL, BOUND, HELD, KEY_MIN, SHARE, SIGN, Held, Row

CHUNK = 4  # groups sampled together: 64 bytes, what a miss reads from memory anyway
NAN = 0x7FFFFFFF
N_EDGES = 2  # slots of a row's first and last group
SAFETY = 4  # standard deviations by which the sample's bound is set too low


def hold(row: Row, rank: Any) -> None:
    """Hold a short row whole, of a longer one the groups that may matter; publish HELD and BOUND.

    HELD counts on past the capacity. The bound is a key, the `rank`-th of a sample: all scores that reach it are
    in held groups.
    """
    m, config = row.m, row.config
    if not config.sample:
        _hold_all(row)
        return
    whole = m.load(row.at.cell, SHARE) <= config.capacity
    with m.when(whole):
        _hold_all(row)
    with m.when(~whole):
        _hold_best(row, rank)


def first_rank(row: Row) -> Any:
    """Choose the rank in the sample of a score that k of the row should reach, on the safe side."""
    m = row.m
    sampled = m.word(4 * row.config.sample * m.cluster)
    expected = m.divide(sampled * row.k, m.max(row.slice.length, 1))
    return expected + m.sqrt_ceil(expected) * SAFETY + 4


def next_rank(row: Row, rank: Any, reached: Any) -> Any:
    """Choose another rank, now that it is known how many scores reach the bound of this one."""
    return row.m.divide(rank * (row.k + row.k // 8 + 8), row.m.max(reached, 1)) + 1


def _copy(row: Row, n: Any, group_of: Callable[[Any], Any]) -> None:
    """Copy groups group_of(0..n-1) into shared memory; a thread sees those that it will visit."""
    m, s, address = row.m, row.slice, row.address()

    @m.loop(m.tid, n, m.n_threads)
    def _(slot: Any) -> None:
        group = group_of(slot)
        m.copy4(row.at.keys, slot * 4, address, s.first + group)
        if row.config.sample:
            m.store(row.at.groups, slot, group)

    m.wait_copies()


def _hold_all(row: Row) -> None:
    """Hold every group of the share."""
    m, at, n = row.m, row.at, row.slice.n_groups
    _copy(row, n, lambda slot: slot)
    # Neighbours' scores in the row's first and last group become NaN. Who copied a group corrects it.
    for slot, owner in ((m.word(0), 0), (n - 1, (n - 1) & (m.n_threads - 1))):
        with m.when((m.tid == owner) & (n > 0)):
            m.store4(at.keys, slot * 4, row.in_range(slot, m.load4(at.keys, slot * 4), NAN))
    with m.when(m.tid == 0):
        m.store(at.cell, HELD, n)
        m.store(at.cell, BOUND, KEY_MIN)


def _hold_best(row: Row, rank: Any) -> None:
    """Hold the groups that have a score of at least a bound that a sample says k scores will reach."""
    m, at = row.m, row.at
    with m.when(m.tid < row.config.ahead):
        _prefetch(row, m.tid)
    bound = _sample_bound(row, rank)
    with m.when(m.tid == 0):
        m.store(at.cell, BOUND, bound)
        m.store(at.cell, HELD, N_EDGES)
    m.barrier()  # all threads have left the sample, and the count starts after the edges
    row.recall()
    _hold_edges(row)
    _keep_reaching(row, bound ^ m.select(bound < SIGN, ALL, SIGN))


def _sample_bound(row: Row, rank: Any) -> Any:
    """Find about the rank-th key of a sample. Neighbours' scores do not matter."""
    m, config, s = row.m, row.config, row.slice
    log_chunk = CHUNK.bit_length() - 1
    log_chunks = (config.sample // CHUNK).bit_length() - 1
    chunks = s.n_groups >> log_chunk
    step, extra = chunks >> log_chunks, chunks & ((1 << log_chunks) - 1)

    def spread(slot: Any) -> Any:
        chunk = slot >> log_chunk
        place = chunk * step + ((chunk * extra) >> log_chunks)
        return (place << log_chunk) + (slot & (CHUNK - 1))

    _copy(row, config.sample, spread)
    sample = Held(row, m.word(config.sample))
    return search.search(row, sample, rank, m.word(KEY_MIN), slack=rank >> 4).kth


def _hold_edges(row: Row) -> None:
    """Hold the row's first and last group in the first two slots, without their neighbours' scores."""
    m, at, s = row.m, row.at, row.slice
    for slot, group, mine in (
        (0, m.word(0), s.first == 0),
        (1, s.n_groups - 1, s.first + s.n_groups == s.row_groups),
    ):
        with m.when(m.tid == slot):
            scores = row.in_range(group, m.read4(row.address(), s.first + group), NAN)
            m.store4(at.keys, 4 * slot, [m.select(mine, x, NAN) for x in scores])
            m.store(at.groups, slot, group)


def _keep_reaching(row: Row, bound: Any) -> None:
    """Collect the groups, but the row's first and last, that have a float of at least `bound`."""
    m, at, s, unroll = row.m, row.at, row.slice, row.config.unroll
    last, below = s.n_groups - 1, (m.word(1) << m.lane) - 1
    inner = m.select(s.first == 0, 1, 0)
    address = row.address()
    n_inner = m.select(s.first + s.n_groups == s.row_groups, last, s.n_groups) - inner

    @m.loop(0, s.n_groups, unroll * m.n_threads)
    def _(i: Any) -> None:
        groups = [i + (m.tid + u * m.n_threads) for u in range(unroll)]
        scores = [m.read4(address, s.first + m.min(group, last)) for group in groups]
        with m.when(m.tid == 0):
            _prefetch(row, m.divide(i, unroll * m.n_threads) + row.config.ahead)
        hits = [
            m.fge(m.fmax(m.fmax(a, b), m.fmax(c, d)), bound) & (group - inner < n_inner)
            for group, (a, b, c, d) in zip(groups, scores, strict=True)
        ]
        ballots = [m.ballot(hit) for hit in hits]
        counts = [m.popcount(ballot) for ballot in ballots]
        slot = m.warp_fetch_add(at.cell + HELD, sum(counts[1:], counts[0]))
        for u in range(unroll):
            mine = slot + m.popcount(ballots[u] & below)
            with m.when(hits[u] & (mine < row.config.capacity)):
                m.store4(at.keys, mine * 4, scores[u])
                m.store(at.groups, mine, groups[u])
            slot = slot + counts[u]


def _prefetch(row: Row, round_: Any) -> None:
    """Ask for a round of loads; none for the last, which may be shorter."""
    m, s = row.m, row.slice
    size = row.config.unroll * m.n_threads
    with m.when((round_ + 1) * size <= s.n_groups):
        m.prefetch4(row.address(), s.first + round_ * size, size)
