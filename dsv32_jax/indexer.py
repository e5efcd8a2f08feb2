"""Lightning indexer: cheap queries, keys and head weights that rank the keys of each token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv32_jax import layers, rope
from dsv32_jax.config import ModelConfig
from pallas_kernels.fp8 import op as fp8


class IndexerTensors(NamedTuple):
    """What the score `I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])` is made of.

    Attributes:
        q: [B, T, J, X] index queries.
        k: [B, S, X] index keys, one per token.
        w: float32 [B, T, J] head weights, with J^-0.5 and X^-0.5 folded in.
    """

    q: Float[Array, "B T J X"]
    k: Float[Array, "B S X"]
    w: Float[Array, "B T J"]


class Indexer(nnx.Module):
    """Project a layer's input to index queries, keys and weights.

    Source: DeepSeek-V3.2 inference/model.py Indexer (final version: half-split rotation, weights in float32).
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        dims = cfg.indexer
        self.wq_b = layers.normal(
            rngs, (cfg.mla.q_lora_rank, dims.n_heads, dims.head_dim), cfg.init_std
        )
        self.wk = layers.normal(rngs, (cfg.dim, dims.head_dim), cfg.init_std)
        self.k_norm = layers.LayerNorm(dims.head_dim)
        self.weights_proj = layers.normal(rngs, (cfg.dim, dims.n_heads), cfg.init_std)
        self.cfg = cfg

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        qr_BTQ: Float[Array, "B T Q"],
        cos_BTR: Float[Array, "B T R"],
        sin_BTR: Float[Array, "B T R"],
    ) -> IndexerTensors:
        """Compute q, k and w; inputs are detached, so that no gradient reaches the main model.

        Args:
            x_BTD: The attention's input, after its norm.
            qr_BTQ: The normed query latent.
            cos_BTR: float32 cosines of the R/2 angles.
            sin_BTR: float32 sines.

        Returns:
            The tensors the score is made of.
        """
        x_BTD, qr_BTQ = jax.lax.stop_gradient((x_BTD, qr_BTQ))
        dims = self.cfg.indexer
        q = layers.project("btq,qjx->btjx", qr_BTQ, self.wq_b)
        k = self.k_norm(layers.project("btd,dx->btx", x_BTD, self.wk))
        q = self._prepare(q, cos_BTR[:, :, None], sin_BTR[:, :, None])
        k = self._prepare(k, cos_BTR, sin_BTR)
        w = layers.project("btd,dj->btj", x_BTD.astype(jnp.float32), self.weights_proj)
        return IndexerTensors(q, k, w * (dims.n_heads**-0.5 * dims.head_dim**-0.5))

    def _prepare(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotate the first R dims, then Hadamard and FP8 rounding as configured."""
        rope_dim = self.cfg.mla.rope_dim
        turned = rope.rotate_half_split(x[..., :rope_dim], cos, sin)
        x = jnp.concatenate([turned, x[..., rope_dim:]], axis=-1)
        if self.cfg.indexer.hadamard:
            x = rope.hadamard(x)
        return fp8.simulate(x) if self.cfg.indexer.fp8 else x
