"""Two plain forms of the grouped product: blocks of rows, and XLA's ragged_dot."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def blocked(
    x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], sizes_E: Int[Array, " E"], block: int
) -> Float[Array, "M N"]:
    """Multiply each block of rows by its group's weight; every group size is a multiple of block."""
    n_blocks = x_MK.shape[0] // block
    first_row_G = jnp.arange(n_blocks, dtype=jnp.int32) * block
    ends_E = jnp.cumsum(sizes_E)
    group_G = jnp.searchsorted(ends_E, first_row_G, side="right")
    inside_G = group_G < w_EKN.shape[0]
    w_GKN = w_EKN[jnp.where(inside_G, group_G, 0)]
    out_GMN = jnp.einsum("gmk,gkn->gmn", x_MK.reshape(n_blocks, block, -1), w_GKN)
    out_GMN = jnp.where(inside_G[:, None, None], out_GMN, 0)
    return out_GMN.reshape(x_MK.shape[0], -1)


def ragged(
    x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], sizes_E: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Multiply by XLA's ragged_dot; rows past the last group are zero."""
    # A precision set around it would say how to multiply float32; a TPU refuses it for bfloat16.
    precision = None if x_MK.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    out_MN = jax.lax.ragged_dot(x_MK, w_EKN, sizes_E.astype(jnp.int32), precision=precision)
    inside_M = jnp.arange(x_MK.shape[0]) < jnp.sum(sizes_E)
    return jnp.where(inside_M[:, None], out_MN, 0)
