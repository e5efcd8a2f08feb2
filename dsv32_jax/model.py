"""DeepSeek-V3.2: embedding, stacked layers, final norm, head and the MTP module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv32_jax import embedding, layers, segments
from dsv32_jax.block import Block, LayerStats
from dsv32_jax.config import ModelConfig, Remat
from dsv32_jax.mla import AttentionMode, Probe
from dsv32_jax.mtp import MTP

# Products of float32 arrays (the router, the head, all of a float32 model) are computed in float32 on every backend;
# by default a TPU takes one bfloat16 pass and a GPU may use TF32. Products of bfloat16 arrays do not change.
FLOAT32_PRODUCTS = "highest"


class ModelOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        hidden: [B, T, D], after the final norm; the head reads it.
        mtp_hidden: [B, T, D], the MTP module's normed state, or None.
        dense: Statistics of the plain layers, stacked, or None where there are none.
        moe: Statistics of the expert layers, stacked, or None.
        mtp: Statistics of the MTP layer, or None.
    """

    hidden: Float[Array, "B T D"]
    mtp_hidden: Float[Array, "B T D"] | None
    dense: LayerStats | None
    moe: LayerStats | None
    mtp: LayerStats | None


class DeepSeekV32(nnx.Module):
    """The model. Parameters are float32; activations have the configured dtype.

    Source: DeepSeek-V3.2 inference/model.py Transformer.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weights; equal layers are stacked along a leading axis.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        self.embed = layers.normal(rngs, (cfg.vocab_size, cfg.dim), cfg.init_std)
        self.dense_layers = _stack(cfg, cfg.n_dense_layers, False, rngs)
        self.moe_layers = _stack(cfg, cfg.n_moe_layers, True, rngs)
        self.norm = layers.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = layers.normal(rngs, (cfg.dim, cfg.vocab_size), cfg.init_std)
        self.mtp = MTP(cfg, rngs=rngs) if cfg.mtp else None
        self.cfg = cfg

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        mode: AttentionMode = "sparse",
        run_mtp: bool = False,
        indexer_loss: bool = False,
        probe: Probe | None = None,
        keep_hidden: bool = False,
        experts: Int[Array, "L B T A"] | None = None,
    ) -> ModelOutput:
        """Run the layers; apply `logits` to the result.

        Args:
            tokens: int32 token ids in [0, vocab_size).
            segment_ids: int32, 0 for padding, one id per packed document; None is one document a row. Positions,
                attention, selection and MTP stay inside a document.
            mode: "sparse" is the model; "dense" reads every earlier token; "window" the last `topk`.
            run_mtp: Also run the MTP module.
            indexer_loss: Also sum each layer's indexer KL over the keys attended to.
            probe: Called on every layer's opened attention; results come back stacked in the statistics.
            keep_hidden: Also return the residual stream after every main layer.
            experts: int32, experts that the main model's expert layers take in place of their gates' own choice, as a
                sampler reported them; -1 leaves a token's choice to the gate. The MTP layer has no part in it.

        Returns:
            The output.

        Raises:
            ValueError: If `run_mtp` is asked of a model without MTP, or experts are not given for each expert layer.
        """
        if run_mtp and self.mtp is None:
            raise ValueError("run_mtp=True needs a model with mtp=True")
        if experts is not None and len(experts) != self.cfg.n_moe_layers:
            raise ValueError(
                f"experts are of {len(experts)} layers, the model has {self.cfg.n_moe_layers} with experts"
            )
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        documents = segments.from_ids(segment_ids)

        def run_layer(
            stream: Array, layer_and_experts: tuple[Block, Array | None]
        ) -> tuple[Array, LayerStats]:
            layer, chosen = layer_and_experts
            return layer(
                stream,
                documents,
                mode=mode,
                indexer_loss=indexer_loss,
                probe=probe,
                keep_hidden=keep_hidden,
                experts=chosen,
            )

        with jax.default_matmul_precision(FLOAT32_PRODUCTS):
            stream = self._embed(tokens).astype(jnp.float32)
            stream, dense = _scan(run_layer, stream, self.dense_layers, None, self.cfg)
            stream, moe = _scan(run_layer, stream, self.moe_layers, experts, self.cfg)
            hidden = self.norm(stream).astype(self.cfg.dtype)
            mtp_hidden = mtp = None
            if run_mtp:
                mtp_hidden, mtp = self._run_mtp(
                    hidden, tokens, segment_ids, mode, indexer_loss, probe
                )
        return ModelOutput(hidden, mtp_hidden, dense, moe, mtp)

    def logits(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Multiply by the head in float32.

        Args:
            hidden_BTD: `ModelOutput.hidden` or `.mtp_hidden`.

        Returns:
            float32 logits.
        """
        with jax.default_matmul_precision(FLOAT32_PRODUCTS):
            return layers.project("btd,dv->btv", hidden_BTD.astype(jnp.float32), self.head)

    def _embed(self, tokens: Array) -> Array:
        return embedding.lookup(self.embed[...], tokens, self.cfg.dtype)

    def _run_mtp(
        self,
        hidden: Array,
        tokens: Array,
        segment_ids: Array,
        mode: AttentionMode,
        indexer_loss: bool,
        probe: Probe | None,
    ) -> tuple[Array, LayerStats]:
        assert self.mtp is not None
        next_embed = self._embed(segments.shift_left(tokens))

        def run(mtp: MTP, hidden: Array, next_embed: Array) -> tuple[Array, LayerStats]:
            return mtp(
                hidden, next_embed, segment_ids, mode=mode, indexer_loss=indexer_loss, probe=probe
            )

        return _rematerialised(run, self.cfg.remat)(self.mtp, hidden, next_embed)


def _stack(cfg: ModelConfig, n_layers: int, moe: bool, rngs: nnx.Rngs) -> Block | None:
    """Draw n layers as one Block whose arrays have a leading layer axis; None for no layer."""
    if n_layers == 0:
        return None
    return jax.vmap(lambda layer_rngs: Block(cfg, moe=moe, rngs=layer_rngs))(rngs.split(n_layers))


def _scan(
    run_layer: Callable,
    stream: Array,
    stacked: Block | None,
    experts: Array | None,
    cfg: ModelConfig,
) -> tuple[Array, LayerStats | None]:
    """Run stacked layers one after the other, each with its own given experts."""
    if stacked is None:
        return stream, None
    return jax.lax.scan(
        _rematerialised(run_layer, cfg.remat), stream, (stacked, experts), unroll=cfg.scan_unroll
    )


def _rematerialised(fn: Callable, remat: Remat) -> Callable:
    """Let the backward pass recompute what the policy does not save."""
    if remat == "none":
        return fn
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(fn, policy=policy)


def abstract_model(cfg: ModelConfig) -> Any:
    """Return the model with shapes in place of arrays; nothing is allocated.

    Args:
        cfg: The model.

    Returns:
        A DeepSeekV32 of jax.ShapeDtypeStruct.
    """
    return jax.eval_shape(lambda: DeepSeekV32(cfg, rngs=nnx.Rngs(jax.random.key(0))))
