"""The attention weights that the indexer is trained towards, summed over heads, on TPU."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref

MAX_BLOCK = 1024  # of queries and of keys: a step's loads then take about as long as its products
MAX_DIM = 256


def check(q_THD: Array, k_SHD: Array) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    mosaic_tpu.check_floats(q_THD, k_SHD)
    if q_THD.shape[-1] > MAX_DIM:
        raise NotImplementedError(f"takes up to {MAX_DIM} dims, got {q_THD.shape[-1]}")


def _kernel(
    first: Ref, last: Ref, q: Ref, k: Ref, lse: Ref, out: Ref, acc: Ref, *, scale: float
) -> None:
    """Step (query block, j, head group): add the heads' weights on the j-th block of the span; write after the last."""
    i, j, h = (pl.program_id(axis) for axis in range(3))
    used = first[i] + j < last[i]

    @pl.when(used & (h == 0))
    def begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    @pl.when(used)
    def add_heads() -> None:
        for head in range(q.shape[0]):
            logits = mosaic_tpu.dot(k[head], q[head], mosaic_tpu.LAST_TO_LAST) * scale
            acc[...] += jnp.exp(logits - lse[head])

    @pl.when(used & (h == pl.num_programs(2) - 1))
    def finish() -> None:
        out[...] = acc[...].T


def attention_target(
    q_THD: Float[Array, "T H D"],
    k_SHD: Float[Array, "S H D"],
    lse_TH: Float[Array, "T H"],
    start_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    *,
    scale: float,
) -> Float[Array, "T S"]:
    """Sum the heads' attention weights: `sum_h exp(scale * q[t, h] . k[s, h] - lse[t, h])`.

    Args:
        q_THD: The main attention's queries, bfloat16 or float32.
        k_SHD: Its keys, of the same dtype.
        lse_TH: float32 log-sum-exp of each head.
        start_T: int32, first key of each query.
        end_T: int32, one past the last.
        scale: Factor on the logits.

    Returns:
        float32; outside [start, end) anything, NaN and infinities among it.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, k_SHD)
    (n_queries, n_heads, dim), n_keys = q_THD.shape, k_SHD.shape[0]
    block_q, block_k = (min(MAX_BLOCK, mosaic_tpu.round_up(n, LANES)) for n in (n_queries, n_keys))
    heads = 2 if n_heads % 2 == 0 else 1
    sizes = mosaic_tpu.round_up(n_queries, block_q), mosaic_tpu.round_up(n_keys, block_k)
    bounds = (jnp.clip(x, 0, n_keys).astype(jnp.int32) for x in (start_T, end_T))
    start, end = (mosaic_tpu.pad_rows(x, sizes[0]) for x in bounds)
    spans = mosaic_tpu.key_spans(start, end, block_q, block_k)
    q, k = mosaic_tpu.heads_first(q_THD, sizes[0]), mosaic_tpu.heads_first(k_SHD, sizes[1])

    def of_key(i: Any, j: Any, h: Any, first: Ref, last: Ref) -> tuple:
        return h, mosaic_tpu.block_of_step(first, last, i, j), 0

    def of_pair(i: Any, j: Any, h: Any, first: Ref, last: Ref) -> tuple:
        return i, mosaic_tpu.block_of_step(first, last, i, j)

    pairs = n_heads * math.prod(sizes)
    out = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sizes[0] // block_q, sizes[1] // block_k, n_heads // heads),
            in_specs=[
                pl.BlockSpec((heads, block_q, dim), lambda i, j, h, *_: (h, i, 0)),
                pl.BlockSpec((heads, block_k, dim), of_key),
                pl.BlockSpec((heads, 1, block_q), lambda i, j, h, *_: (h, 0, i)),
            ],
            out_specs=pl.BlockSpec((block_q, block_k), of_pair),
            scratch_shapes=[pltpu.VMEM((block_k, block_q), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(sizes, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=4 * math.prod(sizes) + mosaic_tpu.total_bytes(q, k),
        ),
        name="attention_target",
    )(*spans, q, k, mosaic_tpu.pad_rows(lse_TH, sizes[0]).T[:, None])
    return out[:n_queries, :n_keys]
