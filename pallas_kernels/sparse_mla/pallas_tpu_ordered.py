"""Rows added to the keys that they belong to on TPU, the same bits every time.

XLA may add rows of one key in any order, on tpu7x on many subcores at once. Here the rows are sorted by key and, of one
key, by their place; a kernel then goes through them tile by tile and adds to each block of keys what the tile has for
it, by a product with the 0 and 1 that say which row is whose. Every sum is one core's, in an order that only the keys
decide.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import Ref

KEYS, ROWS = 128, 256  # of a block of sums, and of a tile of sorted rows


class Visits(NamedTuple):
    """Which tile of rows meets which block of keys at each step; both only ever go up.

    Attributes:
        tile: int32 [V].
        block: int32 [V].
        n: int32 [1], how many there are; the steps after them repeat the last one's places and add nothing.
    """

    tile: Int[Array, " V"]
    block: Int[Array, " V"]
    n: Int[Array, " 1"]


def list_visits(keys_P: Int[Array, " P"], n_keys: int) -> Visits:
    """Pair the tiles of sorted rows with the blocks of keys that they have rows of, and with those between.

    Args:
        keys_P: int32, ascending; those outside [0, n_keys) are past the end.
        n_keys: Multiple of KEYS.
    """
    first, last = (jnp.minimum(keys_P.reshape(-1, ROWS)[:, i], n_keys - 1) // KEYS for i in (0, -1))
    upto = jnp.cumsum(last - first + 1)
    before = upto - (last - first + 1)
    step = jnp.arange(len(first) + n_keys // KEYS - 1, dtype=jnp.int32)
    tile = jnp.sum(before <= step[:, None], axis=1, dtype=jnp.int32) - 1
    block = jnp.minimum(first[tile] + step - before[tile], last[tile])
    return Visits(tile, block, upto[-1:])


def _kernel(tile: Ref, block: Ref, n: Ref, keys: Ref, rows: Ref, before: Ref, after: Ref) -> None:
    """Step i: add the rows of a tile that belong to a block of keys."""
    del tile
    i = pl.program_id(0)
    here = block[i]

    @pl.when((i == 0) | (here != block[jnp.maximum(i - 1, 0)]))
    def begin() -> None:
        after[...] = before[...]

    @pl.when(i < n[0])
    def add() -> None:
        key = here * KEYS + lax.broadcasted_iota(jnp.int32, (KEYS, ROWS), 0)
        belongs = jnp.where(keys[0] == key, 1.0, 0.0)
        after[...] += mosaic_tpu.dot(belongs, rows[...], mosaic_tpu.ROWS_BY_COLUMNS)


def add_rows(
    sums_SW: Float[Array, "S W"], keys_P: Int[Array, " P"], rows_PW: Float[Array, "P W"]
) -> Float[Array, "S W"]:
    """Return `sums[s] + sum of rows[p] over keys[p] = s`, float32.

    A row that is not finite also reaches other keys of its block.

    Args:
        sums_SW: float32, S a multiple of KEYS and W of 128.
        keys_P: int32 in [0, S).
        rows_PW: float32.

    Returns:
        The sums. They depend on the order of a key's rows, and on nothing else that could differ between runs.
    """
    (n_keys, width), n_rows = sums_SW.shape, len(keys_P)
    # One total order: of equal keys the place decides.
    keys, place = lax.sort((keys_P, jnp.arange(n_rows, dtype=jnp.int32)), num_keys=2)
    extra = -n_rows % ROWS
    keys = jnp.pad(keys, (0, extra), constant_values=n_keys)
    rows = rows_PW[jnp.pad(place, (0, extra))]
    visits = list_visits(keys, n_keys)
    n_visits = len(visits.tile)

    sums = pl.BlockSpec((KEYS, width), lambda i, tile, block, n: (block[i], 0))
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(n_visits,),
            in_specs=[
                pl.BlockSpec((1, 1, ROWS), lambda i, tile, block, n: (tile[i], 0, 0)),
                pl.BlockSpec((ROWS, width), lambda i, tile, block, n: (tile[i], 0)),
                sums,
            ],
            out_specs=sums,
        ),
        out_shape=jax.ShapeDtypeStruct(sums_SW.shape, jnp.float32),
        input_output_aliases={len(visits) + 2: 0},  # blocks without rows stay as they are
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_visits * KEYS * ROWS * width,
            transcendentals=0,
            bytes_accessed=4 * width * (n_rows + 2 * n_keys),
        ),
        name="add_rows_in_order",
    )(*visits, keys.reshape(-1, 1, ROWS), rows, sums_SW)
