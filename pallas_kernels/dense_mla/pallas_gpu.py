"""Attention over a range of keys on Hopper, forward and backward, in Pallas Mosaic GPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import padding
from pallas_kernels.dense_mla import pallas_gpu_backward, pallas_gpu_forward, tiles

check = tiles.check


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    start: Array,
    end: Array,
    selected: Array | None,
) -> tuple[Array, Array]:
    """Attend for one sequence: (out [T, H, U], log-sum-exp [T, H])."""
    return _attend_forward(scale, q, k, v, start, end, selected)[0]


def _attend_forward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    start: Array,
    end: Array,
    selected: Array | None,
) -> tuple[tuple[Array, Array], tuple]:
    inputs = (q, k, v, start, end, selected)
    out, lse_HP = pallas_gpu_forward.forward(*inputs, scale=scale)
    return (out, lse_HP[:, : out.shape[0]].T), (inputs, out, lse_HP)


def _attend_backward(scale: float, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    inputs, out, lse_HP = residuals
    gradients = pallas_gpu_backward.backward(inputs, out, lse_HP, *cotangents, scale=scale)
    return *gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def dense_mla(
    q_THD: Float[Array, "*B T H D"],
    k_SHD: Float[Array, "*B S H D"],
    v_SHU: Float[Array, "*B S H U"],
    *,
    scale: float,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    selected: Bool[Array, "*B T S"] | None = None,
) -> tuple[Float[Array, "*B T H U"], Float[Array, "*B T H"]]:
    """Attend as `op.dense_mla` does; differentiable in q, k and v.

    Sequences of a batch become documents of one long sequence, which the ranges keep apart; under a mask they are taken
    one after the other. Rows are padded with zeros to the next of `tiles.DIMS` and `tiles.VALUE_DIMS`.

    Raises:
        NotImplementedError: As `tiles.check`.
    """
    check(q_THD, k_SHD, v_SHU, scale)
    *batch, n_queries, n_heads, dim = q_THD.shape
    value_dim = v_SHU.shape[-1]
    dim = padding.least(dim, tiles.DIMS, "dims")
    q_THD, k_SHD = (padding.pad_columns(x, dim) for x in (q_THD, k_SHD))
    v_SHU = padding.pad_columns(v_SHU, padding.least(value_dim, tiles.VALUE_DIMS, "value dims"))
    n_keys = k_SHD.shape[-3]
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in (q_THD, k_SHD, v_SHU, start, end)]
    n_sequences = flat[0].shape[0]
    if selected is not None:
        flat.append(selected.reshape(-1, n_queries, n_keys))
        if n_sequences == 1:
            results = _attend(scale, *(x[0] for x in flat))
        else:
            results = lax.map(lambda x: _attend(scale, *x), tuple(flat))
    else:
        offset = jnp.arange(n_sequences, dtype=jnp.int32)[:, None] * n_keys
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in flat[:3])
        first, last = (offset + jnp.clip(x, 0, n_keys).astype(jnp.int32) for x in flat[3:])
        results = _attend(scale, q, k, v, first.reshape(-1), last.reshape(-1), None)
    out, lse = results
    shape = (*batch, n_queries, n_heads)
    return out.reshape(*shape, v_SHU.shape[-1])[..., :value_dim], lse.reshape(shape)
