"""Lightning indexer scores on TPU."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic_tpu
from pallas_kernels.mosaic_tpu import Ref

GROUP = 8  # queries whose heads make one product: their scores fill the sublanes of a register
HEAD_MULTIPLE = 16  # heads of a query fill whole tiles of bfloat16
MAX_BLOCK_K = 1024
BLOCK_Q = 32


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
    q_TJX: Array, k_SX: Array, w_TJ: Array, n_queries: int, n_keys: int
) -> tuple[Array, Array, Array]:
    """Append zeros: queries and keys up to whole blocks, heads of weight 0, dims up to a register's lanes."""
    heads = -q_TJX.shape[1] % HEAD_MULTIPLE
    dims = -q_TJX.shape[2] % mosaic_tpu.LANES
    q = jnp.pad(q_TJX, ((0, n_queries - q_TJX.shape[0]), (0, heads), (0, dims)))
    k = jnp.pad(k_SX, ((0, n_keys - k_SX.shape[0]), (0, dims)))
    w = jnp.pad(w_TJ.astype(jnp.float32), ((0, n_queries - w_TJ.shape[0]), (0, heads)))
    return q, k, w


def bounds_of(
    start: Array, end: Array, n_keys: int, n_queries: int
) -> tuple[Int[Array, "T 1"], Int[Array, "T 1"]]:
    """Clip ranges to the keys there are and append empty ones; one row for each query."""
    clipped = (jnp.clip(x, 0, n_keys).astype(jnp.int32) for x in (start, end))
    first, last = (mosaic_tpu.pad_rows(x, n_queries)[:, None] for x in clipped)
    return first, last


def score_group(
    q_GJX: Float[Array, "G J X"], k_SX: Float[Array, "S X"], w_GJ: Float[Array, "G J"]
) -> Float[Array, "G S"]:
    """Score a tile of keys for a few queries, all heads in one product."""
    n_queries, n_heads, dim = q_GJX.shape
    dots = mosaic_tpu.dot(q_GJX.reshape(n_queries * n_heads, dim), k_SX, mosaic_tpu.LAST_TO_LAST)
    positive = jnp.maximum(dots, 0.0).reshape(n_queries, n_heads, -1)
    return jnp.sum(positive * w_GJ[:, :, None], axis=1)


def in_range(first_key: Any, start: Array, end: Array, n_keys: int) -> Array:
    """Return which keys of a tile are in each query's range, keys on lanes."""
    key = first_key + lax.broadcasted_iota(jnp.int32, (start.shape[0], n_keys), 1)
    return (key >= start) & (key < end)


def _kernel(first: Ref, last: Ref, start: Ref, end: Ref, q: Ref, k: Ref, w: Ref, out: Ref) -> None:
    """Step (query block, key block): score it; -inf outside the ranges."""
    i, j = pl.program_id(0), pl.program_id(1)
    used = (first[i] <= j) & (j < last[i])

    @pl.when(used)
    def score() -> None:
        @pl.loop(0, q.shape[0] // GROUP)
        def score_rows(g: Any) -> None:
            rows = pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)
            scores = score_group(q[rows], k[...], w[rows, :])
            inside = in_range(j * k.shape[0], start[rows, :], end[rows, :], k.shape[0])
            out[rows, :] = jnp.where(inside, scores, -jnp.inf)

    @pl.when(~used)
    def skip() -> None:
        out[...] = jnp.full_like(out, -jnp.inf)


def _scores(q_TJX: Array, k_SX: Array, w_TJ: Array, start: Array, end: Array) -> Array:
    """Score one sequence."""
    n_queries, n_keys = q_TJX.shape[0], k_SX.shape[0]
    block_k = keys_per_block(n_keys)
    padded = (mosaic_tpu.round_up(n_queries, BLOCK_Q), mosaic_tpu.round_up(n_keys, block_k))
    q, k, w = lay_out(q_TJX, k_SX, w_TJ, *padded)
    first, last = bounds_of(start, end, n_keys, padded[0])
    spans = mosaic_tpu.key_spans(first[:, 0], last[:, 0], BLOCK_Q, block_k)
    n_heads, dim = q.shape[1:]

    def of_key(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        # Blocks outside the span are not loaded; the nearest one stays.
        return jnp.clip(j, first[i], jnp.maximum(last[i] - 1, first[i])), 0

    def of_query(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return i, 0

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
            ],
            out_specs=pl.BlockSpec((BLOCK_Q, block_k), lambda i, j, first, last: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct(padded, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=cost(q, k, math.prod(padded) * 4),
        name="indexer_scores",
    )(*spans, first, last, q, k, w)
    return out[:n_queries, :n_keys]


def cost(q_TJX: Array, k_SX: Array, more_bytes: int) -> pl.CostEstimate:
    """Return what scoring all keys for all queries costs."""
    loaded = sum(math.prod(x.shape) * x.dtype.itemsize for x in (q_TJX, k_SX))
    pairs = math.prod(q_TJX.shape) * k_SX.shape[0]
    return pl.CostEstimate(flops=2 * pairs, transcendentals=0, bytes_accessed=loaded + more_bytes)


def scores(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
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

    Returns:
        float32 scores, -inf outside [start, end).

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_TJX, k_SX)
    arrays = (q_TJX, k_SX, w_TJ, start, end)
    return dispatch.each_sequence(lambda x: _scores(*x), arrays, q_TJX.ndim - 3)
