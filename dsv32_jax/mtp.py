"""Multi-token prediction: one more layer that predicts the token after the next."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv32_jax import cache, layers, segments
from dsv32_jax.block import Block, LayerStats
from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import AttentionMode, DecodeMode, Probe


class MTP(nnx.Module):
    """Combine each token's final hidden state with its successor's embedding and run one expert layer.

    `u_i = W [enorm(Emb(t_{i+1})); hnorm(h_i)]`, embedding half first as the released weights need (the report's
    eq. 21 prints the opposite order). `h_i` is the state after the model's final norm, which is what serving engines
    feed the released weights; the report leaves it open. Embedding and head are the main model's.

    Source: DeepSeek-V3 report, section 2.2.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        self.enorm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.hnorm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.eh_proj = layers.normal(rngs, (2 * cfg.dim, cfg.dim), cfg.init_std)
        self.block = Block(cfg, moe=True, rngs=rngs)
        self.norm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        next_embed_BTD: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        *,
        mode: AttentionMode,
        indexer_loss: bool = False,
        probe: Probe | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerStats]:
        """Return the state that predicts t_{i+2} at place i.

        Args:
            hidden_BTD: The main model's normed final state.
            next_embed_BTD: Embedding of each token's successor.
            segment_ids: int32, 0 for padding; a document's last token has no successor and counts as padding here.
            mode: Which keys are attended to.
            indexer_loss: Also sum the indexer's KL.
            probe: Measures the opened attention.

        Returns:
            (normed state, the layer's statistics).
        """
        stream = self._join(hidden_BTD, next_embed_BTD)
        has_next = segments.next_is_same(segment_ids)
        documents = segments.from_ids(jnp.where(has_next, segment_ids, 0))
        stream, stats = self.block(
            stream, documents, mode=mode, indexer_loss=indexer_loss, probe=probe
        )
        return self.norm(stream).astype(hidden_BTD.dtype), stats

    def extend(
        self,
        hidden_BTD: Float[Array, "B T D"],
        next_embed_BTD: Float[Array, "B T D"],
        layer: cache.LayerCache,
        view: cache.View,
        *,
        mode: DecodeMode,
    ) -> tuple[Float[Array, "B T D"], cache.LayerCache]:
        """Return the states of new tokens of cached sequences.

        Args:
            hidden_BTD: The main model's normed final state.
            next_embed_BTD: Embedding of each token's successor.
            layer: The module's cache.
            view: Where the tokens stand; one whose successor is not known yet is padding.
            mode: "sparse" or "dense".

        Returns:
            (normed state, the cache with the new tokens).
        """
        stream = self._join(hidden_BTD, next_embed_BTD)
        stream, layer = self.block.extend(stream, layer, view, mode=mode)
        return self.norm(stream).astype(hidden_BTD.dtype), layer

    def _join(self, hidden: Array, next_embed: Array) -> Array:
        """Start the module's residual stream from both inputs, the embedding first."""
        dtype = hidden.dtype
        both = [self.enorm(next_embed).astype(dtype), self.hnorm(hidden).astype(dtype)]
        joined = jnp.concatenate(both, axis=-1)
        return layers.project("btd,de->bte", joined, self.eh_proj).astype(jnp.float32)
