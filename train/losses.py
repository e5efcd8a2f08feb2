"""The training losses as (sum, weight) pairs, so that padding, packing and microbatches cannot change them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv32_jax import segments, sharding
from dsv32_jax.block import LayerStats
from dsv32_jax.model import FLOAT32_PRODUCTS, DeepSeekV32, ModelOutput

VOCAB_CHUNK = 16384  # logits of more columns than this are never alive at once


class Batch(NamedTuple):
    """Packed rows of tokens.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], 0 for padding, one id per document.
    """

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]


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
    """What each sum is divided by; known from the segment ids alone, before any forward pass.

    Attributes:
        lm: Tokens with a successor in their document.
        mtp: Tokens with two.
        balance: Tokens.
        kl: Tokens.
    """

    lm: Float[Array, ""]
    mtp: Float[Array, ""]
    balance: Float[Array, ""]
    kl: Float[Array, ""]


def weights(segment_ids: Int[Array, "B T"]) -> LossWeights:
    """Count what each loss sums over.

    Args:
        segment_ids: int32, 0 for padding.

    Returns:
        The counts, at least 1 each, so that an empty batch gives loss 0.
    """

    def count(mask: Array) -> Array:
        return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    one = segments.next_is_same(segment_ids)
    two = one & segments.next_is_same(jnp.where(one, segment_ids, 0))
    tokens = count(segment_ids != 0)
    return LossWeights(count(one), count(two), tokens, tokens)


def cross_entropy(
    hidden_ND: Float[Array, "N D"], head_DV: Float[Array, "D V"], targets_N: Int[Array, " N"]
) -> Float[Array, " N"]:
    """Return the cross-entropy of each row, in float32, over chunks of the vocabulary.

    `logsumexp_v(h . W[:, v]) - h . W[:, target]`. A chunk holds the columns v with the same v mod n_chunks, so that a
    vocabulary sharded in contiguous pieces stays sharded; the backward pass recomputes each chunk's logits.

    Args:
        hidden_ND: Rows the head reads, any float dtype; the product is float32.
        head_DV: float32 head.
        targets_N: int32 in [0, V).

    Returns:
        float32, nats.
    """
    vocab = head_DV.shape[1]
    n_chunks = -(-vocab // VOCAB_CHUNK)
    padded = -(-vocab // n_chunks) * n_chunks
    head_DV = jnp.pad(head_DV.astype(jnp.float32), ((0, 0), (0, padded - vocab)))
    head_CDW = jnp.moveaxis(head_DV.reshape(head_DV.shape[0], -1, n_chunks), 2, 0)
    hidden_ND = hidden_ND.astype(jnp.float32)
    columns_W = jnp.arange(padded // n_chunks, dtype=jnp.int32) * n_chunks

    @jax.checkpoint
    def add_chunk(carry: tuple[Array, Array, Array], chunk: tuple[Array, Array]) -> tuple:
        peak_N, total_N, target_N = carry
        offset, head_DW = chunk
        column_W = columns_W + offset
        logits_NW = jnp.where(
            column_W < vocab, jnp.matmul(hidden_ND, head_DW, precision=FLOAT32_PRODUCTS), -jnp.inf
        )
        new_peak_N = jnp.maximum(peak_N, jax.lax.stop_gradient(jnp.max(logits_NW, axis=1)))
        total_N = total_N * jnp.exp(peak_N - new_peak_N)
        total_N += jnp.sum(jnp.exp(logits_NW - new_peak_N[:, None]), axis=1)
        hit_NW = targets_N[:, None] == column_W
        target_N += jnp.sum(jnp.where(hit_NW, logits_NW, 0.0), axis=1)
        return (new_peak_N, total_N, target_N), None

    n_rows = hidden_ND.shape[0]
    start = (jnp.full(n_rows, -1e30), jnp.zeros(n_rows), jnp.zeros(n_rows))
    chunks = (jnp.arange(n_chunks, dtype=jnp.int32), head_CDW)
    if n_chunks == 1:
        (peak_N, total_N, target_N), _ = add_chunk(start, jax.tree.map(lambda x: x[0], chunks))
    else:
        (peak_N, total_N, target_N), _ = jax.lax.scan(add_chunk, start, chunks)
    return peak_N + jnp.log(total_N) - target_N


def next_token(
    model: DeepSeekV32, hidden_BTD: Float[Array, "B T D"], batch: Batch, ahead: int = 1
) -> Float[Array, "B T"]:
    """Return each token's cross-entropy on the token `ahead` places on, 0 where its document has none.

    Args:
        model: Holds the head.
        hidden_BTD: State that predicts it.
        batch: The tokens.
        ahead: 1 for the main model, 2 for MTP.

    Returns:
        float32 nats.
    """
    targets, ids = batch.tokens, batch.segment_ids
    for _ in range(ahead):
        ids = jnp.where(segments.next_is_same(ids), ids, 0)
        targets = segments.shift_left(targets)
    flat_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    loss_BT = cross_entropy(flat_ND, model.head[...], targets.reshape(-1)).reshape(targets.shape)
    return sharding.constrain(jnp.where(ids != 0, loss_BT, 0.0), "batch", "sequence")


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
    zero = jnp.zeros((), jnp.float32)
    layers = [stats for stats in (output.dense, output.moe, output.mtp) if stats is not None]
    lm = mtp = zero
    if heads:
        lm = jnp.sum(next_token(model, output.hidden, batch))
        if output.mtp_hidden is not None:
            mtp = jnp.sum(next_token(model, output.mtp_hidden, batch, ahead=2))
    return LossSums(lm, mtp, _total(layers, "balance", zero), _total(layers, "kl", zero))


def _total(layers: list[LayerStats], name: str, zero: Array) -> Array:
    parts = [getattr(stats, name) for stats in layers if getattr(stats, name) is not None]
    return sum((jnp.sum(part) for part in parts), start=zero)
