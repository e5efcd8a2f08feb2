"""Definition of attention to listed rows of a cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_mla import layout
from pallas_kernels.sparse_mla import reference as sparse_reference


def paged_mla(
    q_THD: Float[Array, "T H D"],
    cache: layout.Parts | layout.Records,
    rows_TK: Int[Array, "T K"],
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Softmax attention over the valid slots; returns the output and the natural log-sum-exp."""
    kv_TKD = jnp.concatenate(layout.read(cache, rows_TK), axis=-1)
    valid_TK = (rows_TK >= 0) & (rows_TK < cache.n_rows)
    return sparse_reference.attend_rows(q_THD, kv_TKD, valid_TK, scale, cache.format.latent_dim)
