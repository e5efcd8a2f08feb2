"""The indexer's KL loss over listed keys on Hopper, as three Gluon kernels: target, loss of each row, gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, fixed_point, padding
from pallas_kernels.gluon_call import gluon_call

ATTENTION_DIM = 576  # 512 latent + 64 rotary columns
MAX_HEADS = 128  # two warpgroups of 64
MAX_INDEX_HEADS = 64
MAX_SLOTS = 4096
MIN_SLOTS = 128
ROWS_PER_CALL = 8192  # the target takes 16 KiB a row of 2048 slots


class Residuals(NamedTuple):
    """What `gradients` needs of the forward pass."""

    q: Float[Array, "T J X"]
    k: Float[Array, "S X"]
    w: Float[Array, "T J"]
    topk_idx: Int[Array, "T K"]
    length: Int[Array, " T"]  # one past the last slot that names a key
    grad: Float[Array, "T K"]  # softmax(I) - p


def check(
    q_TJX: Float[Array, "T J X"],
    attn_q_THD: Float[Array, "T H D"],
    topk_idx_TK: Int[Array, "T K"],
) -> None:
    """Raise NotImplementedError, saying why, where the kernels cannot take the input."""
    dispatch.require_hopper()
    dispatch.load("pallas_kernels.indexer_kl.gluon_gpu_target")
    n_index_heads, dim = q_TJX.shape[-2:]
    n_heads, attn_dim = attn_q_THD.shape[-2:]
    if q_TJX.dtype != jnp.bfloat16 or attn_q_THD.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"queries must be bfloat16, got {q_TJX.dtype} and {attn_q_THD.dtype}"
        )
    if dim not in (64, 128) or n_index_heads > MAX_INDEX_HEADS:
        raise NotImplementedError(
            f"needs up to {MAX_INDEX_HEADS} index heads of 64 or 128 dims, got {n_index_heads} of {dim}"
        )
    if attn_dim > ATTENTION_DIM or n_heads > MAX_HEADS:
        raise NotImplementedError(
            f"needs up to {MAX_HEADS} heads of up to {ATTENTION_DIM} dims, got {n_heads} of {attn_dim}"
        )
    if topk_idx_TK.shape[-1] > MAX_SLOTS:
        raise NotImplementedError(f"at most {MAX_SLOTS} slots, got {topk_idx_TK.shape[-1]}")


def used_lengths(topk_idx_TK: Int[Array, "T K"], n_keys: int) -> Int[Array, " T"]:
    """Return one past the last slot of each row that names a key."""
    slot_K = jnp.arange(1, topk_idx_TK.shape[-1] + 1, dtype=jnp.int32)
    valid_TK = (topk_idx_TK >= 0) & (topk_idx_TK < n_keys)
    return jnp.max(jnp.where(valid_TK, slot_K, 0), axis=-1, initial=0)


def padded_slots(n_slots: int) -> int:
    """Return the power of two of slots that a kernel holds."""
    return max(MIN_SLOTS, 1 << (n_slots - 1).bit_length())


def kl_rows(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    attn_q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    lse_TH: Float[Array, "T H"],
    topk_idx_TK: Int[Array, "T K"],
    *,
    scale: float,
) -> tuple[Float[Array, " T"], Residuals]:
    """Return the KL of each row, and what `gradients` needs; see `op.sparse_indexer_kl`.

    Long inputs run in blocks of rows: beside the residual float32 [T, K] there is a target of [rows, 2, K].
    """
    n_rows, n_slots = topk_idx_TK.shape
    w_TJ = w_TJ.astype(jnp.float32)
    length_T = used_lengths(topk_idx_TK, k_SX.shape[0])
    if n_rows * n_slots * k_SX.shape[0] == 0:
        grad_TK = jnp.zeros((n_rows, n_slots), jnp.float32)
        kl_T = jnp.zeros((n_rows,), jnp.float32)
        return kl_T, Residuals(q_TJX, k_SX, w_TJ, topk_idx_TK, length_T, grad_TK)
    attn_q_THD, kv_SD = (padding.pad_columns(x, ATTENTION_DIM) for x in (attn_q_THD, kv_SD))
    arrays = (q_TJX, k_SX, w_TJ, attn_q_THD, kv_SD, lse_TH.astype(jnp.float32))
    n_calls = -(-n_rows // ROWS_PER_CALL)
    block = -(-n_rows // n_calls)

    kls: list[Array] = []
    grads: list[Array] = []
    for i in range(n_calls):
        first_1 = jnp.full((1,), i * block, jnp.int32)
        if i > 0:
            # A block begins when the one before is done, so that one target is alive at a time.
            first_1, kls[-1] = jax.lax.optimization_barrier((first_1, kls[-1]))
        kl, grad = _run_block(*arrays, topk_idx_TK, length_T, first_1, scale=scale, block=block)
        kls.append(kl)
        grads.append(grad)
    kl_T = jnp.concatenate(kls)[:n_rows]
    grad_TK = jnp.concatenate(grads)[:n_rows]
    return kl_T, Residuals(q_TJX, k_SX, w_TJ, topk_idx_TK, length_T, grad_TK)


def _run_block(
    q_TJX: Array,
    k_SX: Array,
    w_TJ: Array,
    attn_q_THD: Array,
    kv_SD: Array,
    lse_TH: Array,
    topk_idx_TK: Array,
    length_T: Array,
    first_1: Array,
    *,
    scale: float,
    block: int,
) -> tuple[Array, Array]:
    """Return KL and dKL/dI of `block` rows from row `first` on; rows past the last are empty."""
    from pallas_kernels.indexer_kl import gluon_gpu_rows, gluon_gpu_target

    n_rows, n_slots = topk_idx_TK.shape
    n_keys, n_heads = k_SX.shape[0], attn_q_THD.shape[1]
    (target,) = gluon_call(
        gluon_gpu_target.target_kernel,
        attn_q_THD,
        kv_SD,
        lse_TH,
        topk_idx_TK,
        length_T,
        first_1,
        out=(jax.ShapeDtypeStruct((block, 2, n_slots), jnp.float32),),
        grid=(min(dispatch.multiprocessors(), block),),
        constants={},
        scalars=(n_rows, block, n_keys, n_heads, n_slots, scale * math.log2(math.e)),
    )
    kl, grad = gluon_call(
        gluon_gpu_rows.loss_kernel,
        q_TJX,
        k_SX,
        w_TJ,
        topk_idx_TK,
        length_T,
        first_1,
        target,
        out=(
            jax.ShapeDtypeStruct((block,), jnp.float32),
            jax.ShapeDtypeStruct((block, n_slots), jnp.float32),
        ),
        grid=(block,),
        constants={"X": q_TJX.shape[-1], "SLOTS": padded_slots(n_slots)},
        scalars=(n_rows, q_TJX.shape[1], n_keys, n_slots),
    )
    return kl, grad


def gradients(
    residuals: Residuals, d_kl_T: Float[Array, " T"], *, deterministic: bool = False
) -> tuple[Float[Array, "T J X"], Float[Array, "S X"], Float[Array, "T J"]]:
    """Return the gradients of sum_t d_kl[t] KL[t] by the indexer's q, k and w.

    Args:
        residuals: Of `kl_rows`.
        d_kl_T: float32 cotangent of each row's KL.
        deterministic: Add up the gradient of k as integers, so that the order does not matter; otherwise as float32 in
            an order that varies.

    Returns:
        Gradients of q and k in their dtype, and of w in float32.
    """
    from pallas_kernels.indexer_kl import gluon_gpu_rows

    q_TJX, k_SX, w_TJ, topk_idx_TK, length_T, grad_TK = residuals
    n_rows, n_slots = topk_idx_TK.shape
    if n_rows * n_slots * k_SX.shape[0] == 0:
        return jnp.zeros_like(q_TJX), jnp.zeros_like(k_SX), jnp.zeros_like(w_TJ)
    d_kl_T = d_kl_T.astype(jnp.float32)
    grid = integer_grid(q_TJX, w_TJ, d_kl_T) if deterministic else jnp.ones((1,), jnp.float32)
    sums = (
        jax.ShapeDtypeStruct((*k_SX.shape, 2), jnp.int32)
        if deterministic
        else jax.ShapeDtypeStruct(k_SX.shape, jnp.float32)
    )
    d_q, d_w, d_k = gluon_call(
        gluon_gpu_rows.gradient_kernel,
        q_TJX,
        k_SX,
        w_TJ,
        topk_idx_TK,
        length_T,
        grad_TK,
        d_kl_T,
        grid,
        out=(
            jax.ShapeDtypeStruct(q_TJX.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(w_TJ.shape, jnp.float32),
            sums,
        ),
        grid=(n_rows,),
        constants={
            "X": q_TJX.shape[-1],
            "SLOTS": padded_slots(n_slots),
            "FIXED": deterministic,
        },
        scalars=(q_TJX.shape[1], k_SX.shape[0], n_slots),
        zeroed=(2,),
    )
    if deterministic:
        d_k = fixed_point.to_float32(d_k, grid)
    return d_q, d_k.astype(k_SX.dtype), d_w


def integer_grid(
    q_TJX: Float[Array, "T J X"], w_TJ: Float[Array, "T J"], d_kl_T: Float[Array, " T"]
) -> Float[Array, "1"]:
    """Return the power of two by which every possible sum of the gradient of k stays inside int64.

    A row adds to a key at most |d_kl| sum_slots |dI| sum_j |w| max_x |q|, and sum_slots |dI| <= 2.
    """
    peak_TJ = jnp.max(jnp.abs(q_TJX.astype(jnp.float32)), axis=-1)
    bound = 2.0 * jnp.sum(jnp.abs(d_kl_T)[:, None] * jnp.abs(w_TJ) * peak_TJ)
    return fixed_point.counts_per_one(bound)
