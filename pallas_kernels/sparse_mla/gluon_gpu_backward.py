"""Backward of attention to listed keys on Hopper, in Gluon: three kernels a chunk of queries.

1. `slots`: P = exp(scale q.k - lse) and dS = P (dO.V - delta) scale of every slot, in bf16, to a scratch array.
2. `queries`: dQ = dS K.
3. `keys`: dKV[idx] += dS^T Q + P^T dO, both summed over all heads before a row is added to memory once.

Why not one kernel: dQ of 64 heads and dKV of 64 keys are 144 KiB of float32 each, and registers hold 256 KiB in all,
so a fused kernel adds every row once for each 64 heads. Float32 additions to rows are the dearest traffic there is
(L2 takes 3.5 TB/s): two passes a query cost 2.7 us, one pass 1.3 us, while writing and reading P and dS costs 1 MiB
a query, about 0.5 us. With P and dS in memory all five products have the shapes of plain matrix products, and none is
computed twice.

As in the forward there is no proxy fence between cp.async and the wgmma that reads what it wrote. PTX's model asks for
one; results are right without it, and a form of `slots` with one took 1.18 us a query instead of 0.95.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import dispatch, fixed_point
from pallas_kernels.gluon_call import gluon_call

DIM = 576
VALUE_DIM = 512
MAX_HEADS = 128
TILE = 64  # slots
# 8 queries a multiprocessor of an H200: whole waves of programs, 1.1 GB of scratch at 128 heads and 2048 slots.
QUERIES_A_LAUNCH = 8 * dispatch.MULTIPROCESSORS
# Rows of dKV that the programs running at one time add to should fit L2 (50 MB, shared with the other traffic).
SPAN_BYTES = 20e6
MIN_SPAN = 4  # tiles; shorter spans load Q and dO too often
LOG2_E = math.log2(math.e)


def check(q_THD: Array, kv_SD: Array, topk_idx_TK: Array, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, unless `backward` takes such an input."""
    del topk_idx_TK, scale
    if (q_THD.shape[-1], value_dim) != (DIM, VALUE_DIM):
        raise NotImplementedError(
            f"needs dims {DIM} and {VALUE_DIM}, got {q_THD.shape[-1]} and {value_dim}"
        )
    if q_THD.shape[-2] > MAX_HEADS:
        raise NotImplementedError(f"takes up to {MAX_HEADS} heads, got {q_THD.shape[-2]}")
    if not q_THD.dtype == kv_SD.dtype == jnp.bfloat16:
        raise NotImplementedError(f"needs bfloat16, got {q_THD.dtype} and {kv_SD.dtype}")


def backward(
    q_THD: BFloat16[Array, "T H D"],
    kv_SD: BFloat16[Array, "S D"],
    topk_idx_TK: Int32[Array, "T K"],
    out_THU: BFloat16[Array, "T H U"],
    lse_TH: Float32[Array, "T H"],
    d_out_THU: BFloat16[Array, "T H U"],
    d_lse_TH: Float32[Array, "T H"] | None,
    *,
    scale: float,
    value_dim: int,
    deterministic: bool = False,
) -> tuple[BFloat16[Array, "T H D"], BFloat16[Array, "S D"]]:
    """Return the gradients of `sparse_mla` in its queries and keys.

    With P = exp(scale q.k - lse), dS = P (dO.V - sum(dO * O) + dlse) scale: dQ = dS K, dK = dS^T Q, dV = P^T dO;
    dKV is dK with dV added to its first value_dim columns. Sums over queries are float32, or int64 fixed point.

    Args:
        q_THD: Queries, H <= 128.
        kv_SD: Key rows; the values are their first 512 columns. Rows that no slot names may hold NaN.
        topk_idx_TK: Key of each slot; -1 and indices outside [0, S) are ignored, duplicates count once a slot.
        out_THU: Output of the forward; ignored where lse is -inf.
        lse_TH: Natural log-sum-exp of the forward, -inf for a row without valid slots: its gradients are 0.
        d_out_THU: Cotangent of the output.
        d_lse_TH: Cotangent of lse, or None for zeros.
        scale: Factor on the logits.
        value_dim: 512.
        deterministic: Sum dKV in int64, so that equal inputs give equal bits; otherwise its last bits depend on the
            order in which programs run. dQ always repeats bit for bit.

    Returns:
        (dq, dkv).

    Raises:
        NotImplementedError: If `check` does.

    Source: DeepSeek-V3.2 report, eq. 2 and appendix A, differentiated; sum(dO * O) as in FlashAttention.
    """
    check(q_THD, kv_SD, topk_idx_TK, scale=scale, value_dim=value_dim)
    n_heads = q_THD.shape[1]
    if 0 in (*q_THD.shape, *topk_idx_TK.shape, *kv_SD.shape):
        return jnp.zeros_like(q_THD), jnp.zeros_like(kv_SD)
    empty_TH = jnp.isneginf(lse_TH)
    delta_TH = jnp.sum(out_THU.astype(jnp.float32) * d_out_THU.astype(jnp.float32), axis=-1)
    if d_lse_TH is not None:
        delta_TH = delta_TH - d_lse_TH
    # An empty row: exp2(anything - inf) = 0 makes its P and dS 0, and a stale `out` must not enter.
    delta_TH = jnp.where(empty_TH, 0.0, delta_TH)
    lse2_TH = jnp.where(empty_TH, jnp.inf, lse_TH * LOG2_E)
    extra = (TILE if n_heads <= TILE else MAX_HEADS) - n_heads
    if extra:
        heads = ((0, 0), (0, extra))
        q_THD = jnp.pad(q_THD, (*heads, (0, 0)))
        d_out_THU = jnp.pad(d_out_THU, (*heads, (0, 0)))
        delta_TH = jnp.pad(delta_TH, heads)
        lse2_TH = jnp.pad(lse2_TH, heads, constant_values=jnp.inf)
    n_tiles = -(-topk_idx_TK.shape[1] // TILE)
    if _span(n_tiles, kv_SD.shape[0]) < n_tiles:
        topk_idx_TK = jnp.sort(topk_idx_TK, axis=-1)  # spans pay off with ascending indices only
    unit = jnp.ones(1, jnp.float32)
    if deterministic:
        unit = _fixed_unit(q_THD, kv_SD, d_out_THU, delta_TH, scale)
    arrays = (q_THD, d_out_THU, kv_SD, topk_idx_TK, lse2_TH, delta_TH, unit)
    dq_THD, dkv = _run_chunks(arrays, scale, deterministic)
    if deterministic:
        dkv = fixed_point.to_float32(dkv, unit)
    return dq_THD[:, :n_heads], dkv.astype(kv_SD.dtype)


def _run_chunks(arrays: tuple[Array, ...], scale: float, fixed: bool) -> tuple[Array, Array]:
    """Run all queries, a chunk at a time: the scratch arrays hold one chunk."""
    q_THD, kv_SD = arrays[0], arrays[2]
    n_queries, n_keys = q_THD.shape[0], kv_SD.shape[0]
    if fixed:
        dkv = jnp.zeros((n_keys, DIM, 2), jnp.int32)  # int64 in two halves: jax may have no int64
    else:
        dkv = jnp.zeros((n_keys, DIM), jnp.float32)
    sums = (jnp.empty_like(q_THD), dkv)
    n_chunks, rest = divmod(n_queries, QUERIES_A_LAUNCH)
    run = functools.partial(_run_chunk, arrays, scale=scale, fixed=fixed)

    def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        return run(sums, i * QUERIES_A_LAUNCH, QUERIES_A_LAUNCH)

    if n_chunks == 1:
        sums = body(jnp.int32(0), sums)
    elif n_chunks:
        sums = jax.lax.fori_loop(0, n_chunks, body, sums)
    if rest:
        sums = run(sums, jnp.int32(n_chunks * QUERIES_A_LAUNCH), rest)
    return sums


def _run_chunk(
    arrays: tuple[Array, ...],
    sums: tuple[Array, Array],
    first: Array,
    n: int,
    *,
    scale: float,
    fixed: bool,
) -> tuple[Array, Array]:
    """Fill rows [first, first + n) of dq and add their part of dkv; both are updated in place."""
    from pallas_kernels.sparse_mla import (
        gluon_gpu_backward_keys,
        gluon_gpu_backward_queries,
        gluon_gpu_backward_slots,
        gluon_gpu_backward_slots_64,
    )

    q_THD, d_out_THU, kv_SD, topk_idx_TK, lse2_TH, delta_TH, unit = arrays
    dq_THD, dkv = sums
    n_heads, n_keys, n_slots = q_THD.shape[1], kv_SD.shape[0], topk_idx_TK.shape[1]
    n_tiles = -(-n_slots // TILE)
    groups = n_heads // TILE
    first_1 = jnp.reshape(first, (1,)).astype(jnp.int32)
    sizes = {"N_SLOTS": n_slots, "N_TILES": n_tiles}
    slots = (
        gluon_gpu_backward_slots_64.slots_of_64_heads
        if groups == 1
        else gluon_gpu_backward_slots.slots_of_128_heads
    )
    scratch = jax.ShapeDtypeStruct((n, n_heads, n_tiles * TILE), jnp.bfloat16)
    p_THK, ds_THK = gluon_call(
        slots,
        *(q_THD, d_out_THU, kv_SD, topk_idx_TK, lse2_TH, delta_TH, first_1),
        out=(scratch, scratch),
        grid=(n,),
        scalars=(n_keys, float(scale * LOG2_E), float(scale)),
        constants=sizes,
    )
    span = _span(n_tiles, n_keys)
    sizes |= {"N_HEADS": n_heads}
    (dkv,) = gluon_call(
        gluon_gpu_backward_keys.key_gradients,
        *(q_THD, d_out_THU, p_THK, ds_THK, topk_idx_TK, first_1, unit, dkv),
        out=(jax.ShapeDtypeStruct(dkv.shape, dkv.dtype),),
        grid=(2 * n * -(-n_tiles // span),),
        scalars=(n, n_keys),
        constants=sizes | {"SPAN": span, "FIXED": fixed},
        aliases={7: 0},
    )
    (dq_THD,) = gluon_call(
        gluon_gpu_backward_queries.query_gradients,
        *(kv_SD, ds_THK, topk_idx_TK, first_1, dq_THD),
        out=(jax.ShapeDtypeStruct(dq_THD.shape, dq_THD.dtype),),
        grid=(n * groups,),
        scalars=(n_keys,),
        constants=sizes,
        aliases={4: 0},
    )
    return dq_THD, dkv


def _span(n_tiles: int, n_keys: int) -> int:
    """Tiles of a query that one program of `key_gradients` takes.

    Programs run span by span over all queries. With ascending indices a span covers a narrow range of keys, whose
    dKV rows then stay in L2 for the whole chunk: 1.4 times faster at 131,072 keys.
    """
    share = SPAN_BYTES / (n_keys * DIM * 4)
    return max(MIN_SPAN, n_tiles if share >= 1 else math.ceil(n_tiles * share))


def _fixed_unit(
    q_THD: Array, kv_SD: Array, d_out_THU: Array, delta_TH: Array, scale: float
) -> Float32[Array, "1"]:
    """Return counts a 1.0, a power of two, such that no sum of dKV can leave int64.

    |dkv| <= T H (max|dO| + max|dS| max|Q|): the weights of a row add up to 1, also over duplicates.
    """

    def peak(x: Array) -> Array:
        return jnp.max(jnp.abs(x.astype(jnp.float32)))

    # Rows that no slot names may be NaN.
    peak_kv = peak(jnp.where(jnp.isfinite(kv_SD), kv_SD, 0))
    peak_do = peak(d_out_THU)
    peak_ds = abs(scale) * (VALUE_DIM * peak_do * peak_kv + peak(delta_TH))
    bound = q_THD.shape[0] * q_THD.shape[1] * (peak_do + peak_ds * peak(q_THD))
    return fixed_point.counts_per_one(bound)
