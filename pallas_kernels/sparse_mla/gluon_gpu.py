"""Attention to listed keys on Hopper in Gluon: what it takes, and how it is launched; the kernel is beside this."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gluon_call
from pallas_kernels.sparse_mla.gluon_gpu_items import (
    HEADS_PER_TILE,
    SLOTS_PER_STEP,
    Split,
    choose_split,
)
from pallas_kernels.sparse_mla.gluon_gpu_kernel import MAX_ROPE_DIM, sparse_mla_kernel
from pallas_kernels.sparse_mla.gluon_gpu_output import merge_kernel

VALUE_DIMS = (128, 256, 512)


def check(q_THD: Array, kv_SD: Array, topk_idx_TK: Array, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, unless `forward` takes such an input; leading batch axes do not matter."""
    dim = q_THD.shape[-1]
    if q_THD.dtype != jnp.bfloat16 or kv_SD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q_THD.dtype} and {kv_SD.dtype}")
    rope_dim = dim - value_dim
    if value_dim not in VALUE_DIMS or not 0 <= rope_dim <= MAX_ROPE_DIM or rope_dim % 8:
        raise NotImplementedError(
            f"takes value_dim in {VALUE_DIMS} and up to {MAX_ROPE_DIM} further columns, a multiple of 8, "
            f"got {value_dim} of {dim}"
        )
    if not scale > 0:
        raise NotImplementedError(f"takes a positive scale, got {scale}")
    if q_THD.shape[-3] * -(-q_THD.shape[-2] // HEADS_PER_TILE) >= 2**30:
        raise NotImplementedError("takes fewer than 2**30 tiles of 64 heads")


def forward(
    q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    topk_idx_TK: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "T H U"], Float[Array, "T H"]]:
    """Attend to the listed keys of one sequence; `op.sparse_mla` says what is computed. It has no derivative.

    Weights are rounded to bfloat16 before they multiply the values; logits, sums and output accumulate in float32. The
    same input gives the same bits; a query's rounding depends on how many follow it, as the last few are computed in
    parts where that fills the chip. Heads are padded to a multiple of 64 inside the kernel, where the rows gathered
    cost as much for 16 heads as for 64.

    Args:
        q_THD: bfloat16 queries.
        kv_SD: bfloat16 rows, D = value_dim + 0 to 64, a multiple of 8.
        topk_idx_TK: Key indices, int32; slots outside [0, S) are ignored.
        scale: Factor on the logits, positive.
        value_dim: 128, 256 or 512.

    Returns:
        (out bfloat16, lse float32, natural log); an empty row gives out 0 and lse -inf.

    Raises:
        NotImplementedError: If `check` does.
    """
    check(q_THD, kv_SD, topk_idx_TK, scale=scale, value_dim=value_dim)
    n_queries, n_heads, _ = q_THD.shape
    n_keys, n_slots = kv_SD.shape[0], topk_idx_TK.shape[1]
    out = jax.ShapeDtypeStruct((n_queries, n_heads, value_dim), q_THD.dtype)
    lse = jax.ShapeDtypeStruct((n_queries, n_heads), jnp.float32)
    if 0 in (n_queries, n_heads, n_keys, n_slots):
        return jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)
    tiles_per_query = -(-n_heads // HEADS_PER_TILE)
    split = choose_split(
        n_queries, tiles_per_query, -(-n_slots // SLOTS_PER_STEP), dispatch.multiprocessors()
    )
    return _launch(q_THD, kv_SD, topk_idx_TK.astype(jnp.int32), scale, value_dim, split)


# In one jit, so that the merging kernel writes into the first one's outputs without a copy of them.
@functools.partial(jax.jit, static_argnames=("scale", "value_dim", "split"))
def _launch(
    q_THD: Array, kv_SD: Array, topk_idx_TK: Array, scale: float, value_dim: int, split: Split
) -> tuple[Array, Array]:
    """Attend, and merge what was computed in parts."""
    n_queries, n_heads, dim = q_THD.shape
    n_keys, n_slots = kv_SD.shape[0], topk_idx_TK.shape[1]
    tiles_per_query = -(-n_heads // HEADS_PER_TILE)
    n_whole = n_queries - split.n_queries
    n_items = tiles_per_query * (n_whole + split.n_queries * split.n_parts)
    out = jax.ShapeDtypeStruct((n_queries, n_heads, value_dim), q_THD.dtype)
    lse = jax.ShapeDtypeStruct((n_queries, n_heads), jnp.float32)
    # One row where there is no part: a kernel's output must not be empty.
    rows = (split.n_parts, split.n_queries * n_heads) if split.n_queries else (1, 1)
    parts = jax.ShapeDtypeStruct((*rows, value_dim), jnp.float32)
    part_lses = jax.ShapeDtypeStruct(rows, jnp.float32)
    out_THU, lse_TH, parts_PNU, lses_PN = gluon_call.gluon_call(
        sparse_mla_kernel,
        *(q_THD, kv_SD, topk_idx_TK, _steps(topk_idx_TK, n_keys)),
        out=(out, lse, parts, part_lses),
        # One program a multiprocessor: one fills the shared memory.
        grid=(min(n_items, dispatch.multiprocessors()),),
        constants={"HALF": value_dim // 2, "ROPE": dim - value_dim},
        scalars=(
            *(n_queries, n_heads, n_keys, n_slots, n_whole * tiles_per_query, split.n_parts),
            float(scale * math.log2(math.e)),
        ),
    )
    if split.n_queries:
        out_THU, lse_TH = gluon_call.gluon_call(
            merge_kernel,
            *(parts_PNU, lses_PN, out_THU, lse_TH),
            out=(out, lse),
            grid=(rows[1],),
            constants={"n_parts": split.n_parts, "DIM": value_dim},
            scalars=(rows[1], n_whole * n_heads),
            aliases={2: 0, 3: 1},
        )
    return out_THU, lse_TH


@functools.partial(jax.jit, static_argnames="n_keys")
def _steps(topk_idx_TK: Int[Array, "T K"], n_keys: int) -> Int[Array, " T"]:
    """Return how many steps each query takes: up to its last valid slot, and at least one."""
    valid_TK = (topk_idx_TK >= 0) & (topk_idx_TK < n_keys)
    ends_K = 1 + jnp.arange(topk_idx_TK.shape[1], dtype=jnp.int32)
    length_T = jnp.max(jnp.where(valid_TK, ends_K, 1), axis=1)
    return -(-length_T // SLOTS_PER_STEP)
