"""Definition of the KL divergence between the attention's head-summed weights and the indexer's softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.dense_mla.reference import MASKED


def target_from_logits(
    logits_HTS: Float[Array, "H T S"], lse_TH: Float[Array, "T H"], allowed_TS: Bool[Array, "T S"]
) -> Float[Array, "T S"]:
    """Sum the heads' attention weights and normalise each row to 1; an empty row is all zero."""
    lse_HT1 = jnp.where(jnp.isfinite(lse_TH), lse_TH, 0.0).T[..., None]
    weights_HTS = jnp.exp(jnp.where(allowed_TS, logits_HTS, MASKED) - lse_HT1)
    summed_TS = jnp.where(allowed_TS, jnp.sum(weights_HTS, axis=0), 0.0)
    norm_T1 = jnp.sum(summed_TS, axis=-1, keepdims=True)
    return jax.lax.stop_gradient(summed_TS / jnp.where(norm_T1 > 0, norm_T1, 1.0))


def kl_rows(
    target_TS: Float[Array, "T S"], scores_TS: Float[Array, "T S"], allowed_TS: Bool[Array, "T S"]
) -> Float[Array, " T"]:
    """Return KL(target || softmax(scores)) of each row over its allowed keys; 0 for an empty row."""
    log_q_TS = jax.nn.log_softmax(jnp.where(allowed_TS, scores_TS, MASKED), axis=-1)
    log_p_TS = jnp.log(jnp.where(target_TS > 0, target_TS, 1.0))
    return jnp.sum(jnp.where(target_TS > 0, target_TS * (log_p_TS - log_q_TS), 0.0), axis=-1)
