"""Definition of attention over a range of keys, optionally under a mask of selected keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.indexer_scores.reference import key_mask

MASKED = -1e30  # finite, so that an empty row gives no NaN forward or backward


def allowed_keys(
    start_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    selected_TS: Bool[Array, "T _"] | None,
    n_keys: int,
) -> Bool[Array, "T S"]:
    """Return the keys each query may read: in its range and, if a mask is given, selected."""
    range_TS = key_mask(start_T, end_T, n_keys)
    return range_TS if selected_TS is None else range_TS & selected_TS[:, :n_keys]


def head_logits(
    q_THD: Float[Array, "T H D"], k_SHD: Float[Array, "S H D"], scale: float
) -> Float[Array, "H T S"]:
    """Return scale * q . k in float32."""
    logits_HTS = jnp.einsum("thd,shd->hts", q_THD, k_SHD, preferred_element_type=jnp.float32)
    return logits_HTS * scale


def dense_mla(
    q_THD: Float[Array, "T H D"],
    k_SHD: Float[Array, "S H D"],
    v_SHU: Float[Array, "S H U"],
    allowed_TS: Bool[Array, "T S"],
    scale: float,
) -> tuple[Float[Array, "T H U"], Float[Array, "T H"]]:
    """Softmax attention over the allowed keys; returns the output and the natural log-sum-exp."""
    logits_HTS = jnp.where(allowed_TS, head_logits(q_THD, k_SHD, scale), MASKED)
    peak_HT = jax.lax.stop_gradient(jnp.max(logits_HTS, axis=-1))  # its gradient cancels
    weights_HTS = jnp.exp(logits_HTS - peak_HT[..., None])
    total_HT = jnp.sum(weights_HTS, axis=-1)
    out_THU = jnp.einsum(
        "hts,shu->thu",
        weights_HTS.astype(v_SHU.dtype),
        v_SHU,
        preferred_element_type=jnp.float32,
    )
    some_T = jnp.any(allowed_TS, axis=-1)
    out_THU = jnp.where(some_T[:, None, None], out_THU / total_HT.T[..., None], 0.0)
    lse_TH = jnp.where(some_T[:, None], (peak_HT + jnp.log(total_HT)).T, -jnp.inf)
    return out_THU.astype(v_SHU.dtype), lse_TH
