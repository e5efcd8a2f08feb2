"""Forward of attention to listed keys on Hopper: Pallas Mosaic GPU with a gathering producer and two consumers.

The schedule is FlashMLA's: a block has 64 heads of a query and the keys of a step are two times 64; each consumer makes
the logits of its own 64 keys, and accumulates its own half of the value columns over the weights of both. The rows are
gathered by cp.async, which Pallas has no function for.

H200, 4096 queries, 128 heads, 2048 slots, 2026-11-30: 598 TFLOP/s at S = 8192 (median of 6 rounds, shared GPU); before
the last three changes 505 at S = 131072, not timed since.
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

from pallas_kernels import dispatch
from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.sparse_mla import pallas_gpu_attend as attend
from pallas_kernels.sparse_mla import pallas_gpu_barriers as barriers
from pallas_kernels.sparse_mla import pallas_gpu_products as products
from pallas_kernels.sparse_mla.pallas_gpu_attend import DIM, HALF, HEADS, KEYS, ROPE, VALUE_DIM

PARAMS = dataclasses.replace(asm.PARAMS, lowering_semantics=plgpu.LoweringSemantics.Lane)


def _kernel(
    q_ref: Any,
    kv_ref: Any,
    idx_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *scratch: Any,
    scale: float,
    work: attend.Work,
) -> None:
    (q_left, q_right, q_rope), (k_left, k_right, k_rope), exchange, gates = scratch
    tiles = attend.Tiles(q_left, q_right, q_rope, k_left, k_right, k_rope, exchange, gates)
    barriers.make_gates(gates)
    wg = lax.axis_index("wg")

    def consumer(g: int) -> None:
        plgpu.set_max_registers(216, action="increase")
        attend.consume(g, tiles, work, (out_ref, lse_ref), scale=scale)

    for g in range(2):
        pl.when(wg == g)(functools.partial(consumer, g))

    @pl.when(wg == 2)
    def _() -> None:
        plgpu.set_max_registers(72, action="decrease")
        attend.produce(tiles, work, q_ref, kv_ref, idx_ref)


@functools.partial(jax.jit, static_argnames=("scale", "value_dim"))
def forward(
    q_THD: jax.Array,
    kv_SD: jax.Array,
    topk_idx_TK: jax.Array,
    *,
    scale: float,
    value_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the listed keys; the meaning is that of `op.sparse_mla`, for one sequence.

    Args:
        q_THD: bf16 [T, H, 576], any T and H.
        kv_SD: bf16 [S, 576], any S.
        topk_idx_TK: int32 [T, K], any K; slots outside [0, S) are ignored, and the rows of others are never read.
        scale: Factor on the logits, positive.
        value_dim: 512.

    Returns:
        (out bf16 [T, H, 512], lse float32 [T, H], natural log). The same inputs give the same bits.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, kv_SD, topk_idx_TK, scale=scale, value_dim=value_dim)

    @jax.custom_batching.sequential_vmap
    def run(q_THD: jax.Array, kv_SD: jax.Array, topk_idx_TK: jax.Array) -> Any:
        return _call(q_THD.shape, topk_idx_TK.shape[1], scale)(q_THD, kv_SD, topk_idx_TK)

    return run(q_THD, kv_SD, topk_idx_TK.astype(jnp.int32))


def _call(q_shape: tuple[int, ...], n_slots: int, scale: float) -> Any:
    """Return the kernel for these sizes."""
    n_queries, n_heads, _ = q_shape
    n_tiles = n_queries * -(-n_heads // HEADS)
    n_blocks = min(n_tiles, dispatch.multiprocessors())  # a work loop each
    work = attend.Work(n_heads, n_tiles, n_blocks, -(-n_slots // (2 * KEYS)))
    half, rope = products.operand((HEADS, HALF)), products.operand((HEADS, ROPE))
    return plgpu.kernel(
        functools.partial(_kernel, scale=scale, work=work),
        out_type=(
            jax.ShapeDtypeStruct((n_queries, n_heads, VALUE_DIM), jnp.bfloat16),
            jax.ShapeDtypeStruct((n_queries, n_heads), jnp.float32),
        ),
        scratch_types=(
            (half, half, rope),
            ((half, half), (half, half), (rope, rope)),
            plgpu.SMEM((attend.N_EXCHANGE, KEYS), jnp.float32),
            barriers.gate_memory(attend.N_GATES),
        ),
        grid=(work.n_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=PARAMS,
        kernel_name="sparse_mla_forward",
    )


def check(q_THD: Any, kv_SD: Any, topk_idx_TK: Any, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, unless the forward takes the arrays, batch axes or not."""
    if not scale > 0:
        raise NotImplementedError(f"takes a positive scale, got {scale}")
    if (q_THD.shape[-1], value_dim) != (DIM, VALUE_DIM):
        raise NotImplementedError(
            f"takes {DIM} dims of which {VALUE_DIM} are values, got {q_THD.shape[-1]} and {value_dim}"
        )
    if q_THD.dtype != jnp.bfloat16 or kv_SD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q_THD.dtype} and {kv_SD.dtype}")
    if 0 in (*q_THD.shape, *kv_SD.shape, *topk_idx_TK.shape):
        raise NotImplementedError("takes no empty arrays")
    if math.prod(q_THD.shape[-3:-1]) >= 2**31 or kv_SD.shape[-2] >= 2**31:
        raise NotImplementedError("counts rows in 32 bits")
