"""Lightning indexer scores on TPU."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic_tpu
from pallas_kernels.fp8 import op as fp8_op
from pallas_kernels.mosaic_tpu import Ref

GROUP = 8  # queries whose heads make one product: their scores fill the sublanes of a register
HEAD_MULTIPLE = 32  # heads of a query fill whole tiles of any dtype
MAX_BLOCK_K = 1024
BLOCK_Q = 32


class Operands(NamedTuple):
    """What scores are computed from, in whole blocks.

    Attributes:
        q: Index queries, or e4m3 values.
        k: Index keys of the same dtype.
        w: float32 head weights, with the queries' scales in them.
        key_scale: float32 scale of each e4m3 key, a row; None for other keys.
    """

    q: Float[Array, "T J X"]
    k: Float[Array, "S X"]
    w: Float[Array, "T J"]
    key_scale: Float[Array, "1 S"] | None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a kernel is given."""
        return tuple(x for x in self if x is not None)


def check(q_TJX: Any, k_SX: Any) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take; shapes and dtypes are enough."""
    mosaic_tpu.check_floats(q_TJX, k_SX)
    if q_TJX.shape[-1] > mosaic_tpu.LANES:
        raise NotImplementedError(
            f"takes up to {mosaic_tpu.LANES} index dims, got {q_TJX.shape[-1]}"
        )


def keys_per_block(n_keys: int) -> int:
    """Return how many keys a step scores, a power of two."""
    return min(MAX_BLOCK_K, max(mosaic_tpu.LANES, 1 << (n_keys - 1).bit_length()))


def lay_out(
    q_TJX: Array, k_SX: Array, w_TJ: Array, n_queries: int, n_keys: int, *, fp8: bool = False
) -> Operands:
    """Append zeros: queries and keys up to whole blocks, heads of weight 0, dims up to a register's lanes.

    With `fp8` values become e4m3 with a power-of-two scale a row, as by `fp8.quantize`; exact for rows that
    `fp8.simulate` rounded.
    """
    key_scale = None
    if fp8:
        q_TJX, query_scale = fp8_op.quantize(q_TJX, block=q_TJX.shape[-1])
        k_SX, scale = fp8_op.quantize(k_SX, block=k_SX.shape[-1])
        w_TJ = w_TJ.astype(jnp.float32) * query_scale[..., 0]
        key_scale = jnp.pad(scale, ((0, n_keys - scale.shape[0]), (0, 0))).T
    heads = -q_TJX.shape[1] % HEAD_MULTIPLE
    dims = -q_TJX.shape[2] % mosaic_tpu.LANES
    q = jnp.pad(q_TJX, ((0, n_queries - q_TJX.shape[0]), (0, heads), (0, dims)))
    k = jnp.pad(k_SX, ((0, n_keys - k_SX.shape[0]), (0, dims)))
    w = jnp.pad(w_TJ.astype(jnp.float32), ((0, n_queries - w_TJ.shape[0]), (0, heads)))
    return Operands(q, k, w, key_scale)


def bounds_of(
    start: Array, end: Array, n_keys: int, n_queries: int
) -> tuple[Int[Array, "T 1"], Int[Array, "T 1"]]:
    """Clip ranges to the keys there are and append empty ones; one row for each query."""
    clipped = (jnp.clip(x, 0, n_keys).astype(jnp.int32) for x in (start, end))
    first, last = (mosaic_tpu.pad_rows(x, n_queries)[:, None] for x in clipped)
    return first, last


def score_group(
    q_GJX: Float[Array, "G J X"],
    k_SX: Float[Array, "S X"],
    w_GJ: Float[Array, "G J"],
    key_scale_1S: Float[Array, "1 S"] | None,
) -> Float[Array, "G S"]:
    """Score a tile of keys for a few queries, all heads in one product; scales are positive, so they come last."""
    n_queries, n_heads, dim = q_GJX.shape
    dots = mosaic_tpu.dot(q_GJX.reshape(n_queries * n_heads, dim), k_SX, mosaic_tpu.LAST_TO_LAST)
    positive = jnp.maximum(dots, 0.0).reshape(n_queries, n_heads, -1)
    summed = jnp.sum(positive * w_GJ[:, :, None], axis=1)
    return summed if key_scale_1S is None else summed * key_scale_1S


def in_range(first_key: Any, start: Array, end: Array, n_keys: int) -> Array:
    """Return which keys of a tile are in each query's range, keys on lanes."""
    key = first_key + lax.broadcasted_iota(jnp.int32, (start.shape[0], n_keys), 1)
    return (key >= start) & (key < end)


def _kernel(
    first: Ref, last: Ref, start: Ref, end: Ref, q: Ref, k: Ref, w: Ref, *rest: Ref
) -> None:
    """Step (query block, key block): score it; -inf outside the ranges."""
    *key_scale, out = rest
    i, j = pl.program_id(0), pl.program_id(1)
    used = (first[i] <= j) & (j < last[i])

    @pl.when(used)
    def score() -> None:
        @pl.loop(0, q.shape[0] // GROUP)
        def score_rows(g: Any) -> None:
            rows = pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)
            scores = score_group(
                q[rows], k[...], w[rows, :], key_scale[0][...] if key_scale else None
            )
            inside = in_range(j * k.shape[0], start[rows, :], end[rows, :], k.shape[0])
            out[rows, :] = jnp.where(inside, scores, -jnp.inf)

    @pl.when(~used)
    def skip() -> None:
        out[...] = jnp.full_like(out, -jnp.inf)


def _scores(
    q_TJX: Array, k_SX: Array, w_TJ: Array, start: Array, end: Array, *, fp8: bool
) -> Array:
    """Score one sequence."""
    n_queries, n_keys = q_TJX.shape[0], k_SX.shape[0]
    block_k = keys_per_block(n_keys)
    padded = (mosaic_tpu.round_up(n_queries, BLOCK_Q), mosaic_tpu.round_up(n_keys, block_k))
    operands = lay_out(q_TJX, k_SX, w_TJ, *padded, fp8=fp8)
    first, last = bounds_of(start, end, n_keys, padded[0])
    spans = mosaic_tpu.key_spans(first[:, 0], last[:, 0], BLOCK_Q, block_k)
    n_heads, dim = operands.q.shape[1:]

    def of_key(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        # Blocks outside the span are not loaded; the nearest one stays.
        return jnp.clip(j, first[i], jnp.maximum(last[i] - 1, first[i])), 0

    def of_query(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return i, 0

    def of_scale(*place: Any) -> tuple:
        return of_key(*place)[::-1]

    scale = [] if operands.key_scale is None else [pl.BlockSpec((1, block_k), of_scale)]
    bound = pl.BlockSpec((BLOCK_Q, 1), of_query)
    out = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(padded[0] // BLOCK_Q, padded[1] // block_k),
            in_specs=[
                bound,
                bound,
                pl.BlockSpec((BLOCK_Q, n_heads, dim), lambda i, j, first, last: (i, 0, 0)),
                pl.BlockSpec((block_k, dim), of_key),
                pl.BlockSpec((BLOCK_Q, n_heads), of_query),
                *scale,
            ],
            out_specs=pl.BlockSpec((BLOCK_Q, block_k), lambda i, j, first, last: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct(padded, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=cost(operands, math.prod(padded) * 4),
        name="indexer_scores",
    )(*spans, first, last, *operands.arrays)
    return out[:n_queries, :n_keys]


def cost(operands: Operands, more_bytes: int) -> pl.CostEstimate:
    """Return what scoring all keys for all queries costs."""
    loaded = mosaic_tpu.total_bytes(*operands.arrays)
    pairs = math.prod(operands.q.shape) * operands.k.shape[0]
    return pl.CostEstimate(flops=2 * pairs, transcendentals=0, bytes_accessed=loaded + more_bytes)


def scores(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    *,
    fp8: bool = False,
) -> Float[Array, "*B T S"]:
    """Score as `op.indexer_scores` does, one sequence of a batch after the other; has no derivative of its own.

    Products accumulate in float32. The heads are added in another order than the definition's, so scores may differ
    from it in their last bits.

    Args:
        q_TJX: Index queries, bfloat16 or float32.
        k_SX: Index keys of the same dtype.
        w_TJ: Head weights.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        fp8: Multiply e4m3 values, see `lay_out`; tpu7x has such products, the compilers for v5p and v6e widen them.

    Returns:
        float32 scores, -inf outside [start, end).

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_TJX, k_SX)
    arrays = (q_TJX, k_SX, w_TJ, start, end)
    score = functools.partial(_scores, fp8=fp8)
    return dispatch.each_sequence(lambda x: score(*x), arrays, q_TJX.ndim - 3)
