"""Public op: attention to listed keys, in absorbed MQA form."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, padding, query_blocks
from pallas_kernels.sparse_mla import reference

FOLDER = "pallas_kernels.sparse_mla."
KERNELS = {  # and the modules of their backwards, best first
    name: f"{name}_backward" for name in ("gluon_gpu", "pallas_gpu", "pallas_tpu")
}
DETERMINISTIC = ("gluon_gpu", "pallas_tpu")  # kernels with a repeatable backward
# Widths of values and of the rest to which rows are padded with zeros for a kernel that does not take theirs.
PADDED = ((128, 64), (256, 64), (512, 64))


def sparse_mla(
    q_THD: Float[Array, "*B T H D"],
    kv_SD: Float[Array, "*B S D"],
    topk_idx_TK: Int[Array, "*B T K"],
    *,
    scale: float,
    value_dim: int,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B T H U"], Float[Array, "*B T H"]]:
    """Attend to the listed keys of one key-value head that all query heads share.

    `out[t, h] = sum_i softmax_i(scale * q[t, h] . kv[idx[t, i]]) kv[idx[t, i], :value_dim]` over the valid slots i.
    Slots with -1 or an index outside [0, S) are ignored; a duplicate counts once a slot. Kernels take rows of up to 576
    columns, 512 of them values, in copies padded to widths of theirs, up to those.

    Args:
        q_THD: Absorbed queries (latent part first, then rope part).
        kv_SD: Latent and rope key of each position.
        topk_idx_TK: int32 key indices, any order; the caller has made them causal.
        scale: Factor on the logits.
        value_dim: The values are the first `value_dim` columns of `kv_SD`, in [1, D].
        deterministic: Make the kernels' gradient of `kv_SD` the same bits every time; slower. Where no kernel takes the
            input, sums are in the order that XLA chooses.
        implementation: None picks the best.

    Returns:
        (out [T, H, value_dim] in the dtype of `kv_SD`, lse float32, natural log). A row without a valid slot gives
        out 0, lse -inf and zero gradients.

    Raises:
        ValueError: If `value_dim` is outside [1, D], queries and keys differ in width, `scale` is traced or
            `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, eq. 2 and appendix A (MQA mode).
    """
    dim = kv_SD.shape[-1]
    if not 1 <= value_dim <= dim:
        raise ValueError(f"sparse_mla: value_dim={value_dim} must be in [1, {dim}]")
    dispatch.check_width("sparse_mla", q_THD.shape[-1], dim)
    scale = dispatch.number("sparse_mla", "scale", scale)
    fit = functools.partial(_fit, q_THD, kv_SD, topk_idx_TK, scale, value_dim)
    choices = {name: functools.partial(fit, name) for name in KERNELS}
    name = dispatch.choose("sparse_mla", implementation, {**choices, "reference": None})
    if name == "reference":
        if 0 in (*q_THD.shape, *kv_SD.shape, *topk_idx_TK.shape):
            out = jnp.zeros((*q_THD.shape[:-1], value_dim), kv_SD.dtype)
            return out, jnp.full(q_THD.shape[:-1], -jnp.inf, jnp.float32)
        return _reference(q_THD, kv_SD, topk_idx_TK, scale, value_dim)
    batch = q_THD.shape[:-3]
    options = _Options(name, implementation, scale, value_dim, deterministic)
    out, lse = _attend(*one_sequence(q_THD, kv_SD, topk_idx_TK), options)
    return out.reshape(*batch, -1, *out.shape[1:]), lse.reshape(*batch, -1, lse.shape[-1])


def _fit(
    q: Array, kv: Array, topk_idx: Array, scale: float, value_dim: int, backend: str
) -> tuple[int, int]:
    """Return the widths of values and of the rest at which a backend takes the rows: their own, or padded.

    Raises:
        NotImplementedError: If it takes them at none; says why not at the widest tried.
    """
    if backend.startswith("pallas_tpu"):
        dispatch.require_tpu()
    else:
        dispatch.require_hopper()
    if 0 in (*q.shape, *kv.shape, *topk_idx.shape):
        raise NotImplementedError("an axis of length 0")
    check = dispatch.load(FOLDER + backend).check
    own = _split(value_dim, kv.shape[-1])
    fitting = [widths for widths in PADDED if widths[0] >= own[0] and widths[1] >= own[1]]
    refusals: list[NotImplementedError] = []
    for widths in (own, *fitting):
        rows = (jax.ShapeDtypeStruct((*x.shape[:-1], sum(widths)), x.dtype) for x in (q, kv))
        try:
            check(*rows, topk_idx, scale=scale, value_dim=widths[0])
        except NotImplementedError as reason:
            refusals.append(reason)
        else:
            return widths
    raise refusals[-1]


def _split(value_dim: int, dim: int) -> tuple[int, int]:
    """Return how many columns are treated as values and how many as the rest: surplus columns become values unread."""
    values = max(value_dim, dim - PADDED[0][1])
    return values, dim - values


def one_sequence(
    q_THD: Float[Array, "*B T H D"],
    kv_SD: Float[Array, "*B S D"],
    topk_idx_TK: Int[Array, "*B T K"],
) -> tuple[Float[Array, "N H D"], Float[Array, "M D"], Int[Array, "N K"]]:
    """Lay the sequences of a batch end to end, with indices into the joined keys; invalid slots become -1."""
    n_keys = kv_SD.shape[-2]
    n_sequences = math.prod(kv_SD.shape[:-2])
    idx_BTK = topk_idx_TK.astype(jnp.int32).reshape(n_sequences, -1, topk_idx_TK.shape[-1])
    first_B11 = n_keys * jnp.arange(n_sequences, dtype=jnp.int32)[:, None, None]
    idx_BTK = jnp.where((idx_BTK >= 0) & (idx_BTK < n_keys), idx_BTK + first_B11, -1)
    q_NHD = q_THD.reshape(-1, *q_THD.shape[-2:])
    return q_NHD, kv_SD.reshape(-1, kv_SD.shape[-1]), idx_BTK.reshape(-1, idx_BTK.shape[-1])


class _Options(NamedTuple):
    """What the kernels' derivative needs to know: the forward's backend, and what the caller asked for."""

    name: str
    implementation: str | None
    scale: float
    value_dim: int
    deterministic: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q: Array, kv: Array, topk_idx: Array, options: _Options) -> tuple[Array, Array]:
    """Run a kernel's forward."""
    name, _, scale, value_dim, _ = options
    widths = _fit(q, kv, topk_idx, scale, value_dim, name)
    values, _ = _split(value_dim, kv.shape[-1])
    rows = (padding.spread(x, values, widths) for x in (q, kv))
    forward = dispatch.load(FOLDER + name).forward
    out, lse = forward(*rows, topk_idx, scale=scale, value_dim=widths[0])
    return out[..., :value_dim], lse


def _attend_forward(q: Array, kv: Array, topk_idx: Array, options: _Options) -> tuple[Any, Any]:
    out, lse = _attend(q, kv, topk_idx, options)
    return (out, lse), (q, kv, topk_idx, out, lse)


def _attend_backward(options: _Options, residuals: tuple, cotangents: tuple) -> tuple:
    """Run the best backward for the input: its kernels take fewer shapes than the forward's."""
    q, kv, topk_idx, out, lse = residuals
    scale, value_dim = options.scale, options.value_dim

    def fit(name: str) -> tuple[int, int]:
        if options.deterministic and name not in DETERMINISTIC:
            raise NotImplementedError("is not deterministic")
        return _fit(q, kv, topk_idx, scale, value_dim, KERNELS[name])

    choices = {name: functools.partial(fit, name) for name in KERNELS}
    name = dispatch.choose(
        "sparse_mla backward", options.implementation, {**choices, "reference": None}
    )
    if name == "reference":
        pull = jax.vjp(lambda q, kv: _reference(q, kv, topk_idx, scale, value_dim), q, kv)[1]
        return *pull(cotangents), None
    widths = fit(name)
    d_out, d_lse = cotangents
    values, _ = _split(value_dim, kv.shape[-1])
    rows = (padding.spread(x, values, widths) for x in (q, kv))
    out, d_out = (padding.pad_columns(x, widths[0]) for x in (out, d_out))
    keywords = {"deterministic": True} if options.deterministic else {}
    backward = dispatch.load(FOLDER + KERNELS[name]).backward
    gradients = backward(
        *rows, topk_idx, out, lse, d_out, d_lse, scale=scale, value_dim=widths[0], **keywords
    )
    return *(padding.gather(x, values, kv.shape[-1], widths) for x in gradients), None


_attend.defvjp(_attend_forward, _attend_backward)


def _reference(
    q_THD: Array, kv_SD: Array, topk_idx_TK: Array, scale: float, value_dim: int
) -> tuple[Array, Array]:
    """Run the definition a block of queries at a time."""
    n_slots = topk_idx_TK.shape[-1]
    block = query_blocks.rows_per_block(n_slots * max(kv_SD.shape[-1], q_THD.shape[-2]))

    def attend_block(rows: tuple[Array, Array], kv: Array) -> tuple[Array, Array]:
        q, topk_idx = rows
        return reference.sparse_mla(q, kv, topk_idx, scale, value_dim)

    def one(q: Array, kv: Array, topk_idx: Array) -> tuple[Array, Array]:
        return query_blocks.map_query_blocks(
            attend_block, (q, topk_idx), kv, block=block, causal=False
        )

    return dispatch.over_batch(one, q_THD.ndim - 3)(q_THD, kv_SD, topk_idx_TK)
