"""Exact top-k selection on TPU, of given scores or fused with scoring: no row of scores leaves VMEM."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.indexer_scores import pallas_tpu as scoring
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.topk_select import pallas_tpu_search as search

Form = Literal["mask", "list"]
MAX_KEYS = 2**18  # 32 rows of keys and, twice, of the mask: 48 MiB of VMEM
MAX_SLOTS = 2**13
MAX_ROWS = 128
TILE_ROWS = {"mask": 32, "list": 8}  # of int8 and int32
KEY_BYTES = 2**24  # of VMEM


def check(n_keys: int, k: int) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    if n_keys == 0:
        raise NotImplementedError("an axis of length 0")
    if n_keys > MAX_KEYS:
        raise NotImplementedError(f"takes up to {MAX_KEYS} keys, got {n_keys}")
    if k > MAX_SLOTS:
        raise NotImplementedError(f"takes k up to {MAX_SLOTS}, got {k}")


def rows_per_block(n_rows: int, n_keys: int, form: Form) -> int:
    """Return how many rows are selected at once: more read the keys less often, fewer fit longer rows.

    Few rows, as in decoding, get no more than they fill; the bound on VMEM allows 32 rows of MAX_KEYS.
    """
    rows = MAX_ROWS
    while rows > 32 and rows * n_keys * 4 > KEY_BYTES:
        rows //= 2
    return min(rows, mosaic_tpu.round_up(n_rows, TILE_ROWS[form]))


def _kernel(
    first: Ref, last: Ref, start: Ref, end: Ref, *rest: Ref, k: int, form: Form, block: int
) -> None:
    """Step (row block, j): order the j-th tile of the rows' span; after the last one select."""
    *inputs, out, keys = rest
    i, j = pl.program_id(0), pl.program_id(1)
    tile = first[i] + j

    @pl.when(tile < last[i])
    def order() -> None:
        column = pl.multiple_of(tile * block, LANES)
        if len(inputs) == 1:
            inside = scoring.in_range(column, start[...], end[...], block)
            keys[:, pl.ds(column, block)] = search.sortable(inputs[0][...], inside)
        else:
            score_tile(keys, (start, end), inputs, column)

    @pl.when(j == pl.num_programs(1) - 1)
    def select() -> None:
        finish = _write_mask if form == "mask" else write_list
        finish(out, keys, (first[i], last[i]), block, k)


def score_tile(keys: Ref, bounds: tuple[Ref, Ref], inputs: list[Ref], column: Any) -> None:
    """Score a tile of keys for all rows, a few at a time."""
    q, k, w, *key_scale = inputs
    start, end = bounds
    block = k.shape[0]

    @pl.loop(0, q.shape[0] // scoring.GROUP)
    def score_rows(g: Any) -> None:
        rows = pl.ds(pl.multiple_of(g * scoring.GROUP, scoring.GROUP), scoring.GROUP)
        scores = scoring.score_group(
            q[rows], k[...], w[rows, :], key_scale[0][...] if key_scale else None
        )
        inside = scoring.in_range(column, start[rows, :], end[rows, :], block)
        keys[rows, pl.ds(column, block)] = search.sortable(scores, inside)


def _write_mask(out: Ref, keys: Ref, tiles: tuple[Any, Any], block: int, k: int) -> None:
    """Write 1 at the chosen keys."""
    out[...] = jnp.zeros_like(out)

    def emit(column: Any, chosen: Array, rank: Array) -> None:
        del rank
        out[:, pl.ds(column, LANES)] = jnp.where(chosen, 1, 0).astype(out.dtype)

    search.choose(keys, tiles, block, k, emit)


def write_list(out: Ref, keys: Ref, tiles: tuple[Any, Any], block: int, k: int) -> None:
    """Write the chosen keys' indices in ascending order, then -1."""
    base, n_columns = tiles[0] * block, (tiles[1] - tiles[0]) * block
    lane = jax.lax.broadcasted_iota(jnp.int32, (keys.shape[0], LANES), 1)

    def emit(column: Any, chosen: Array, rank: Array) -> None:
        # How far to move left: a key's index is where it ends plus how far it moved.
        distance = column - base + lane - rank
        keys[:, pl.ds(column, LANES)] = jnp.where(chosen, distance, search.NOTHING)

    search.choose(keys, tiles, block, k, emit)
    search.move_left(keys, base, n_columns, block, k)
    for c in range(0, out.shape[1], LANES):
        column = jnp.minimum(base + c, keys.shape[1] - LANES)
        distance = keys[:, pl.ds(pl.multiple_of(column, LANES), LANES)]
        held = (distance >= 0) & (c < n_columns)
        out[:, c : c + LANES] = jnp.where(held, base + c + lane + distance, search.NOTHING)


def _call(
    inputs: tuple[Array, ...],
    specs: Callable[[int, int], list[pl.BlockSpec]],
    bounds: tuple[Array, Array],
    sizes: tuple[int, int],
    k: int,
    form: Form,
    cost: pl.CostEstimate,
) -> Array:
    """Run the kernel on whole blocks; `sizes` are the padded rows and keys."""
    n_rows, n_keys = sizes
    rows, block = rows_per_block(n_rows, n_keys, form), scoring.keys_per_block(n_keys)
    slots = mosaic_tpu.round_up(k, LANES)
    width, dtype = (n_keys, jnp.int8) if form == "mask" else (slots, jnp.int32)
    spans = mosaic_tpu.key_spans(bounds[0][:, 0], bounds[1][:, 0], rows, block)
    bound = pl.BlockSpec((rows, 1), lambda i, j, first, last: (i, 0))
    return pl.pallas_call(
        functools.partial(_kernel, k=k, form=form, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n_rows // rows, n_keys // block),
            in_specs=[bound, bound, *specs(rows, block)],
            out_specs=pl.BlockSpec((rows, width), lambda i, j, first, last: (i, 0)),
            scratch_shapes=[pltpu.VMEM((rows, n_keys + LANES), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((n_rows, width), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=cost,
        name=f"topk_{form}",
    )(*spans, *bounds, *inputs)


def _of_query(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
    return i, 0


def _sizes(n_rows: int, n_keys: int, form: Form) -> tuple[int, int]:
    """Return rows and keys padded to whole blocks."""
    padded = mosaic_tpu.round_up(n_keys, scoring.keys_per_block(n_keys))
    return mosaic_tpu.round_up(n_rows, rows_per_block(n_rows, padded, form)), padded


def topk_select(
    scores_TS: Float[Array, "T S"], *, k: int, start: Int[Array, " T"], end: Int[Array, " T"]
) -> Int[Array, "T K"]:
    """Select as `op.topk_select` does, bit for bit.

    Args:
        scores_TS: float32 scores.
        k: Slots of each row.
        start: int32, first valid key of each row.
        end: int32, one past the last valid key.

    Returns:
        int32 key indices in ascending order, then -1.

    Raises:
        NotImplementedError: As `check`.
    """
    n_rows, n_keys = scores_TS.shape
    check(n_keys, k)
    sizes = _sizes(n_rows, n_keys, "list")
    padded = jnp.pad(scores_TS, ((0, sizes[0] - n_rows), (0, sizes[1] - n_keys)))

    def specs(rows: int, block: int) -> list[pl.BlockSpec]:
        def of_tile(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
            return i, mosaic_tpu.block_of_step(first, last, i, j)

        return [pl.BlockSpec((rows, block), of_tile)]

    bounds = scoring.bounds_of(start, end, n_keys, sizes[0])
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * math.prod(sizes))
    return _call((padded,), specs, bounds, sizes, k, "list", cost)[:n_rows, :k]


def _fused(
    arrays: tuple[Array, Array, Array],
    bounds: tuple[Array, Array],
    k: int,
    form: Form,
    fp8: bool,
) -> Array:
    """Score and select; padded rows and columns are still there."""
    n_rows, n_keys = arrays[0].shape[0], arrays[1].shape[0]
    check(n_keys, k)
    scoring.check(*arrays[:2])
    sizes = _sizes(n_rows, n_keys, form)
    operands = scoring.lay_out(*arrays, *sizes, fp8=fp8)
    n_heads, dim = operands.q.shape[1:]

    def specs(rows: int, block: int) -> list[pl.BlockSpec]:
        def of_tile(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
            return mosaic_tpu.block_of_step(first, last, i, j), 0

        def of_scale(*place: Any) -> tuple:
            return of_tile(*place)[::-1]

        return [
            pl.BlockSpec((rows, n_heads, dim), lambda i, j, first, last: (i, 0, 0)),
            pl.BlockSpec((block, dim), of_tile),
            pl.BlockSpec((rows, n_heads), _of_query),
            *([] if operands.key_scale is None else [pl.BlockSpec((1, block), of_scale)]),
        ]

    clipped = scoring.bounds_of(*bounds, n_keys, sizes[0])
    written = sizes[0] * (sizes[1] if form == "mask" else 4 * k)
    cost = scoring.cost(operands, written)
    return _call(operands.arrays, specs, clipped, sizes, k, form, cost)


def indexer_topk(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    *,
    k: int,
    start: Int[Array, " T"],
    end: Int[Array, " T"],
    fp8: bool = False,
) -> Int[Array, "T K"]:
    """Select the k best keys of each query by indexer score, exactly by the scores of `pallas_tpu.scores`.

    Args:
        q_TJX: Index queries, bfloat16 or float32.
        k_SX: Index keys of the same dtype.
        w_TJ: Head weights with the scales folded in.
        k: Slots of each row.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        fp8: Score by e4m3 values, see `indexer_scores.pallas_tpu.lay_out`.

    Returns:
        int32 key indices in ascending order, then -1.

    Raises:
        NotImplementedError: As `check` and `indexer_scores.pallas_tpu.check`.
    """
    return _fused((q_TJX, k_SX, w_TJ), (start, end), k, "list", fp8)[: q_TJX.shape[0], :k]


def indexer_topk_mask(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    *,
    k: int,
    start: Int[Array, " T"],
    end: Int[Array, " T"],
    fp8: bool = False,
) -> Bool[Array, "T S"]:
    """Mark the keys that `indexer_topk` lists; takes the same arguments and raises the same errors."""
    mask = _fused((q_TJX, k_SX, w_TJ), (start, end), k, "mask", fp8)
    return mask[: q_TJX.shape[0], : k_SX.shape[0]] != 0
