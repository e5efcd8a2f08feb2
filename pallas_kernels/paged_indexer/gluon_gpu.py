"""Selection over paged index keys on Hopper: scores by a Gluon kernel, then the exact top-k of each row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.gluon_call import gluon_call
from pallas_kernels.paged_indexer.gluon_gpu_kernel import paged_scores_kernel
from pallas_kernels.topk_select.op import topk_select

TILE = 64  # keys of a tile
MIN_HEADS, MAX_HEADS = 16, 128
TARGET_PROGRAMS = 8  # of a multiprocessor: several run at once, the rest evens out the ends
MIN_CHUNK, MAX_CHUNK = 512, 2048  # keys of a program
SHARED_BUDGET = 113 * 1024  # bytes of a program that shares its multiprocessor with another
MIN_STAGES, MAX_STAGES = 3, 6
FEW_QUERY_BYTES = 16 * 1024  # one query of 64 heads
HALF_PEAK = 2.0**10  # largest query element in float16: 2^34 above the smallest step


def check(
    q_TJX: Float[Array, "B T J X"],
    k_NX: Float[Array, "N X"],
    *,
    k_scale_NG: Float[Array, "N G"] | None = None,
) -> None:
    """Raise NotImplementedError, saying why, where the kernel cannot take the input."""
    n_heads, dim = q_TJX.shape[-2:]
    if q_TJX.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 queries, got {q_TJX.dtype}")
    if n_heads > MAX_HEADS:
        raise NotImplementedError(f"takes at most {MAX_HEADS} heads, got {n_heads}")
    n_scales = 0 if k_scale_NG is None else k_scale_NG.shape[-1]
    kind = k_NX.dtype.name, dim, n_scales
    if kind not in (("bfloat16", 64, 0), ("bfloat16", 128, 0), ("float8_e4m3fn", 128, 1)):
        raise NotImplementedError(
            f"takes bfloat16 keys of 64 or 128 dims or float8_e4m3fn ones of 128 with one scale,"
            f" got {k_NX.dtype} of {dim} with {n_scales}"
        )
    dispatch.require_hopper()


def choose_chunk(n_groups: int, n_keys: int) -> int:
    """Return the keys of a program, a multiple of TILE: few enough for all multiprocessors to have work."""
    chunk = n_groups * n_keys // (TARGET_PROGRAMS * dispatch.multiprocessors())
    return min(max(chunk, MIN_CHUNK), MAX_CHUNK) // TILE * TILE


def choose_stages(query_bytes: int, key_bytes: int) -> int:
    """Return how many tiles of keys are held: all that fit for bfloat16, few for FP8.

    FP8 keys cost more instructions a byte, so there more programs at once pay, not more tiles in flight.
    """
    if key_bytes == 1:
        return MIN_STAGES if query_bytes <= FEW_QUERY_BYTES else MIN_STAGES + 1
    tiles = (SHARED_BUDGET - query_bytes) // (TILE * 128 * key_bytes)
    return min(max(tiles, MIN_STAGES), MAX_STAGES)


def paged_scores(
    q_TJX: Float[Array, "B T J X"],
    k_NX: Float[Array, "N X"],
    w_TJ: Float[Array, "B T J"],
    table_BP: Int[Array, "B P"],
    *,
    page_size: int,
    end: Int[Array, "B T"],
    k_scale_NG: Float[Array, "N G"] | None = None,
) -> Float[Array, "B T S"]:
    """Score the first `end` keys of each sequence, S = P * page_size.

    `I[b, t, s] = scale[s] * sum_j w[b, t, j] * relu(q[b, t, j] . k[s])` for s < end[b, t]; what lies from there on is
    not written and may be anything. Takes what `check` lets pass.

    FP8 keys are multiplied as float16, which holds every e4m3 value, with queries scaled by a power of two per head:
    what float16 rounds off is 2^-35 of the head's largest element.

    On an H200 (2026-11-30), 128 sequences of 131072 keys, one query each: 1.03 ms for bfloat16 (4.2 TB/s), 0.60 ms for
    FP8 (3.8 TB/s).
    """
    n_batch, n_tokens, n_heads, dim = q_TJX.shape
    n_keys = table_BP.shape[1] * page_size
    out = jax.ShapeDtypeStruct((n_batch, n_tokens, n_keys), jnp.float32)
    if out.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    quantised = k_scale_NG is not None
    w_TJ = w_TJ.astype(jnp.float32)
    if quantised:
        q_TJX, w_TJ = _half_queries(q_TJX, w_TJ)
    pad = max(1 << (n_heads - 1).bit_length(), MIN_HEADS) - n_heads
    q_TJX = jnp.pad(q_TJX, ((0, 0), (0, 0), (0, pad), (0, 0)))
    w_TJ = jnp.pad(w_TJ, ((0, 0), (0, 0), (0, pad)))
    tokens = 1 if n_tokens == 1 else 2 if n_tokens == 2 or n_heads + pad > 64 else 4
    n_groups = n_batch * -(-n_tokens // tokens)
    chunk = choose_chunk(n_groups, n_keys)
    n_chunks = -(-n_keys // chunk)
    (scores,) = gluon_call(
        paged_scores_kernel,
        q_TJX,
        w_TJ,
        k_NX,
        w_TJ if k_scale_NG is None else k_scale_NG,  # the kernel does not touch the stand-in
        table_BP.astype(jnp.int32),
        end.astype(jnp.int32),
        out=(out,),
        grid=(n_groups * n_chunks,),
        constants={
            "J": n_heads + pad,
            "X": dim,
            "PAGE": page_size,
            "TOKENS": tokens,
            "STAGES": choose_stages(tokens * (n_heads + pad) * dim * 2, k_NX.dtype.itemsize),
            "QUANTISED": quantised,
        },
        scalars=(n_tokens, table_BP.shape[1], n_keys, n_chunks, chunk),
    )
    return scores


def _half_queries(q_TJX: Array, w_TJ: Array) -> tuple[Array, Array]:
    """Return queries as float16, dims in the kernel's order, and the weights that undo their scaling."""
    q_TJX = q_TJX.astype(jnp.float32)
    peak_TJ = jnp.max(jnp.abs(q_TJX), axis=-1)
    tiny = jnp.finfo(jnp.float32).tiny
    up_TJ = fp8.power_of_two_ceil(jnp.maximum(peak_TJ, tiny * HALF_PEAK)) / HALF_PEAK
    # Thread q of four holds bytes 32 q to 32 q + 31 of a key and feeds them to wgmma two by two.
    order = (q_TJX / up_TJ[..., None]).reshape(*q_TJX.shape[:-1], 4, -1, 2)
    return jnp.swapaxes(order, -3, -2).reshape(q_TJX.shape).astype(jnp.float16), w_TJ * up_TJ


def paged_indexer_topk(
    q_TJX: Float[Array, "B T J X"],
    k_NX: Float[Array, "N X"],
    w_TJ: Float[Array, "B T J"],
    table_BP: Int[Array, "B P"],
    *,
    k: int,
    page_size: int,
    end: Int[Array, "B T"],
    k_scale_NG: Float[Array, "N G"] | None = None,
) -> Int[Array, "B T K"]:
    """Select the k best keys of each query; see `op.paged_indexer_topk`."""
    scores = paged_scores(
        q_TJX, k_NX, w_TJ, table_BP, page_size=page_size, end=end, k_scale_NG=k_scale_NG
    )
    return topk_select(scores, k=k, start=jnp.zeros_like(end), end=end)
