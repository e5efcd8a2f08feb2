"""Which rows a tile of the grouped product has, as tables of int32 that a kernel reads."""

import jax.numpy as jnp
from jaxtyping import Array, Int

ROW_UNIT = 8  # rows of a swizzle atom: TMA addresses bf16 rows in eights


def row_tiles(
    sizes_E: Int[Array, " E"], n_rows: int, tile: int
) -> tuple[Int[Array, "G 3"], Int[Array, " 1"]]:
    """Cut the rows of each group, and those past the last group, into tiles that no group shares.

    Args:
        sizes_E: Rows of each group; groups follow each other from row 0.
        n_rows: Rows in all.
        tile: Rows of a tile.

    Returns:
        (group, first row and number of rows of each tile, 1..tile, in the order of the rows; the group is E for the
        rows past the last one), and how many of the G entries are used.
    """
    n_groups = sizes_E.shape[0]
    sizes_E = sizes_E.astype(jnp.int32)
    rest = n_rows - jnp.sum(sizes_E, keepdims=True)
    sizes = jnp.concatenate([sizes_E, rest]).astype(jnp.int32)
    first_row = jnp.cumsum(sizes) - sizes
    n_tiles = -(-sizes // tile)
    ends = jnp.cumsum(n_tiles)
    # Each of the E + 1 runs of rows adds at most one tile that is not full.
    rank_G = jnp.arange(n_rows // tile + n_groups + 1, dtype=jnp.int32)
    # By comparing with all: one kernel on a GPU, where a binary search is a loop of launches.
    group_G = jnp.searchsorted(ends, rank_G, side="right", method="compare_all")
    group_G = jnp.minimum(group_G, n_groups)
    before_G = (rank_G - (ends - n_tiles)[group_G]) * tile
    left_G = jnp.clip(sizes[group_G] - before_G, 0, tile)
    table = jnp.stack([group_G, first_row[group_G] + before_G, left_G], axis=1)
    return table.astype(jnp.int32), ends[-1:].astype(jnp.int32)


def group_rows(sizes_E: Int[Array, " E"]) -> Int[Array, "E 2"]:
    """Return the first row and the number of rows of each group."""
    sizes_E = sizes_E.astype(jnp.int32)
    return jnp.stack([jnp.cumsum(sizes_E) - sizes_E, sizes_E], axis=1).astype(jnp.int32)


def spread_rows(
    sizes_E: Int[Array, " E"], n_rows: int
) -> tuple[Int[Array, " M"], Int[Array, " E"], int]:
    """Give each row a place such that every group starts at a multiple of ROW_UNIT.

    Args:
        sizes_E: Rows of each group.
        n_rows: Rows in all.

    Returns:
        (the new place of each row, the groups' sizes with their padding, the number of places).
    """
    n_groups = sizes_E.shape[0]
    sizes_E = sizes_E.astype(jnp.int32)
    padded_E = (-(-sizes_E // ROW_UNIT) * ROW_UNIT).astype(jnp.int32)
    row_M = jnp.arange(n_rows, dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E)
    group_M = jnp.searchsorted(ends_E, row_M, side="right", method="compare_all")
    zero = jnp.zeros(1, jnp.int32)
    moved = jnp.concatenate([zero, jnp.cumsum(padded_E - sizes_E)])  # by the padding before it
    n_places = -(-n_rows // ROW_UNIT) * ROW_UNIT + n_groups * ROW_UNIT
    return (row_M + moved[group_M]).astype(jnp.int32), padded_E, n_places
