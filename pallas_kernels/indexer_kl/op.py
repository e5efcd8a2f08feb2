"""Public ops: the indexer's KL loss over a range of keys, or over listed keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.dense_mla import reference as dense_reference
from pallas_kernels.indexer_kl import range_blocks, reference
from pallas_kernels.indexer_scores import reference as scores_reference
from pallas_kernels.sparse_mla import reference as sparse_reference

FOLDER = "pallas_kernels.indexer_kl."
LISTED = {  # modules of the form over listed keys
    "gluon_gpu": f"{FOLDER}gluon_gpu",
    "pallas_tpu": f"{FOLDER}pallas_tpu_listed",
}


def indexer_kl(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    attn_q_THD: Float[Array, "*B T H D"],
    attn_k_SHD: Float[Array, "*B S H D"],
    lse_TH: Float[Array, "*B T H"],
    *,
    scale: float,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    selected: Bool[Array, "*B T S"] | None = None,
    causal: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*B T"]:
    """Measure how far the indexer's softmax is from the main attention, per query.

    `KL(p[t] || softmax(I[t]))` over the allowed keys, with `p[t, s] = sum_h A[t, h, s]` normalised to sum 1 and
    `A[t, h, s] = exp(scale * q[t, h] . k[s, h] - lse[t, h])`. The gradient reaches the indexer's q, k and w only:
    `dKL/dI = softmax(I) - p`.

    Args:
        q_TJX: Index queries.
        k_SX: Index keys.
        w_TJ: Head weights with the scales folded in.
        attn_q_THD: The main attention's queries, all heads.
        attn_k_SHD: The main attention's keys.
        lse_TH: float32 log-sum-exp of the attention over the same allowed keys.
        scale: The attention's factor on the logits.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        selected: Optional mask: the sparse stage's loss, over the selected keys only.
        causal: Promise that `end[t] <= t + 1` and T == S.
        implementation: None picks the best.

    Returns:
        float32 KL of each row, >= 0 up to rounding; 0 for an empty row.

    Raises:
        ValueError: If `implementation` is unknown, or `causal` is given with T != S.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, section 2.1, eqs. 3 and 4.
    """
    dispatch.check_causal("indexer_kl", causal, q_TJX.shape[-3], k_SX.shape[-2])
    dispatch.check_width("indexer_kl", attn_q_THD.shape[-1], attn_k_SHD.shape[-1])
    scale = dispatch.number("indexer_kl", "scale", scale)
    attn_q_THD, attn_k_SHD, lse_TH = jax.lax.stop_gradient((attn_q_THD, attn_k_SHD, lse_TH))

    def check(name: str, require: Callable[[], None]) -> None:
        require()
        kernel = dispatch.load(FOLDER + name)
        kernel.check(q_TJX, k_SX, attn_q_THD, attn_k_SHD, scale)

    choices = {
        "pallas_gpu": functools.partial(check, "pallas_gpu", dispatch.require_hopper),
        "pallas_tpu": functools.partial(check, "pallas_tpu", dispatch.require_tpu),
    }
    name = dispatch.choose("indexer_kl", implementation, {**choices, "reference": None})
    if name != "reference":
        w_TJ = w_TJ.astype(jnp.float32)
        others = (attn_q_THD, attn_k_SHD, lse_TH, start, end, selected)
        return dispatch.each_sequence(
            lambda x: _range_kl(*x, (scale, name)), (q_TJX, k_SX, w_TJ, others), q_TJX.ndim - 3
        )
    block = query_blocks.rows_per_block(k_SX.shape[-2] * attn_q_THD.shape[-2])

    def kl_block(rows: tuple, keys: tuple[Array, Array]) -> Array:
        q, w, attn_q, lse, first, last, chosen = rows
        k, attn_k = keys
        allowed_TS = dense_reference.allowed_keys(first, last, chosen, k.shape[0])
        logits_HTS = dense_reference.head_logits(attn_q, attn_k, scale)
        target_TS = reference.target_from_logits(logits_HTS, lse, allowed_TS)
        return reference.kl_rows(target_TS, scores_reference.raw_scores(q, k, w), allowed_TS)

    def one(q: Array, k: Array, w: Array, attn_q: Array, attn_k: Array, *rest: Array) -> Array:
        lse, first, last, *chosen = rest
        rows = (q, w, attn_q, lse, first, last, chosen[0] if chosen else None)
        return query_blocks.map_query_blocks(
            kl_block, rows, (k, attn_k), block=block, causal=causal
        )

    arguments: tuple[Array, ...] = (q_TJX, k_SX, w_TJ, attn_q_THD, attn_k_SHD, lse_TH, start, end)
    arguments += () if selected is None else (selected,)
    return dispatch.over_batch(one, q_TJX.ndim - 3)(*arguments)


def sparse_indexer_kl(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    attn_q_THD: Float[Array, "*B T H D"],
    kv_SD: Float[Array, "*B S D"],
    lse_TH: Float[Array, "*B T H"],
    topk_idx_TK: Int[Array, "*B T K"],
    *,
    scale: float,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*B T"]:
    """Measure `indexer_kl` over listed keys, for attention in absorbed MQA form.

    The same value as `indexer_kl(..., selected=...)` of the listed set; work and memory are [T, K].

    Args:
        q_TJX: Index queries.
        k_SX: Index keys.
        w_TJ: Head weights with the scales folded in.
        attn_q_THD: The main attention's absorbed queries.
        kv_SD: The main attention's shared keys.
        lse_TH: float32 log-sum-exp of the attention over the same listed keys.
        topk_idx_TK: int32 key indices; -1 and out-of-range slots are ignored.
        scale: The attention's factor on the logits.
        deterministic: Make the kernel's gradient of `k_SX` the same bits every time; slower.
        implementation: None picks the best.

    Returns:
        float32 KL of each row, >= 0 up to rounding; 0 for an empty row.

    Raises:
        ValueError: If `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, section 2.1, eq. 4.
    """
    dispatch.check_width("sparse_indexer_kl", attn_q_THD.shape[-1], kv_SD.shape[-1])
    scale = dispatch.number("sparse_indexer_kl", "scale", scale)
    attn_q_THD, kv_SD, lse_TH = jax.lax.stop_gradient((attn_q_THD, kv_SD, lse_TH))

    def check_gpu() -> None:
        dispatch.require_hopper()
        kernel = dispatch.load(LISTED["gluon_gpu"])
        kernel.check(q_TJX, attn_q_THD, topk_idx_TK)

    def check_tpu() -> None:
        dispatch.require_tpu()
        kernel = dispatch.load(LISTED["pallas_tpu"])
        kernel.check(q_TJX, k_SX, attn_q_THD, kv_SD, topk_idx_TK, scale=scale)

    choices = {"gluon_gpu": check_gpu, "pallas_tpu": check_tpu, "reference": None}
    name = dispatch.choose("sparse_indexer_kl", implementation, choices)
    if name != "reference":
        w_TJ = w_TJ.astype(jnp.float32)
        others = (attn_q_THD, kv_SD, lse_TH, topk_idx_TK.astype(jnp.int32))
        options = _ListedOptions(LISTED[name], scale, deterministic)
        return dispatch.each_sequence(
            lambda x: _listed_kl(*x, options), (q_TJX, k_SX, w_TJ, others), q_TJX.ndim - 3
        )
    widest = max(kv_SD.shape[-1], attn_q_THD.shape[-2], q_TJX.shape[-2])
    block = query_blocks.rows_per_block(topk_idx_TK.shape[-1] * widest)

    def kl_block(rows: tuple[Array, ...], keys: tuple[Array, Array]) -> Array:
        q, w, attn_q, lse, topk_idx = rows
        k, kv = keys
        kv_TKD, valid_TK = sparse_reference.gather_rows(kv, topk_idx)
        logits_THK = sparse_reference.slot_logits(attn_q, kv_TKD, scale)
        target_TK = reference.target_from_logits(jnp.swapaxes(logits_THK, 0, 1), lse, valid_TK)
        k_TKX, _ = sparse_reference.gather_rows(k, topk_idx)
        dots_TJK = jnp.einsum("tjx,tkx->tjk", q, k_TKX, preferred_element_type=jnp.float32)
        scores_TK = jnp.einsum("tj,tjk->tk", w.astype(jnp.float32), jax.nn.relu(dots_TJK))
        return reference.kl_rows(target_TK, scores_TK, valid_TK)

    def one(
        q: Array, k: Array, w: Array, attn_q: Array, kv: Array, lse: Array, idx: Array
    ) -> Array:
        rows = (q, w, attn_q, lse, idx)
        return query_blocks.map_query_blocks(kl_block, rows, (k, kv), block=block, causal=False)

    arguments = (q_TJX, k_SX, w_TJ, attn_q_THD, kv_SD, lse_TH, topk_idx_TK)
    return dispatch.over_batch(one, q_TJX.ndim - 3)(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _range_kl(q: Array, k: Array, w: Array, others: tuple, options: tuple[float, str]) -> Array:
    """Run the range form on kernels, one sequence; `others` are constants of the loss, `options` scale and backend."""
    scale, name = options
    attn_q, attn_k, lse, start, end, selected = others
    rows = range_blocks.Rows(q, w, attn_q, lse, start, end, selected)
    kernels = dispatch.load(FOLDER + name).kernels()
    return range_blocks.kl_rows(kernels, rows, range_blocks.Keys(k, attn_k), scale=scale)


def _range_kl_forward(
    q: Array, k: Array, w: Array, others: tuple, options: tuple[float, str]
) -> tuple[Array, tuple]:
    return _range_kl(q, k, w, others, options), (q, k, w, others)


def _range_kl_backward(options: tuple[float, str], residuals: tuple, d_kl: Array) -> tuple:
    scale, name = options
    q, k, w, others = residuals
    attn_q, attn_k, lse, start, end, selected = others
    rows = range_blocks.Rows(q, w, attn_q, lse, start, end, selected)
    keys = range_blocks.Keys(k, attn_k)
    kernels = dispatch.load(FOLDER + name).kernels()
    d_q, d_k, d_w = range_blocks.gradients(kernels, rows, keys, d_kl, scale=scale)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_w.astype(w.dtype), None


_range_kl.defvjp(_range_kl_forward, _range_kl_backward)


class _ListedOptions(NamedTuple):
    """What the kernels of the listed form need to know: their module, the scale, whether to be deterministic."""

    module: str
    scale: float
    deterministic: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _listed_kl(q: Array, k: Array, w: Array, others: tuple, options: _ListedOptions) -> Array:
    """Run the listed form on kernels, one sequence; `others` are constants of the loss."""
    return _listed_kl_forward(q, k, w, others, options)[0]


def _listed_kl_forward(
    q: Array, k: Array, w: Array, others: tuple, options: _ListedOptions
) -> tuple[Array, Any]:
    return dispatch.load(options.module).kl_rows(q, k, w, *others, scale=options.scale)


def _listed_kl_backward(options: _ListedOptions, residuals: Any, d_kl: Array) -> tuple:
    kernel = dispatch.load(options.module)
    keywords = {"deterministic": True} if options.deterministic else {}
    return *kernel.gradients(residuals, d_kl, **keywords), None


_listed_kl.defvjp(_listed_kl_forward, _listed_kl_backward)
