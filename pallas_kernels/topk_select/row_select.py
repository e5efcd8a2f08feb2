"""Exact selection in one row, as the code of one GPU thread (`simt.Thread`).

A row is read in groups of 4 scores at 16-byte boundaries, and its scores become integer keys of the same
order. Then:

1. candidates.py holds candidates in shared memory. A short row is held whole. Of a longer one a strided
   sample gives a score that slightly more than k of the row should reach, and one pass over the row keeps
   the groups that have a score at least so large.
2. search.py finds the k-th key: histograms of 2048 bins over a bracket of keys that shrinks to one bin,
   then, if several keys equal it, over a bracket of positions. At most 3 + 2 passes over the candidates.
3. listing.py marks the chosen positions in a bit map and lists it in ascending order.

If the sample misled (fewer than k scores reach its bound, or more than fit), steps 1 and 2 are tried once
more with a bound corrected by the count; after that steps 2 and 3 read the row from memory: slower, never
wrong. Counts, bits and thresholds do not depend on the order in which threads run, so the result is
repeatable. Blocks of a cluster split the row and add up their histograms.
"""

from typing import Any

from pallas_kernels.topk_select import candidates, listing, search
from pallas_kernels.topk_select.row import (
    BOUND,
    CELL_WORDS,
    HELD,
    HIST,
    KEY_MIN,
    KTH,
    LAST,
    Config,
    Held,
    InMemory,
    Row,
)


def select_row(
    m: Any, config: Config, k: int, shape: tuple[int, int], *, as_limit: bool = False
) -> None:
    """Do the work of one thread on its row of [n_rows, n_keys] scores.

    Writes the k slots of the row's list or, `as_limit`, the two words of `listing.write_limit`.
    """
    row = Row(m, config, k, shape)
    at = row.at
    row.clear(at.hist, HIST)
    row.clear(at.cell, CELL_WORDS)
    m.barrier()  # the histogram and the counters are zero
    row.locate()
    m.barrier()  # the slice is noted
    if not config.sample:
        candidates.hold(row, None)
        m.barrier()  # the candidates and their number are there
        held = Held(row, m.load(at.cell, HELD))
        _write(row, held, None, search.search(row, held, m.word(k), m.word(KEY_MIN)), as_limit)
        return

    @m.repeat(m.word(0), candidates.first_rank(row), m.word(0), m.word(0), m.word(0))
    def found(tries: Any, rank: Any, *_: Any) -> tuple[Any, ...]:
        row.recall()
        limit, misled, reached = _try(row, rank)
        again = misled & (tries == 0)
        rank = candidates.next_rank(row, rank, reached)
        return again, tries + 1, rank, limit.kth, limit.last, m.select(misled, 1, 0)

    misled = found[4] == 1
    with m.when(m.tid == 0):
        m.store(at.cell, KTH, found[2])
        m.store(at.cell, LAST, found[3])
    row.recall()
    with m.when(misled):
        limit = search.search(row, InMemory(row), m.word(k), m.word(KEY_MIN))
        with m.when(m.tid == 0):
            m.store(at.cell, KTH, limit.kth)
            m.store(at.cell, LAST, limit.last)
    m.barrier()  # the limit is published
    row.recall()
    held = Held(row, m.load(at.cell, HELD))
    limit = search.Limit(m.load(at.cell, KTH), m.load(at.cell, LAST), None)
    _write(row, held, misled, limit, as_limit)


def _try(row: Row, rank: Any) -> tuple[search.Limit, Any, Any]:
    """Find the limit among held candidates; also say whether they mislead and how many reach their bound."""
    m, at, config = row.m, row.at, row.config
    candidates.hold(row, rank)
    m.barrier()  # the candidates, their number and their bound are there
    row.recall()
    bound = m.load(at.cell, BOUND)
    held = Held(row, m.min(m.load(at.cell, HELD), config.capacity), floor=bound)
    limit = search.search(row, held, m.word(row.k), bound)
    groups, most = m.word(0), m.word(0)
    for peer in range(m.cluster):
        n_held = m.peer_load(peer, at.cell, HELD)
        groups, most = groups + n_held, m.max(most, n_held)
    overflow = most > config.capacity
    misled = overflow | ((limit.total < row.k) & (bound > KEY_MIN))
    return limit, misled, m.select(overflow, groups, limit.total)


def _write(row: Row, held: Held, misled: Any, limit: search.Limit, as_limit: bool) -> None:
    if not as_limit:
        listing.write_list(row, held, misled, limit)
        return
    listing.write_limit(row, limit)
    if row.m.cluster > 1:
        row.m.cluster_barrier()  # nobody leaves while others may read its histogram
