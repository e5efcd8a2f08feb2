"""One decoder layer: attention and feed-forward around the residual stream."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv32_jax import cache, layers, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.gate import Routing
from dsv32_jax.mla import MLA, AttentionMode, DecodeMode, Probe
from dsv32_jax.moe import MoE
from dsv32_jax.segments import Segments


class LayerStats(NamedTuple):
    """What a layer reports beside its output; None where it has none. Stacked layers add a leading axis.

    Attributes:
        kl: float32 [], the indexer's KL summed over the tokens.
        balance: float32 [], see `gate.balance_sum`.
        load: float32 [E], tokens per expert.
        probe: Whatever the probe returned.
        hidden: [B, T, D], the residual stream after the layer, in the model's dtype.
        rerouted: float32 [], choices of the gate that given experts replaced.
    """

    kl: Array | None = None
    balance: Array | None = None
    load: Array | None = None
    probe: Any = None
    hidden: Array | None = None
    rerouted: Array | None = None


class Block(nnx.Module):
    """Pre-norm decoder layer with a plain or a mixture-of-experts feed-forward.

    The residual stream is handed on in float32 and rounded to the model's dtype before each addition: the reference
    stores the rounded sum but norms the unrounded one (its fused add and norm), and so does this.

    Source: DeepSeek-V3.2 inference/model.py Block, RMSNorm with residual.
    """

    def __init__(self, cfg: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            cfg: The model.
            moe: Use experts instead of the plain feed-forward.
            rngs: Source of randomness.
        """
        self.attn_norm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = MLA(cfg, rngs=rngs)
        self.ffn_norm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.moe = MoE(cfg, rngs=rngs) if moe else None
        self.ffn = (
            None if moe else layers.FeedForward(cfg.dim, cfg.ffn_dim, cfg.init_std, rngs=rngs)
        )
        self.dtype = cfg.dtype

    def __call__(
        self,
        stream_BTD: Float[Array, "B T D"],
        documents: Segments,
        *,
        mode: AttentionMode,
        indexer_loss: bool = False,
        probe: Probe | None = None,
        keep_hidden: bool = False,
        experts: Int[Array, "B T A"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerStats]:
        """Apply attention and feed-forward.

        Args:
            stream_BTD: float32 residual stream, not yet rounded.
            documents: The documents.
            mode: Which keys are attended to, see `MLA`.
            indexer_loss: Also sum the indexer's KL.
            probe: Measures the opened attention.
            keep_hidden: Also return the rounded stream.
            experts: In place of the gate's own choice, see `Gate`; of an expert layer.

        Returns:
            (float32 stream, the layer's statistics).
        """
        x = self.attn_norm(stream_BTD).astype(self.dtype)
        out, kl_BT, measured = self.attn(
            x, documents, mode=mode, indexer_loss=indexer_loss, probe=probe
        )
        stream_BTD, routing = self._feed_forward(self._add(stream_BTD, out), documents, experts)
        balance = load = rerouted = None
        if routing is not None:
            balance, load, rerouted = routing.balance, routing.load, routing.rerouted
        kl = None if kl_BT is None else jnp.sum(jnp.where(documents.valid, kl_BT, 0.0))
        hidden = stream_BTD.astype(self.dtype) if keep_hidden else None
        return stream_BTD, LayerStats(kl, balance, load, measured, hidden, rerouted)

    def extend(
        self,
        stream_BTD: Float[Array, "B T D"],
        layer: cache.LayerCache,
        view: cache.View,
        *,
        mode: DecodeMode,
    ) -> tuple[Float[Array, "B T D"], cache.LayerCache]:
        """Apply the layer to new tokens of cached sequences.

        Args:
            stream_BTD: float32 residual stream of the new tokens, not yet rounded.
            layer: The layer's cache.
            view: Where the tokens stand.
            mode: "sparse" or "dense".

        Returns:
            (float32 stream, the cache with the new tokens).
        """
        x = self.attn_norm(stream_BTD).astype(self.dtype)
        out, layer = self.attn.extend(x, layer, view, mode=mode)
        # The gate's statistics, which need the documents, are not read here.
        place = jnp.maximum(view.position, 0)
        documents = Segments(jnp.zeros_like(place), view.end, place, view.position >= 0)
        stream_BTD, routing = self._feed_forward(self._add(stream_BTD, out), documents)
        if routing is not None:
            layer = cache.write_experts(layer, view.rows(view.position), routing.experts)
        return stream_BTD, layer

    def _feed_forward(
        self, stream: Array, documents: Segments, experts: Array | None = None
    ) -> tuple[Array, Routing | None]:
        x = self.ffn_norm(stream).astype(self.dtype)
        if self.moe is None:
            assert self.ffn is not None
            return self._add(stream, self.ffn(x)), None
        out, routing = self.moe(x, documents, experts)
        return self._add(stream, out), routing

    def _add(self, stream: Array, delta: Array) -> Array:
        rounded = stream.astype(self.dtype).astype(jnp.float32)
        added = rounded + delta.astype(jnp.float32)
        return sharding.constrain(added, "batch", "sequence", None)
