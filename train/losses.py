"""The training losses as (sum, weight) pairs, so that padding, packing and microbatches cannot change them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv32_jax import segments, sharding
from dsv32_jax.block import LayerStats
from dsv32_jax.model import DeepSeekV32, ModelOutput
from train import head


class Batch(NamedTuple):
    """Packed rows of tokens.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], 0 for padding, one id per document.
        trained: bool [B, T], the tokens that cross-entropies are taken on; None is every one.
    """

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    trained: Bool[Array, "B T"] | None = None


class LossSums(NamedTuple):
    """Sums over a (micro)batch. Divided by the weights of the whole batch and added up they are the loss.

    Attributes:
        lm: Next-token cross-entropy, nats.
        mtp: Cross-entropy of the token after the next, nats; 0 without MTP.
        balance: Sequence-wise balance loss x tokens, summed over expert layers.
        kl: Indexer KL, nats, summed over tokens and layers (MTP's included).
    """

    lm: Float[Array, ""]
    mtp: Float[Array, ""]
    balance: Float[Array, ""]
    kl: Float[Array, ""]


class LossWeights(NamedTuple):
    """What each sum is divided by; known from the batch alone, before any forward pass.

    Attributes:
        lm: Tokens with a successor in their document that is trained.
        mtp: Tokens whose successor's successor is.
        balance: Tokens.
        kl: Tokens.
    """

    lm: Float[Array, ""]
    mtp: Float[Array, ""]
    balance: Float[Array, ""]
    kl: Float[Array, ""]


def predicts(batch: Batch, ahead: int = 1) -> Bool[Array, "B T"]:
    """Tell which tokens are measured on the token `ahead` places on: it is in their document, and trained.

    Args:
        batch: The tokens.
        ahead: 1 for the main model, 2 for MTP.

    Returns:
        The mask.
    """
    ids, trained = batch.segment_ids, batch.trained
    for _ in range(ahead):
        ids = jnp.where(segments.next_is_same(ids), ids, 0)
        trained = None if trained is None else segments.shift_left(trained)
    return (ids != 0) if trained is None else (ids != 0) & trained


def weights(batch: Batch) -> LossWeights:
    """Count what each loss sums over.

    Args:
        batch: The tokens.

    Returns:
        The counts, at least 1 each, so that an empty batch gives loss 0.
    """

    def count(mask: Array) -> Array:
        return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    tokens = count(batch.segment_ids != 0)
    return LossWeights(count(predicts(batch)), count(predicts(batch, ahead=2)), tokens, tokens)


def next_token(
    model: DeepSeekV32, hidden_BTD: Float[Array, "B T D"], batch: Batch, ahead: int = 1
) -> Float[Array, "B T"]:
    """Return each token's cross-entropy on the token `ahead` places on, 0 where it is not measured.

    Args:
        model: Holds the head.
        hidden_BTD: State that predicts it.
        batch: The tokens.
        ahead: 1 for the main model, 2 for MTP.

    Returns:
        float32 nats.
    """
    targets = batch.tokens
    for _ in range(ahead):
        targets = segments.shift_left(targets)
    log_p_BT = head.predict(hidden_BTD, model.head[...], targets).log_p
    loss_BT = jnp.where(predicts(batch, ahead), -log_p_BT, 0.0)
    return sharding.constrain(loss_BT, "batch", "sequence")


def sums(model: DeepSeekV32, output: ModelOutput, batch: Batch, *, heads: bool) -> LossSums:
    """Add up every loss of a forward pass.

    Args:
        model: Holds the head.
        output: Its output on the batch.
        batch: The tokens.
        heads: Include the cross-entropies; the warm-up stage skips the head and leaves them 0.

    Returns:
        The sums.
    """
    lm = mtp = jnp.zeros((), jnp.float32)
    if heads:
        lm = jnp.sum(next_token(model, output.hidden, batch))
        if output.mtp_hidden is not None:
            mtp = jnp.sum(next_token(model, output.mtp_hidden, batch, ahead=2))
    return LossSums(lm, mtp, _total(output, lambda stats: stats.balance), indexer_kl(output))


def indexer_kl(output: ModelOutput) -> Float[Array, ""]:
    """Add up the indexers' KL of a forward pass: nats, over its tokens and layers; 0 where it was not asked for."""
    return _total(output, lambda stats: stats.kl)


def _total(output: ModelOutput, figure: Callable[[LayerStats], Array | None]) -> Array:
    layers = [stats for stats in (output.dense, output.moe, output.mtp) if stats is not None]
    parts = [part for part in map(figure, layers) if part is not None]
    return sum((jnp.sum(part) for part in parts), start=jnp.zeros((), jnp.float32))
