"""How the tiles of the Gluon forward, one query and 64 heads each, are dealt to its programs, and which are cut.

As many programs run as there are multiprocessors, and take items in turn. Most items are whole tiles. The tiles of the
last, incomplete round would keep a few programs busy while the others have nothing to do: they are cut along their
slots into parts, which are items too, and whose outputs a second kernel merges.
"""

from typing import NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEADS_PER_TILE = 64  # rows of one wgmma
SLOTS_PER_STEP = 128
MAX_PARTS = 16  # a thread of the merging kernel holds all of them
# Costs in steps of 128 slots (3.2 us, H200, 2026-11-30): an item's start and end, the second kernel, and its bytes for
# each part of a tile. With a constant they give 34 of 39 measured times of 1 to 128 queries and 1 to 16 parts to 5%.
ITEM_COST, MERGE_COST, PART_COST = 1.8, 2.0, 0.0125

HEADS = gl.constexpr(HEADS_PER_TILE)


class Split(NamedTuple):
    """The last n_queries queries are computed in n_parts parts each, the others whole; 0 and 1 if none is split."""

    n_queries: int
    n_parts: int


def choose_split(n_queries: int, tiles_per_query: int, n_steps: int, n_programs: int) -> Split:
    """Return which queries to split along their slots: those past the last full round of programs, by least cost.

    Items are dealt out in turn, and those of the last rounds are alike, so the busiest program has the most items.

    Args:
        n_queries: Number of queries.
        tiles_per_query: Tiles of 64 heads.
        n_steps: Steps of 128 slots of the longest row.
        n_programs: Programs that run at a time.
    """
    n_whole = n_queries * tiles_per_query // n_programs * n_programs // tiles_per_query
    n_split = n_queries - n_whole
    best = (n_steps + ITEM_COST, 1)
    for n_parts in range(2, min(MAX_PARTS, n_steps) + 1):
        n_items = n_split * tiles_per_query * n_parts
        rounds = -(-n_items // n_programs)
        cost = rounds * (-(-n_steps // n_parts) + ITEM_COST) + MERGE_COST + PART_COST * n_items
        best = min(best, (cost, n_parts))
    return Split(n_split, best[1]) if best[1] > 1 and n_split else Split(0, 1)


# In what follows, work is (steps_ptr, n_heads, n_tiles, n_whole, n_parts), see the kernel. Only parts divide by numbers
# of parts and tiles: the first softmax of an item waits for this arithmetic, and nearly all items are whole tiles.


@gluon.jit
@no_type_check
def n_items(work):
    """Return the number of items."""
    _, _, n_tiles, n_whole, n_parts = work
    return n_whole + (n_tiles - n_whole) * n_parts


@gluon.jit
@no_type_check
def tile_and_part(item, work):
    """Return the tile of an item and which part of it: whole tiles come first, then part 0 of each of the others."""
    _, _, n_tiles, n_whole, _ = work
    tile = item
    part = item * 0
    if item >= n_whole:
        n_split = gl.maximum(n_tiles - n_whole, 1)
        tile = n_whole + (item - n_whole) % n_split
        part = (item - n_whole) // n_split
    return tile, part


@gluon.jit
@no_type_check
def load_steps(item, work):
    """Return the number of steps of an item's tile, 0 past the last item; to be loaded long before its use."""
    steps_ptr, n_heads, _, _, _ = work
    tile, _ = tile_and_part(item, work)
    query = tile // gl.cdiv(n_heads, HEADS)
    return gl.load(steps_ptr + query, mask=item < n_items(work), other=0)


@gluon.jit
@no_type_check
def span(item, steps, work):
    """Return the first step of an item and the one after its last: a tile's steps, divided evenly by its parts.

    They are equal for a part with no step, and past the last item; such a one is computed as a step of empty slots.
    """
    _, _, _, n_whole, n_parts = work
    first = item * 0
    end = steps
    if item >= n_whole:
        _, part = tile_and_part(item, work)
        first = part * steps // n_parts
        end = (part + 1) * steps // n_parts
    return first, end
