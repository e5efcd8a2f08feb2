"""Definition of attention to listed rows of a cache that keeps latents and rope keys apart."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import op as fp8
from pallas_kernels.sparse_mla import reference as sparse_reference


def read_rows(
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    scale_NG: Float[Array, "N G"] | None,
    rows_TK: Int[Array, "T K"],
) -> Float[Array, "T K D"]:
    """Return the listed rows, latent first, dequantised; an invalid slot is a row of zeros."""
    latent_TKC, _ = sparse_reference.gather_rows(latent_NC, rows_TK)
    rope_TKR, _ = sparse_reference.gather_rows(rope_NR, rows_TK)
    if scale_NG is not None:
        scale_TKG, _ = sparse_reference.gather_rows(scale_NG, rows_TK)
        latent_TKC = fp8.dequantize(latent_TKC, scale_TKG).astype(rope_NR.dtype)
    return jnp.concatenate([latent_TKC, rope_TKR], axis=-1)


def paged_mla(
    q_THD: Float[Array, "T H D"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    scale_NG: Float[Array, "N G"] | None,
    rows_TK: Int[Array, "T K"],
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Softmax attention over the valid slots; returns the output and the natural log-sum-exp."""
    n_rows, value_dim = latent_NC.shape
    kv_TKD = read_rows(latent_NC, rope_NR, scale_NG, rows_TK)
    valid_TK = (rows_TK >= 0) & (rows_TK < n_rows)
    return sparse_reference.attend_rows(q_THD, kv_TKD, valid_TK, scale, value_dim)
