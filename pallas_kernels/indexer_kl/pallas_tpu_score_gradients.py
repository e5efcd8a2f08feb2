"""Derivative of the lightning indexer's scores on TPU, given their cotangent.

Products of a tile are kept transposed, keys on sublanes and queries on lanes, so that a head's weights are a row.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic_tpu
from pallas_kernels.indexer_scores import pallas_tpu as scoring
from pallas_kernels.mosaic_tpu import Ref

BLOCK_Q, MAX_BLOCK_K = 128, 512


def _head(refs: tuple[Ref, ...], d_scores: Array, j: Any) -> tuple[Array, Array, Array]:
    """Return a head's queries, its positive products [keys, queries] and the cotangent where they are."""
    q, k = refs
    dots = mosaic_tpu.dot(k[...], q[j], mosaic_tpu.LAST_TO_LAST)
    return q[j], dots, jnp.where(dots > 0, d_scores, 0.0)


def _query_kernel(
    first: Ref, last: Ref, q: Ref, k: Ref, k_turned: Ref, w: Ref, d_scores: Ref, d_q: Ref, d_w: Ref
) -> None:
    """Step (query block, j): add what the j-th block of keys gives to the gradients of queries and weights."""
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def begin() -> None:
        d_q[...] = jnp.zeros_like(d_q)
        d_w[...] = jnp.zeros_like(d_w)

    @pl.when(first[i] + j < last[i])
    def step() -> None:
        turned = d_scores[...].T

        @pl.loop(0, q.shape[0])
        def add_head(h: Any) -> None:
            _, dots, slopes = _head((q, k), turned, h)
            d_w[h] += jnp.sum(slopes * dots, axis=0, keepdims=True)
            weighted = (slopes * w[h]).astype(k.dtype)
            d_q[h] += mosaic_tpu.dot(k_turned[...], weighted, mosaic_tpu.ROWS_BY_COLUMNS)


def _key_kernel(
    first: Ref, last: Ref, q: Ref, k: Ref, k_turned: Ref, w: Ref, d_scores: Ref, d_k: Ref
) -> None:
    """Step (key block, j): add what the j-th block of queries gives to the gradient of keys."""
    del k_turned
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def begin() -> None:
        d_k[...] = jnp.zeros_like(d_k)

    @pl.when(first[i] + j < last[i])
    def step() -> None:
        turned = d_scores[...].T

        @pl.loop(0, q.shape[0])
        def add_head(h: Any) -> None:
            q_head, _, slopes = _head((q, k), turned, h)
            weighted = (slopes * w[h]).astype(k.dtype)
            d_k[...] += mosaic_tpu.dot(weighted, q_head, mosaic_tpu.ROWS_BY_COLUMNS)


def _call(
    arrays: tuple[Array, ...], spans: mosaic_tpu.Spans, of_keys: bool, block_k: int
) -> tuple[Array, ...]:
    """Run the kernel of keys, or that of queries and weights."""
    q_JTX, k_SX = arrays[:2]
    (n_heads, n_queries, dim), n_keys = q_JTX.shape, k_SX.shape[0]
    blocks = (n_queries // BLOCK_Q, n_keys // block_k)

    def place(i: Any, j: Any, first: Ref, last: Ref) -> tuple[Any, Any]:
        """Blocks of queries and of keys that a step works on."""
        inner = mosaic_tpu.block_of_step(first, last, i, j)
        return (inner, i) if of_keys else (i, inner)

    def of_query(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return 0, place(i, j, first, last)[0], 0

    def of_query_lanes(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return 0, 0, place(i, j, first, last)[0]

    def of_key(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return place(i, j, first, last)[1], 0

    def of_key_lanes(i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return 0, place(i, j, first, last)[1]

    row = pl.BlockSpec((n_heads, 1, BLOCK_Q), of_query_lanes)
    keys = pl.BlockSpec((block_k, dim), of_key)
    shapes: tuple[tuple[int, ...], ...] = (k_SX.shape,)
    out_specs = [keys]
    if not of_keys:
        shapes = (n_heads, dim, n_queries), (n_heads, 1, n_queries)
        out_specs = [pl.BlockSpec((n_heads, dim, BLOCK_Q), of_query_lanes), row]
    results = pl.pallas_call(
        _key_kernel if of_keys else _query_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=blocks[::-1] if of_keys else blocks,
            in_specs=[
                pl.BlockSpec((n_heads, BLOCK_Q, dim), of_query),
                keys,
                pl.BlockSpec((dim, block_k), of_key_lanes),
                row,
                pl.BlockSpec((BLOCK_Q, block_k), place),
            ],
            out_specs=out_specs,
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * n_heads * n_queries * n_keys * dim,
            transcendentals=0,
            bytes_accessed=mosaic_tpu.total_bytes(*arrays) + 4 * sum(map(math.prod, shapes)),
        ),
        name="indexer_key_gradient" if of_keys else "indexer_query_gradient",
    )(*spans, *arrays)
    return tuple(results)


def _gradients(
    q: Array, k: Array, w: Array, d_scores: Array, start: Array, end: Array
) -> tuple[Array, Array, Array]:
    """Differentiate one sequence."""
    n_queries, n_heads, dim = q.shape
    n_keys = k.shape[0]
    block_k = min(MAX_BLOCK_K, scoring.keys_per_block(n_keys))
    sizes = mosaic_tpu.round_up(n_queries, BLOCK_Q), mosaic_tpu.round_up(n_keys, block_k)
    padded_q, padded_k, padded_w, _ = scoring.lay_out(q, k, w, *sizes)
    extra = sizes[0] - n_queries, sizes[1] - n_keys
    arrays = (
        jnp.swapaxes(padded_q, 0, 1),
        padded_k,
        padded_k.T,
        padded_w.T[:, None],
        jnp.pad(d_scores, ((0, extra[0]), (0, extra[1]))),
    )
    first, last = scoring.bounds_of(start, end, n_keys, sizes[0])
    spans = mosaic_tpu.key_spans(first[:, 0], last[:, 0], BLOCK_Q, block_k)
    by_key = mosaic_tpu.query_spans(spans, sizes[1] // block_k)
    d_q, d_w = _call(arrays, spans, False, block_k)
    d_k = _call(arrays, by_key, True, block_k)[0]
    d_q = jnp.transpose(d_q, (2, 0, 1))[:n_queries, :n_heads, :dim]
    return d_q, d_k[:n_keys, :dim], d_w[:n_heads, 0, :n_queries].T


def score_gradients(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    d_scores_TS: Float[Array, "*B T S"],
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
) -> tuple[Float[Array, "*B T J X"], Float[Array, "*B S X"], Float[Array, "*B T J"]]:
    """Differentiate the scores, of one sequence of a batch after the other.

    `dq = sum_s g w k`, `dk = sum_t,j g w q`, `dw = sum_s g q.k`, with g = d_scores where q.k > 0 and 0 elsewhere. Each
    sum has one order, so results repeat bit for bit.

    Args:
        q_TJX: Index queries, bfloat16 or float32.
        k_SX: Index keys of the same dtype.
        w_TJ: Head weights.
        d_scores_TS: float32 cotangent, 0 outside the ranges; rounded to the dtype of `k` before it is multiplied.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.

    Returns:
        float32 gradients of q, k and w.
    """
    arrays = (q_TJX, k_SX, w_TJ, d_scores_TS, start, end)
    return dispatch.each_sequence(lambda x: _gradients(*x), arrays, q_TJX.ndim - 3)
