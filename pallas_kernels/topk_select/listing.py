"""Step 3: list the chosen positions in ascending order by way of a bit map."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.topk_select import search
from pallas_kernels.topk_select.row import ALL, CHOSEN, KEY_MAX, TOTAL, Held, InMemory, Row
from pallas_kernels.topk_select.search import Limit

MAX_INDEX = 0x7FFFFFFF


def write_list(row: Row, held: Held, in_memory: Any, limit: Limit) -> None:
    """Write the chosen indices in ascending order, then -1. `in_memory`: read the row again; None is never."""
    m, s = row.m, row.slice
    map_groups = 8 * row.config.map_words
    if m.cluster > 1 and row.n_keys + 4 * m.cluster <= 4 * map_groups * m.cluster:
        _mark(row, held, in_memory, limit, m.word(0), s.n_groups)
        before, total = _count_map(row, s.n_groups)
        base = _earlier_blocks(row, total)
        _write_map(row, m.word(0), s.n_groups, base + before)
        end = base + total
    else:
        base = m.word(0)
        if m.cluster > 1:
            base = _earlier_blocks(row, _count_chosen(row, held, in_memory, limit))

        @m.loop(0, s.n_groups, map_groups, base)
        def written(first: Any, base: Any) -> tuple[Any, ...]:
            n_groups = m.min(s.n_groups - first, map_groups)
            _mark(row, held, in_memory, limit, first, n_groups)
            before, total = _count_map(row, n_groups)
            _write_map(row, first, n_groups, base + before)
            return (base + total,)

        end = written[0]
    if m.cluster > 1:
        m.cluster_barrier()  # nobody leaves while others may read its count
    out = m.address("out", row.index, row.k)
    with m.when(m.rank == m.cluster - 1):

        @m.loop(end + m.tid, row.k, m.n_threads)
        def _(slot: Any) -> None:
            m.write(out, slot, ALL)


def write_limit(row: Row, limit: Limit) -> None:
    """Write the key that the chosen reach and the last index at which an equal key is chosen."""
    m, s = row.m, row.slice
    out = m.address("out", row.index, 2)
    with m.when((m.tid == 0) & (m.rank == 0)):
        m.write(out, 0, limit.kth)
        m.write(out, 1, m.select(limit.last == ALL, MAX_INDEX, s.start - s.head + limit.last))


def _chosen(row: Row, group: Callable[[], Any], keys: list[Any], limit: Limit, ties: bool) -> Any:
    """Return one bit for each key of the group that is chosen."""
    m, bits = row.m, row.m.word(0)
    position: Any = (row.slice.first + group()) * 4 if ties else None
    for j, key in enumerate(keys):
        if ties:
            chosen = (key > limit.kth) & (key <= KEY_MAX)
            chosen = chosen | ((key == limit.kth) & (position + j <= limit.last))
        else:
            chosen = key - limit.kth <= KEY_MAX - limit.kth
        bits = m.select(chosen, bits | (1 << j), bits)
    return bits


def _each_chosen(
    row: Row,
    held: Held,
    in_memory: Any,
    limit: Limit,
    visit: Callable[..., None],
    low: Any = 0,
    high: Any = None,
) -> None:
    """Call visit(group(), bits) for all groups that may have chosen keys; [low, high) is all that is asked."""
    m = row.m

    def visit_all(source: Any, ties: bool) -> None:
        source.each(lambda group, keys: visit(group, _chosen(row, group, keys, limit, ties)))

    plain = limit.last == ALL  # no ties to break, the usual case
    if in_memory is None:
        with m.when(plain):
            visit_all(held, False)
        with m.when(~plain):
            visit_all(held, True)
        return
    with m.when(plain & ~in_memory):
        visit_all(held, False)
    with m.when(~plain & ~in_memory):
        visit_all(held, True)
    with m.when(in_memory):
        visit_all(InMemory(row, low, high), True)


def _mark(row: Row, held: Held, in_memory: Any, limit: Limit, first: Any, n_groups: Any) -> None:
    """Set the bits of the chosen keys of groups first..first+n_groups-1 in the map."""
    m, at = row.m, row.at
    m.barrier()  # everyone has left the histogram, or the previous map
    row.clear(at.hist, (((n_groups + 7) >> 3) + 3) & 0xFFFFFFFC)
    m.barrier()  # the map is clear

    def mark(group: Callable[[], Any], bits: Any) -> None:
        with m.when(bits > 0):
            place = group() - first
            with m.when(place < n_groups):
                m.or_(at.hist, place >> 3, bits << ((place & 7) * 4))

    _each_chosen(row, held, in_memory, limit, mark, first, first + n_groups)
    m.barrier()  # the map is complete


def _count_chosen(row: Row, held: Held, in_memory: Any, limit: Limit) -> Any:
    """Count the block's chosen keys."""
    m, cell = row.m, row.at.cell

    def count(_: Any, bits: Any) -> None:
        with m.when(bits > 0):
            m.add(cell, CHOSEN, m.popcount(bits))

    _each_chosen(row, held, in_memory, limit, count)
    m.barrier()  # the count is complete
    return m.load(cell, CHOSEN)


def _earlier_blocks(row: Row, total: Any) -> Any:
    """Return the sum of `total` over the blocks of lower rank: where this block's list begins."""
    m, cell = row.m, row.at.cell
    with m.when(m.tid == 0):
        m.store(cell, TOTAL, total)
    m.cluster_barrier()  # all totals are there
    earlier = m.word(0)
    for rank in range(m.cluster - 1):
        earlier = earlier + m.select(m.rank > rank, m.peer_load(rank, cell, TOTAL), 0)
    return earlier


def _words_of_thread(row: Row, n_groups: Any) -> tuple[Any, Any]:
    """Return the span of the map's words that are this thread's."""
    m = row.m
    n_words = (n_groups + 7) >> 3
    per_thread = m.divide(n_words + (m.n_threads - 1), m.n_threads)
    begin = m.min(m.tid * per_thread, n_words)
    return begin, m.min(begin + per_thread, n_words)


def _count_map(row: Row, n_groups: Any) -> tuple[Any, Any]:
    """Count the map's bits before this thread's words, and all of them."""
    m = row.m

    @m.loop(*_words_of_thread(row, n_groups), 1, m.word(0))
    def mine(word: Any, count: Any) -> tuple[Any, ...]:
        m.keep_rolled()
        return (count + m.popcount(m.load(row.at.hist, word)),)

    return search.scan(row, mine[0])


def _write_map(row: Row, first: Any, n_groups: Any, slot: Any) -> None:
    """Write the indices of the bits of this thread's words, from the row's slot `slot` on."""
    m, s = row.m, row.slice
    out = m.address("out", row.index, row.k)
    index = s.start - s.head + (s.first + first) * 4

    @m.loop(*_words_of_thread(row, n_groups), 1, slot)
    def _(word: Any, slot: Any) -> tuple[Any, ...]:
        bits = m.load(row.at.hist, word)

        @m.loop(0, m.popcount(bits), 1, bits, slot)
        def rest(_: Any, bits: Any, slot: Any) -> tuple[Any, ...]:
            m.write(out, slot, index + (word * 32 + m.lowest_bit(bits)))
            return bits & (bits - 1), slot + 1

        return (rest[1],)
