"""The head's distribution in the losses: log-probabilities of tokens, over chunks of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv32_jax.model import FLOAT32_PRODUCTS

VOCAB_CHUNK = 16384  # logits of more columns than this are never alive at once
FAR_BELOW = -1e30  # a peak below every logit, finite so that differences of two are


class Kept(NamedTuple):
    """The tokens that were left to draw from, as top-p and top-k leave them: ragged lists, one a batch row.

    A place without an entry keeps every token.

    Attributes:
        place: int32 [B, M], the place in [0, T) that the entry belongs to; T for padding.
        token: int32 [B, M], a token kept there.
    """

    place: Int[Array, "B M"]
    token: Int[Array, "B M"]


class Prediction(NamedTuple):
    """What the head says of each target.

    Attributes:
        log_p: float32, natural log-probability; -inf where the target was not kept.
        entropy: float32, of the distribution, nats; None unless asked for.
    """

    log_p: Float[Array, "B T"]
    entropy: Float[Array, "B T"] | None


def predict(
    hidden_BTD: Float[Array, "B T D"],
    head_DV: Float[Array, "D V"],
    targets_BT: Int[Array, "B T"],
    *,
    temperature_BT: Float[Array, "B T"] | None = None,
    kept: Kept | None = None,
    entropy: bool = False,
) -> Prediction:
    """Return the log-probability of each target, in float32, over chunks of the vocabulary.

    `log softmax(h . W / temperature)[target]`, the softmax over the kept tokens. A chunk holds the columns v with the
    same v mod n_chunks, so that a vocabulary sharded in contiguous pieces stays sharded; the backward pass recomputes
    each chunk's logits.

    Args:
        hidden_BTD: States that the head reads, any float dtype; the product is float32.
        head_DV: float32 head.
        targets_BT: int32 in [0, V).
        temperature_BT: Divides the logits, positive; None is 1.
        kept: What each distribution is over; None is every token.
        entropy: Also return the distributions' entropies.

    Returns:
        The prediction.
    """
    vocab = head_DV.shape[1]
    n_chunks = -(-vocab // VOCAB_CHUNK)
    padded = -(-vocab // n_chunks) * n_chunks
    head_DV = jnp.pad(head_DV.astype(jnp.float32), ((0, 0), (0, padded - vocab)))
    head_CDW = jnp.moveaxis(head_DV.reshape(head_DV.shape[0], -1, n_chunks), 2, 0)
    hidden_BTD = hidden_BTD.astype(jnp.float32)
    columns_W = jnp.arange(padded // n_chunks, dtype=jnp.int32) * n_chunks

    def allowed(offset: Array) -> Array:
        inside_W = columns_W + offset < vocab
        if kept is None:
            return inside_W
        return inside_W & _kept_columns(kept, targets_BT.shape[1], len(columns_W), n_chunks, offset)

    @jax.checkpoint
    def add_chunk(carry: tuple, chunk: tuple[Array, Array]) -> tuple:
        peak_BT, total_BT, weighted_BT, target_BT = carry
        offset, head_DW = chunk
        logits_BTW = jnp.matmul(hidden_BTD, head_DW, precision=FLOAT32_PRODUCTS)
        if temperature_BT is not None:
            logits_BTW /= temperature_BT[..., None]
        logits_BTW = jnp.where(allowed(offset), logits_BTW, -jnp.inf)
        new_peak_BT = jnp.maximum(peak_BT, jax.lax.stop_gradient(jnp.max(logits_BTW, axis=-1)))
        shrink_BT = jnp.exp(peak_BT - new_peak_BT)
        above_BTW = logits_BTW - new_peak_BT[..., None]
        weights_BTW = jnp.exp(above_BTW)
        if entropy:
            # sum of w (logit - peak), relative to the new peak; an excluded token's 0 * -inf counts as 0.
            weighted_BT = shrink_BT * (weighted_BT + total_BT * (peak_BT - new_peak_BT))
            finite_BTW = jnp.where(weights_BTW > 0, above_BTW, 0.0)
            weighted_BT += jnp.sum(weights_BTW * finite_BTW, axis=-1)
        total_BT = total_BT * shrink_BT + jnp.sum(weights_BTW, axis=-1)
        hit_BTW = targets_BT[..., None] == columns_W + offset
        target_BT += jnp.sum(jnp.where(hit_BTW, logits_BTW, 0.0), axis=-1)
        return (new_peak_BT, total_BT, weighted_BT, target_BT), None

    zero_BT = jnp.zeros(targets_BT.shape)
    start = (zero_BT + FAR_BELOW, zero_BT, zero_BT, zero_BT)
    chunks = (jnp.arange(n_chunks, dtype=jnp.int32), head_CDW)
    if n_chunks == 1:
        carry, _ = add_chunk(start, jax.tree.map(lambda x: x[0], chunks))
    else:
        carry, _ = jax.lax.scan(add_chunk, start, chunks)
    peak_BT, total_BT, weighted_BT, target_BT = carry
    log_total_BT = jnp.log(total_BT)
    entropy_BT = log_total_BT - weighted_BT / total_BT if entropy else None
    return Prediction(target_BT - (peak_BT + log_total_BT), entropy_BT)


def _kept_columns(kept: Kept, n_places: int, width: int, n_chunks: int, offset: Array) -> Array:
    """Mark the columns of a chunk that are kept [B, T, W]: all of them at a place that no entry names."""

    def one_row(place_M: Array, token_M: Array) -> Array:
        column_M = jnp.where(token_M % n_chunks == offset, token_M // n_chunks, width)
        listed_TW = jnp.zeros((n_places, width), bool)
        listed_TW = listed_TW.at[place_M, column_M].set(True, mode="drop")
        named_T = jnp.zeros(n_places, bool).at[place_M].set(True, mode="drop")
        return listed_TW | ~named_T[:, None]

    return jax.vmap(one_row)(kept.place, kept.token)
