"""Backward of attention to listed keys on Hopper: a Pallas Mosaic GPU kernel for each chunk of queries.

Its blocks have three kinds: `weights` recomputes P and dS, `key_gradient` adds P^T dO and dS^T Q to the rows of float32
dKV, `query_gradient` sums dS K. P and dS of a chunk pass through global memory in bf16, from one launch to the next: no
multiprocessor has room for both gradients.

H200, 4096 queries, 128 heads, 2048 slots, 2026-11-30, counting 5 products (2752 multiply-adds a head and slot): 424
TFLOP/s at S = 8192, 274 at S = 131072. By estimate, not counters, L2 traffic and the additions in memory bound it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import pallas_gpu
from pallas_kernels.sparse_mla import pallas_gpu_barriers as barriers
from pallas_kernels.sparse_mla import pallas_gpu_gradients as gradients
from pallas_kernels.sparse_mla import pallas_gpu_products as products
from pallas_kernels.sparse_mla import pallas_gpu_stores as stores
from pallas_kernels.sparse_mla.pallas_gpu_attend import HALF, HEADS, KEYS, VALUE_DIM

LOG2E = math.log2(math.e)
MAX_HEADS = 2 * HEADS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the backward kernels.

    Attributes:
        chunk: Queries of one launch. P and dS of two chunks are in memory: 2 MiB a query of a chunk with 128 heads and
            2048 slots.
    """

    chunk: int = 512


def _step(*refs: Any, sizes: tuple[int, int, int], scale: float) -> None:
    """Work on two chunks: P and dS of chunk i + 1, gradients of chunk i.

    The parts of a chunk are blocks of one launch, so that the additions to dKV, which wait for L2, run beside the
    products of the others. P and dS are kept for two chunks.
    """
    n_queries, n_tiles, n_steps = sizes
    i_ref, q, d_out, kv, idx, lse2, delta, p, ds, dkv, dq, memory, gates = refs
    chunk = p.shape[0] // 2
    n_parts = n_tiles + 4
    block = lax.axis_index("block")
    local, part = lax.div(block, jnp.int32(n_parts)), lax.rem(block, jnp.int32(n_parts))
    barriers.make_gates(gates)
    weights_smem, key_smem, query_smem = memory

    def run(
        chunk_index: jax.Array, first: int, last: int, body: Any, arrays: Any, smem: Any
    ) -> None:
        slot = lax.rem(chunk_index + 2, jnp.int32(2)) * chunk + local
        query = gradients.Query(slot, chunk_index * chunk + local, n_steps)
        valid = (query.index >= 0) & (
            query.index < n_queries
        )  # there is no chunk -1, and the last may be short

        @pl.when(valid & (part >= first) & (part < last))
        def _() -> None:
            body(query, part - first, arrays, (*smem, gates))

    i = i_ref[0]
    weights = functools.partial(gradients.weights, scale=scale)
    run(i + 1, 0, n_tiles, weights, (q, d_out, kv, idx, lse2, delta, p, ds), weights_smem)
    key_arrays, query_arrays = (q, d_out, p, ds, idx, dkv), (kv, ds, idx, dq)
    run(i, n_tiles, n_tiles + 2, gradients.key_gradient, key_arrays, key_smem)
    run(i, n_tiles + 2, n_parts, gradients.query_gradient, query_arrays, query_smem)


def step_kernel(q_shape: tuple[int, ...], n_slots: int, chunk: int, scale: float) -> Any:
    """Return the kernel of (i int32 [1], q, dO, kv, indices, lse2, delta, P, dS, dKV, dQ); it writes to the last four.

    Args:
        q_shape: [T, H, 576].
        n_slots: K.
        chunk: Queries of a chunk.
        scale: Factor on the logits.
    """
    n_tiles = -(-q_shape[1] // HEADS)

    def half(*shape: int) -> Any:
        return products.operand((*shape, HEADS, HALF))

    def square(*shape: int) -> Any:
        return products.operand((*shape, HEADS, KEYS))

    n = gradients.WEIGHT_SLOTS
    weights = products.operand((n, KEYS, VALUE_DIM)), square(n), stores.box_memory()
    n = gradients.KEY_SLOTS
    queries = half(n_tiles), half(n_tiles), square(n_tiles)
    keys = *queries, square(n, n_tiles), square(n, n_tiles)
    n = gradients.QUERY_SLOTS
    return plgpu.kernel(
        functools.partial(_step, sizes=(q_shape[0], n_tiles, -(-n_slots // KEYS)), scale=scale),
        out_type=(),
        scratch_types=(
            plgpu.RefUnion(weights, keys, (half(n), square(n), square(n, n_tiles))),
            barriers.gate_memory(max(gradients.WEIGHT_SLOTS, gradients.KEY_SLOTS + 1, n)),
        ),
        grid=(chunk * (n_tiles + 4),),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=pallas_gpu.PARAMS,
        kernel_name="sparse_mla_backward",
    )


@functools.partial(jax.jit, static_argnames=("scale", "value_dim", "config"))
def backward(
    q: jax.Array,
    kv: jax.Array,
    topk_idx: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    scale: float,
    value_dim: int,
    config: Config = Config(),
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `op.sparse_mla` for one sequence.

    `dS = scale P (dO . v - sum(out dO) + d_lse)`, `dq = dS k`, `dkv[idx] += dS^T q + [P^T dO, 0]`.

    Args:
        q: bf16 [T, H, 576], H up to 128.
        kv: bf16 [S, 576].
        topk_idx: int32 [T, K].
        out: bf16 [T, H, 512], the forward's; what stands in rows without a valid slot does not matter.
        lse: float32 [T, H], the forward's.
        d_out: [T, H, 512].
        d_lse: float32 [T, H].
        scale: Factor on the logits.
        value_dim: 512.
        config: Sizes.

    Returns:
        (dq bf16 [T, H, 576], dkv bf16 [S, 576]). dkv is summed in float32, in no fixed order.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q, kv, topk_idx, scale=scale, value_dim=value_dim)

    @jax.custom_batching.sequential_vmap
    def differentiate(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _differentiate(*arrays, scale=scale, chunk=config.chunk)

    return differentiate(q, kv, topk_idx.astype(jnp.int32), out, lse, d_out, d_lse)


def _differentiate(
    q: jax.Array,
    kv: jax.Array,
    topk_idx: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    scale: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    n_queries, n_heads, _ = q.shape
    n_slots = topk_idx.shape[1]
    chunk = min(chunk, n_queries)
    n_padded = -(-n_heads // HEADS) * HEADS
    lse2, delta = _row_terms(out, lse, d_out, d_lse, n_padded)
    constants = (q, d_out.astype(jnp.bfloat16), kv, topk_idx, lse2, delta)
    weight_shape = (2 * chunk, n_padded, -(-n_slots // KEYS) * KEYS)
    p_ref, ds_ref = (jax.new_ref(jnp.empty(weight_shape, jnp.bfloat16)) for _ in range(2))
    dkv_ref = jax.new_ref(jnp.zeros(kv.shape, jnp.float32))
    dq_ref = jax.new_ref(jnp.empty(q.shape, q.dtype))
    kernel = step_kernel(q.shape, n_slots, chunk, scale)

    def work(i: jax.Array, _: jax.Array) -> int:
        kernel(jnp.full((1,), i, jnp.int32), *constants, p_ref, ds_ref, dkv_ref, dq_ref)
        return 0

    lax.fori_loop(-1, -(-n_queries // chunk), work, 0)
    return jax.freeze(dq_ref), jax.freeze(dkv_ref).astype(kv.dtype)


def _row_terms(
    out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array, n_padded: int
) -> tuple[jax.Array, jax.Array]:
    """Return lse in powers of 2, +inf where P is to be 0, and delta = sum(out dO) - d_lse; heads padded."""
    empty = jnp.isneginf(lse)
    pad = ((0, 0), (0, n_padded - lse.shape[1]))
    product = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = jnp.where(empty, 0.0, product - d_lse)  # `out` of an empty row may be anything
    lse2 = jnp.where(empty, jnp.inf, lse * LOG2E)
    return jnp.pad(lse2, pad, constant_values=jnp.inf), jnp.pad(delta, pad)


def check(q: Any, kv: Any, topk_idx: Any, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, unless the kernels take the arrays, batch axes or not."""
    pallas_gpu.check(q, kv, topk_idx, scale=scale, value_dim=value_dim)
    if q.shape[-2] > MAX_HEADS:
        raise NotImplementedError(f"takes at most {MAX_HEADS} heads, got {q.shape[-2]}")
