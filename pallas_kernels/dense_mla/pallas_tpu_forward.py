"""Flash attention over a range of keys on TPU: the forward kernel.

Scores are kept transposed, keys on sublanes and queries on lanes: bounds, peaks, sums and the log-sum-exp are then rows
of lanes, and the softmax adds whole registers instead of reducing across lanes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import Ref


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes.

    Attributes:
        block_q: Queries of a tile, a multiple of 128.
        block_k: Keys of a tile, a multiple of 128.
        heads: Heads of a step, which share the loads of bounds and mask.
    """

    block_q: int
    block_k: int
    heads: int


def choose_config(n_queries: int, n_keys: int, n_heads: int) -> Config:
    """Return tiles of at most 512 x 512 and as many as four heads a step; chosen by VMEM, never timed."""
    block_q, block_k = (
        min(512, mosaic_tpu.round_up(n, mosaic_tpu.LANES)) for n in (n_queries, n_keys)
    )
    heads = max(group for group in (1, 2, 4) if n_heads % group == 0)
    return Config(block_q=block_q, block_k=block_k, heads=heads)


def allowed_pairs(
    start: Int[Array, "1 Q"], end: Int[Array, "1 Q"], first_key: Any, mask: Ref | None, n_keys: int
) -> Bool[Array, "K Q"]:
    """Return which keys of a tile its queries read, keys on sublanes."""
    key = first_key + lax.broadcasted_iota(jnp.int32, (n_keys, start.shape[1]), 0)
    inside = (key >= start) & (key < end)
    return inside if mask is None else inside & (mask[...].astype(jnp.int32) != 0)


def _kernel(
    first: Ref, last: Ref, start: Ref, end: Ref, q: Ref, k: Ref, v: Ref, *rest: Ref, scale: float
) -> None:
    """Step (head group, query block, j): attend to the j-th block of keys of the query block's span."""
    *masks, out, lse, peak, total, acc = rest
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def begin() -> None:
        peak[...] = jnp.full_like(peak, mosaic_tpu.FLOOR)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(first[i] + j < last[i])
    def step() -> None:
        block_k = k.shape[1]
        mask = masks[0] if masks else None
        allowed = allowed_pairs(start[...], end[...], (first[i] + j) * block_k, mask, block_k)
        for h in range(q.shape[0]):
            logits = mosaic_tpu.dot(k[h], q[h], mosaic_tpu.LAST_TO_LAST) * scale
            logits = jnp.where(allowed, logits, mosaic_tpu.MASKED)
            new_peak = jnp.maximum(peak[h], jnp.max(logits, axis=0, keepdims=True))
            weights = jnp.exp(logits - new_peak)
            fade = jnp.exp(peak[h] - new_peak)
            peak[h] = new_peak
            total[h] = total[h] * fade + jnp.sum(weights, axis=0, keepdims=True)
            weighted = mosaic_tpu.dot(v[h], weights.astype(v.dtype), mosaic_tpu.FIRST_TO_FIRST)
            acc[h] = acc[h] * fade + weighted

    @pl.when(j == pl.num_programs(2) - 1)
    def finish() -> None:
        for h in range(q.shape[0]):
            some = total[h] > 0  # no key at all: output 0, log-sum-exp -inf
            divisor = jnp.where(some, total[h], 1.0)
            out[h] = (acc[h] / divisor).T.astype(out.dtype)
            lse[h] = jnp.where(some, peak[h] + jnp.log(divisor), -jnp.inf)


def forward(
    q_HTD: Float[Array, "H T D"],
    k_HSD: Float[Array, "H S D"],
    v_HSU: Float[Array, "H S U"],
    start_1T: Int[Array, "1 T"],
    end_1T: Int[Array, "1 T"],
    mask_ST: Int[Array, "S T"] | None,
    *,
    scale: float,
    config: Config,
) -> tuple[Float[Array, "H T U"], Float[Array, "H 1 T"]]:
    """Attend each query to the keys of its range and mask.

    Args:
        q_HTD: Queries, T a multiple of block_q.
        k_HSD: Keys, S a multiple of block_k.
        v_HSU: Values.
        start_1T: int32, first key of each query, at least 0.
        end_1T: int32, one past the last, at most S; `end <= start` is an empty row.
        mask_ST: int8, not 0 where a key may be read.
        scale: Factor on the logits.
        config: Tiles; `heads` divides H.

    Returns:
        (out in the dtype of `v`, lse float32); an empty row gives 0 and -inf.
    """
    (n_heads, n_queries, dim), (n_keys, value_dim) = q_HTD.shape, v_HSU.shape[1:]
    block_q, block_k, heads = config.block_q, config.block_k, config.heads
    spans = mosaic_tpu.key_spans(start_1T[0], end_1T[0], block_q, block_k)

    def of_query(h: Any, i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return h, i, 0

    def of_key(h: Any, i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return h, mosaic_tpu.block_of_step(first, last, i, j), 0

    def of_row(h: Any, i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return 0, i

    def of_pair(h: Any, i: Any, j: Any, first: Ref, last: Ref) -> tuple:
        return mosaic_tpu.block_of_step(first, last, i, j), i

    row = pl.BlockSpec((1, block_q), of_row)
    masks = () if mask_ST is None else (mask_ST,)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(n_heads // heads, n_queries // block_q, n_keys // block_k),
        in_specs=[
            row,
            row,
            pl.BlockSpec((heads, block_q, dim), of_query),
            pl.BlockSpec((heads, block_k, dim), of_key),
            pl.BlockSpec((heads, block_k, value_dim), of_key),
            *(pl.BlockSpec((block_k, block_q), of_pair) for _ in masks),
        ],
        out_specs=[
            pl.BlockSpec((heads, block_q, value_dim), of_query),
            pl.BlockSpec((heads, 1, block_q), lambda h, i, j, first, last: (h, 0, i)),
        ],
        scratch_shapes=[
            pltpu.VMEM((heads, 1, block_q), jnp.float32),
            pltpu.VMEM((heads, 1, block_q), jnp.float32),
            pltpu.VMEM((heads, value_dim, block_q), jnp.float32),
        ],
    )
    pairs = n_heads * n_queries * n_keys
    arrays = (q_HTD, k_HSD, v_HSU, *masks)
    results = (
        jax.ShapeDtypeStruct((n_heads, n_queries, value_dim), v_HSU.dtype),
        jax.ShapeDtypeStruct((n_heads, 1, n_queries), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid_spec=grid_spec,
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (dim + value_dim),
            transcendentals=pairs,
            bytes_accessed=mosaic_tpu.total_bytes(*arrays, *results),
        ),
        name="dense_mla_forward",
    )(*spans, start_1T, end_1T, *arrays)
