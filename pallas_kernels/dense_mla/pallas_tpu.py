"""Attention over a range of keys on TPU, forward and backward, in Pallas Mosaic TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, mosaic_tpu
from pallas_kernels.dense_mla import pallas_tpu_backward, pallas_tpu_forward
from pallas_kernels.dense_mla.pallas_tpu_forward import Config

MAX_DIM = 256  # of keys and of values: four heads' tiles, twice, and their accumulators fit VMEM


def check(q_THD: Array, k_SHD: Array, v_SHU: Array) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not take."""
    mosaic_tpu.check_floats(q_THD, k_SHD, v_SHU)
    for name, width in (("dims", q_THD.shape[-1]), ("value dims", v_SHU.shape[-1])):
        if width > MAX_DIM:
            raise NotImplementedError(f"takes up to {MAX_DIM} {name}, got {width}")


class _Tiles:
    """One sequence laid out for the kernels: heads first, whole blocks, the mask transposed."""

    def __init__(self, config: Config, q: Array, k: Array, v: Array, rows: tuple):
        start, end, selected = rows
        self.n_queries, self.n_keys = q.shape[0], k.shape[0]
        self.padded_queries = mosaic_tpu.round_up(self.n_queries, config.block_q)
        padded_keys = mosaic_tpu.round_up(self.n_keys, config.block_k)
        self.q = self.query_side(q)
        self.k, self.v = (mosaic_tpu.heads_first(x, padded_keys) for x in (k, v))
        bounds = (jnp.clip(x, 0, self.n_keys).astype(jnp.int32) for x in (start, end))
        self.start, self.end = (mosaic_tpu.pad_rows(x, self.padded_queries)[None] for x in bounds)
        self.mask = None
        if selected is not None:
            extra = (padded_keys - self.n_keys, self.padded_queries - self.n_queries)
            self.mask = jnp.pad(selected.T.astype(jnp.int8), ((0, extra[0]), (0, extra[1])))

    def query_side(self, x_THD: Array) -> Array:
        """Lay out an array with a row for each query and head."""
        return mosaic_tpu.heads_first(x_THD, self.padded_queries)

    def head_rows(self, x_TH: Array) -> Array:
        """Lay out a number for each query and head: [H, 1, T]."""
        return mosaic_tpu.pad_rows(x_TH, self.padded_queries).T[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[float, Config], q: Array, k: Array, v: Array, rows: tuple) -> tuple:
    """Attend for one sequence: (out [T, H, U], log-sum-exp [T, H])."""
    return _attend_forward(static, q, k, v, rows)[0]


def _attend_forward(
    static: tuple[float, Config], q: Array, k: Array, v: Array, rows: tuple
) -> tuple[tuple[Array, Array], tuple]:
    scale, config = static
    tiles = _Tiles(config, q, k, v, rows)
    out, lse = pallas_tpu_forward.forward(
        tiles.q, tiles.k, tiles.v, tiles.start, tiles.end, tiles.mask, scale=scale, config=config
    )
    out = jnp.swapaxes(out[:, : tiles.n_queries], 0, 1)
    lse = lse[:, 0, : tiles.n_queries].T
    return (out, lse), (q, k, v, rows, out, lse)


def _attend_backward(static: tuple[float, Config], residuals: tuple, cotangents: tuple) -> tuple:
    scale, config = static
    q, k, v, rows, out, lse = residuals
    d_out, d_lse = cotangents
    tiles = _Tiles(config, q, k, v, rows)
    some = jnp.isfinite(lse)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = jnp.where(some, delta - d_lse, 0.0)
    arrays = (
        *(tiles.q, tiles.k, tiles.v, tiles.query_side(d_out.astype(v.dtype))),
        *(tiles.head_rows(x) for x in (jnp.where(some, lse, 0.0), delta)),
    )
    gradients = pallas_tpu_backward.backward(
        arrays, tiles.start, tiles.end, tiles.mask, scale=scale, config=config
    )
    rows_kept = (tiles.n_queries, tiles.n_keys, tiles.n_keys)
    cut = (jnp.swapaxes(x[:, :n], 0, 1) for x, n in zip(gradients, rows_kept, strict=True))
    return *cut, None


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
    config: Config | None = None,
) -> tuple[Float[Array, "*B T H U"], Float[Array, "*B T H"]]:
    """Attend as `op.dense_mla` does, one sequence of a batch after the other; differentiable in q, k and v.

    Saved for the backward: the inputs, `out` and `lse`. Weights are rounded to the dtype of `v` before the products
    with values and gradients; everything else is float32.

    Args:
        q_THD: Queries.
        k_SHD: Keys, one per head.
        v_SHU: Values, one per head.
        scale: Factor on the logits.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        selected: Optional mask shared by all heads.
        config: Tiles; None chooses by shape.

    Returns:
        (out in the dtype of `v`, lse float32, natural log). An empty row gives out 0, lse -inf and zero gradients.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, k_SHD, v_SHU)
    if config is None:
        n_heads = q_THD.shape[-2]
        config = pallas_tpu_forward.choose_config(q_THD.shape[-3], k_SHD.shape[-3], n_heads)
    static = (scale, config)

    def one(arrays: Any) -> tuple[Array, Array]:
        return _attend(static, *arrays)

    arrays = (q_THD, k_SHD, v_SHU, (start, end, selected))
    return dispatch.each_sequence(one, arrays, q_THD.ndim - 3)
