"""Definition of attention to the listed keys of one shared key-value head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dense_mla.reference import MASKED


def gather_rows(
    kv_SD: Float[Array, "S D"], topk_idx_TK: Int[Array, "T K"]
) -> tuple[Float[Array, "T K D"], Bool[Array, "T K"]]:
    """Return the listed rows and which slots are valid; an invalid slot is a row of zeros."""
    n_keys = kv_SD.shape[0]
    valid_TK = (topk_idx_TK >= 0) & (topk_idx_TK < n_keys)
    # Zeros, not some masked row: a weight of 0 times a NaN row would be NaN.
    idx_TK = jnp.where(valid_TK, topk_idx_TK, n_keys)
    return kv_SD.at[idx_TK].get(mode="fill", fill_value=0), valid_TK


def slot_logits(
    q_THD: Float[Array, "T H D"], kv_TKD: Float[Array, "T K D"], scale: float
) -> Float[Array, "T H K"]:
    """Return scale * q . kv in float32."""
    return scale * jnp.einsum("thd,tkd->thk", q_THD, kv_TKD, preferred_element_type=jnp.float32)


def sparse_mla(
    q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    topk_idx_TK: Int[Array, "T K"],
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "T H U"], Float[Array, "T H"]]:
    """Softmax attention over the valid slots; returns the output and the natural log-sum-exp."""
    kv_TKD, valid_TK = gather_rows(kv_SD, topk_idx_TK)
    return attend_rows(q_THD, kv_TKD, valid_TK, scale, value_dim)


def attend_rows(
    q_THD: Float[Array, "T H D"],
    kv_TKD: Float[Array, "T K D"],
    valid_TK: Bool[Array, "T K"],
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "T H U"], Float[Array, "T H"]]:
    """Softmax attention of each query over its own rows."""
    logits_THK = jnp.where(valid_TK[:, None, :], slot_logits(q_THD, kv_TKD, scale), MASKED)
    peak_TH = jax.lax.stop_gradient(jnp.max(logits_THK, axis=-1))  # its gradient cancels
    weights_THK = jnp.exp(logits_THK - peak_TH[..., None])
    total_TH = jnp.sum(weights_THK, axis=-1)
    out_THU = jnp.einsum(
        "thk,tku->thu",
        weights_THK.astype(kv_TKD.dtype),
        kv_TKD[..., :value_dim],
        preferred_element_type=jnp.float32,
    )
    some_T = jnp.any(valid_TK, axis=-1)
    out_THU = jnp.where(some_T[:, None, None], out_THU / total_TH[..., None], 0.0)
    lse_TH = jnp.where(some_T[:, None], peak_TH + jnp.log(total_TH), -jnp.inf)
    return out_THU.astype(kv_TKD.dtype), lse_TH
