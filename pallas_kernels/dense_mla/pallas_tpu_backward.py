"""Flash attention over a range of keys on TPU: the gradient kernels.

Weights are computed again from the log-sum-exp: once for the queries' gradient, summed over blocks of keys, and once
for the keys' and values', summed over blocks of queries. No sum is shared between steps of a parallel axis, so the
gradients are the same bits every time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.dense_mla.pallas_tpu_forward import Config, allowed_pairs
from pallas_kernels.mosaic_tpu import Ref


def _weights_and_slopes(
    refs: tuple[Ref, ...], allowed: Array, h: int, scale: float
) -> tuple[Array, Array]:
    """Return a head's weights and the derivative by its logits without `scale`, [keys, queries]."""
    q, k, v, d_out, lse, delta = refs
    logits = mosaic_tpu.dot(k[h], q[h], mosaic_tpu.LAST_TO_LAST) * scale
    # A masked pair gives 0 whatever the log-sum-exp, which is 0 for an empty row.
    weights = jnp.exp(jnp.where(allowed, logits, mosaic_tpu.MASKED) - lse[h])
    d_weights = mosaic_tpu.dot(v[h], d_out[h], mosaic_tpu.LAST_TO_LAST)
    return weights, weights * (d_weights - delta[h])


def _query_kernel(
    first: Ref, last: Ref, start: Ref, end: Ref, *rest: Ref, scale: float, n_masks: int
) -> None:
    """Step (head group, query block, j): add what the j-th block of keys gives to the queries' gradient."""
    refs, masks, (d_q, acc) = rest[:6], rest[6 : 6 + n_masks], rest[6 + n_masks :]
    k = refs[1]
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    @pl.when(first[i] + j < last[i])
    def step() -> None:
        block_k = k.shape[1]
        mask = masks[0] if masks else None
        allowed = allowed_pairs(start[...], end[...], (first[i] + j) * block_k, mask, block_k)
        for h in range(k.shape[0]):
            _, slopes = _weights_and_slopes(refs, allowed, h, scale)
            acc[h] += mosaic_tpu.dot(k[h], slopes.astype(k.dtype), mosaic_tpu.FIRST_TO_FIRST)

    @pl.when(j == pl.num_programs(2) - 1)
    def finish() -> None:
        for h in range(k.shape[0]):
            d_q[h] = (acc[h] * scale).T.astype(d_q.dtype)


def _key_kernel(
    first: Ref, last: Ref, first_key: Ref, last_key: Ref, *rest: Ref, scale: float, n_masks: int
) -> None:
    """Step (head group, key block, j): add what the j-th block of queries gives to the keys' and values' gradient."""
    (start, end), refs, masks = rest[:2], rest[2:8], rest[8 : 8 + n_masks]
    d_k, d_v, k_acc, v_acc = rest[8 + n_masks :]
    q, k, _, d_out, _, _ = refs
    i, j = pl.program_id(1), pl.program_id(2)
    block = mosaic_tpu.block_of_step(first, last, i, j)

    @pl.when(j == 0)
    def begin() -> None:
        k_acc[...] = jnp.zeros_like(k_acc)
        v_acc[...] = jnp.zeros_like(v_acc)

    # Between the first and the last block of queries some may read no key of this block.
    reads = (first_key[block] <= i) & (i < last_key[block])

    @pl.when((first[i] + j < last[i]) & reads)
    def step() -> None:
        block_k = k.shape[1]
        mask = masks[0] if masks else None
        allowed = allowed_pairs(start[...], end[...], i * block_k, mask, block_k)
        for h in range(k.shape[0]):
            weights, slopes = _weights_and_slopes(refs, allowed, h, scale)
            v_acc[h] += mosaic_tpu.dot(
                weights.astype(d_out.dtype), d_out[h], mosaic_tpu.ROWS_BY_COLUMNS
            )
            k_acc[h] += mosaic_tpu.dot(slopes.astype(q.dtype), q[h], mosaic_tpu.ROWS_BY_COLUMNS)

    @pl.when(j == pl.num_programs(2) - 1)
    def finish() -> None:
        d_k[...] = (k_acc[...] * scale).astype(d_k.dtype)
        d_v[...] = v_acc[...].astype(d_v.dtype)


def backward(
    arrays: tuple[Array, ...],
    start_1T: Int[Array, "1 T"],
    end_1T: Int[Array, "1 T"],
    mask_ST: Int[Array, "S T"] | None,
    *,
    scale: float,
    config: Config,
) -> tuple[Float[Array, "H T D"], Float[Array, "H S D"], Float[Array, "H S U"]]:
    """Return the gradients of queries, keys and values.

    Args:
        arrays: q [H, T, D], k [H, S, D], v [H, S, U], d_out [H, T, U], lse and delta float32 [H, 1, T], where
            `delta = sum_u out * d_out - d_lse`; lse is 0 for an empty row.
        start_1T: int32, first key of each query.
        end_1T: int32, one past the last.
        mask_ST: int8, not 0 where a key may be read.
        scale: Factor on the logits.
        config: The tiles of `forward`.

    Returns:
        (dq, dk, dv) in the dtypes of q, k and v.
    """
    bounds = (start_1T, end_1T)
    masks = () if mask_ST is None else (mask_ST,)
    by_query = mosaic_tpu.key_spans(start_1T[0], end_1T[0], config.block_q, config.block_k)
    by_key = mosaic_tpu.query_spans(by_query, arrays[1].shape[1] // config.block_k)
    d_q = _call(arrays, bounds, masks, by_query, (), scale, config)[0]
    d_k, d_v = _call(arrays, bounds, masks, by_key, tuple(by_query), scale, config)
    return d_q, d_k, d_v


def _call(
    arrays: tuple[Array, ...],
    bounds: tuple[Array, Array],
    masks: tuple[Array, ...],
    spans: mosaic_tpu.Spans,
    others: tuple[Array, ...],
    scale: float,
    config: Config,
) -> tuple[Array, ...]:
    """Run the kernel of queries, or with `others`, the spans of queries, that of keys."""
    q, k, v = arrays[:3]
    (n_heads, n_queries, dim), (n_keys, value_dim) = q.shape, v.shape[1:]
    block_q, block_k, heads = config.block_q, config.block_k, config.heads
    n_blocks = (n_queries // block_q, n_keys // block_k)
    of_keys = bool(others)

    def blocks(i: Any, j: Any, first: Ref, last: Ref) -> tuple[Any, Any]:
        """Blocks of queries and of keys that a step works on."""
        inner = mosaic_tpu.block_of_step(first, last, i, j)
        return (inner, i) if of_keys else (i, inner)

    def of_query(h: Any, i: Any, j: Any, first: Ref, last: Ref, *_: Ref) -> tuple:
        return h, blocks(i, j, first, last)[0], 0

    def of_key(h: Any, i: Any, j: Any, first: Ref, last: Ref, *_: Ref) -> tuple:
        return h, blocks(i, j, first, last)[1], 0

    def of_row(h: Any, i: Any, j: Any, first: Ref, last: Ref, *_: Ref) -> tuple:
        return 0, blocks(i, j, first, last)[0]

    def of_head_row(h: Any, i: Any, j: Any, first: Ref, last: Ref, *_: Ref) -> tuple:
        return h, 0, blocks(i, j, first, last)[0]

    def of_pair(h: Any, i: Any, j: Any, first: Ref, last: Ref, *_: Ref) -> tuple:
        return blocks(i, j, first, last)[::-1]

    row, head_row = (
        pl.BlockSpec((1, block_q), of_row),
        pl.BlockSpec((heads, 1, block_q), of_head_row),
    )
    keys = [pl.BlockSpec((heads, block_k, width), of_key) for width in (dim, value_dim)]
    queries = [pl.BlockSpec((heads, block_q, width), of_query) for width in (dim, value_dim)]
    acc = [pltpu.VMEM((heads, block_k, width), jnp.float32) for width in (dim, value_dim)]
    kernel = _key_kernel if of_keys else _query_kernel
    outer, inner = n_blocks[::-1] if of_keys else n_blocks
    n_products = (2 * dim + value_dim) + (value_dim if of_keys else 0)
    return pl.pallas_call(
        functools.partial(kernel, scale=scale, n_masks=len(masks)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(others),
            grid=(n_heads // heads, outer, inner),
            in_specs=[
                row,
                row,
                queries[0],
                *keys,
                queries[1],
                head_row,
                head_row,
                *(pl.BlockSpec((block_k, block_q), of_pair) for _ in masks),
            ],
            out_specs=keys if of_keys else queries[:1],
            scratch_shapes=acc if of_keys else [pltpu.VMEM((heads, dim, block_q), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ((k, v) if of_keys else (q,))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_heads * n_queries * n_keys * n_products,
            transcendentals=n_heads * n_queries * n_keys,
            bytes_accessed=mosaic_tpu.total_bytes(*arrays, *masks, *((k, v) if of_keys else (q,))),
        ),
        name="dense_mla_key_gradient" if of_keys else "dense_mla_query_gradient",
    )(*spans, *others, *bounds, *arrays, *masks)
