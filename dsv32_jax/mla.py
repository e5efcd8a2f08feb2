"""Multi-head latent attention with DeepSeek Sparse Attention, and the indexer's loss beside it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv32_jax import cache, layers, rope, sharded_ops, sharding
from dsv32_jax.config import MLAConfig, ModelConfig
from dsv32_jax.indexer import Indexer, IndexerTensors
from dsv32_jax.segments import Segments
from pallas_kernels import dispatch
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.topk_select import reference as topk_select

AttentionMode = Literal["dense", "sparse", "window"]
DecodeMode = Literal[
    "dense", "sparse"
]  # of cached sequences; the window is a control in training only
MAX_DECODE_TOKENS = (
    8  # new tokens a sequence up to which only the selected rows of its cache are read
)
# Measured on an H200, where the two forms meet at 14,000 tokens and the mask's memory grows faster.
MASKED_MAX_LEN = 12288
# Counted by benchmarks/tpu_roofline.py: rows are copied one by one, so that the forms of a training step meet at 32,768
# tokens on a v5p and later on v6e and tpu7x, where a mask takes gigabytes.
MASKED_MAX_LEN_TPU = 32768
LATENT_NORM_EPS = 1e-6  # fixed in the reference, whatever the model's rms_norm_eps


class AttentionTensors(NamedTuple):
    """A layer's attention laid open for measurements, in MHA form.

    Attributes:
        q: [B, T, H, P+R] queries.
        k: [B, S, H, P+R] keys.
        lse: float32 [B, T, H], natural log-sum-exp over the keys attended to.
        index: The indexer's tensors.
        scale: Factor on q . k.
        start: int32 [B, T], first key of the token's document.
        end: int32 [B, T], one past its last visible key.
        chosen: The keys that sparse attention read: bool [B, T, S], or int32 [B, T, K], ascending, then -1; else None.
    """

    q: Array
    k: Array
    lse: Array
    index: IndexerTensors  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    scale: float
    start: Array
    end: Array
    chosen: Array | None = None


Probe = Callable[[AttentionTensors], Any]


class Latents(NamedTuple):
    """Queries per head and what a token leaves in the cache."""

    q_nope: Float[Array, "B T H P"]
    q_rope: Float[Array, "B T H R"]
    latent: Float[Array, "B T C"]
    k_rope: Float[Array, "B T R"]


def masked_up_to(cfg: MLAConfig, platform: str | None = None) -> int:
    """Return the number of keys up to which sparse attention is masked and beyond which rows are gathered.

    Args:
        cfg: Sizes.
        platform: "cpu", "gpu" or "tpu"; None is where computations go.

    Returns:
        `masked_max_len`, or what suits the platform.
    """
    if cfg.masked_max_len is not None:
        return cfg.masked_max_len
    return MASKED_MAX_LEN_TPU if (platform or dispatch.platform()) == "tpu" else MASKED_MAX_LEN


def list_keys(chosen: Array, topk: int) -> Int[Array, "B T K"]:
    """Return the keys that tokens selected as a list.

    Args:
        chosen: bool [B, T, S], or the list itself.
        topk: Most keys of a token.

    Returns:
        int32 places, ascending, then -1.
    """
    if chosen.dtype != jnp.bool_:
        return chosen
    return jax.vmap(lambda mask: topk_select.mask_to_indices(mask, topk))(chosen)


class MLA(nnx.Module):
    """Attention of one layer.

    Source: DeepSeek-V3.2 inference/model.py MLA; scores and softmax in float32.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        dims, std = cfg.mla, cfg.init_std
        self.wq_a = layers.normal(rngs, (cfg.dim, dims.q_lora_rank), std)
        self.q_norm = layers.RMSNorm(dims.q_lora_rank, eps=LATENT_NORM_EPS)
        self.wq_b = layers.normal(rngs, (dims.q_lora_rank, dims.n_heads, dims.qk_dim), std)
        self.wkv_a = layers.normal(rngs, (cfg.dim, dims.kv_lora_rank + dims.rope_dim), std)
        self.kv_norm = layers.RMSNorm(dims.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.wkv_b = layers.normal(
            rngs, (dims.kv_lora_rank, dims.n_heads, dims.nope_dim + dims.v_dim), std
        )
        self.wo = layers.normal(rngs, (dims.n_heads, dims.v_dim, cfg.dim), std)
        self.indexer = Indexer(cfg, rngs=rngs)
        self.cfg = cfg

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments: Segments,
        *,
        mode: AttentionMode,
        indexer_loss: bool = False,
        probe: Probe | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T"] | None, Any]:
        """Attend, each token to its own document's earlier tokens.

        Args:
            x_BTD: Layer input after its norm.
            segments: The documents.
            mode: "dense" reads every earlier token, "sparse" the `topk` that the indexer ranks highest, "window" the
                last `topk`.
            indexer_loss: Also return the indexer's KL, over the keys that were attended to.
            probe: Measures the opened attention; its result is the third value.

        Returns:
            (output, KL per row float32 or None, the probe's result or None).
        """
        cfg = self.cfg
        topk, scale, kernels = cfg.indexer.topk, cfg.softmax_scale, cfg.implementation
        parts, index = self.project(x_BTD, segments.position)
        start, end = segments.start, segments.end
        kl_BT = measured = chosen = None
        if mode == "sparse" and x_BTD.shape[1] > masked_up_to(cfg.mla):
            q, kv = self.absorb(parts)
            chosen = sharded_ops.select_indices(
                index, topk, start, end, cfg.selection_implementation
            )
            out, lse = sharded_ops.attend_selected(
                q, kv, chosen, scale, cfg.mla.kv_lora_rank, kernels, cfg.deterministic
            )
            out = self.unabsorb(out)
            if indexer_loss:
                kl_BT = sharded_ops.selected_kl(
                    index, q, kv, lse, chosen, scale, kernels, cfg.deterministic
                )
        else:
            q, k, v = self.expand(parts)
            if mode == "window":
                start = jnp.maximum(start, end - topk)
            if mode == "sparse":
                chosen = sharded_ops.select_mask(
                    index, topk, start, end, cfg.selection_implementation
                )
            out, lse = sharded_ops.attend_range(q, k, v, start, end, chosen, scale, kernels)
            if indexer_loss:
                kl_BT = sharded_ops.range_kl(index, q, k, lse, start, end, chosen, scale, kernels)
        if probe is not None:
            q_heads, k_heads, _ = self.expand(parts)
            measured = probe(
                AttentionTensors(q_heads, k_heads, lse, index, scale, start, end, chosen)
            )
        return layers.project("bthu,hud->btd", out, self.wo), kl_BT, measured

    def extend(
        self,
        x_BTD: Float[Array, "B T D"],
        layer: cache.LayerCache,
        view: cache.View,
        *,
        mode: DecodeMode,
    ) -> tuple[Float[Array, "B T D"], cache.LayerCache]:
        """Attend to the cached tokens of each sequence and to the new ones, which are added to the cache.

        Equal to `__call__` on the whole sequence, to rounding. A few tokens a sequence read only the selected rows, in
        absorbed form; a longer piece of a prompt runs as masked attention in MHA form while its page table spans at
        most `masked_up_to` rows.

        Args:
            x_BTD: Layer input after its norm.
            layer: The layer's cache.
            view: Where the tokens stand.
            mode: "sparse" or "dense".

        Returns:
            (output, the cache with the new tokens).
        """
        parts, index = self.project(x_BTD, jnp.maximum(view.position, 0))
        rows = view.rows(view.position)
        layer = cache.write(layer, rows, parts.latent, parts.k_rope, index.k)
        n_keys = view.table.shape[1] * view.page_size
        if x_BTD.shape[1] > MAX_DECODE_TOKENS and n_keys <= masked_up_to(self.cfg.mla):
            out, chosen = self._attend_masked(parts, index, layer, view, mode)
        else:
            out, chosen = self._attend_rows(parts, index, layer, view, mode)
        if layer.selection is not None:
            assert chosen is not None, "a dense mode selects nothing, and an engine refuses it"
            layer = cache.write_selection(layer, rows, list_keys(chosen, self.cfg.indexer.topk))
        return layers.project("bthu,hud->btd", out, self.wo), layer

    def project(
        self, x_BTD: Float[Array, "B T D"], position_BT: Int[Array, "B T"]
    ) -> tuple[Latents, IndexerTensors]:
        """Compute all that attention takes of a token, before it sees any other.

        Args:
            x_BTD: Layer input after its norm.
            position_BT: Place of each token in its document, at least 0.

        Returns:
            (queries and latents, index queries, keys and weights); dead code under jit where nothing reads it.
        """
        cos, sin = rope.rotation(self.cfg.rope, self.cfg.mla.rope_dim, position_BT)
        qr_BTQ = self.q_norm(layers.project("btd,dq->btq", x_BTD, self.wq_a)).astype(x_BTD.dtype)
        return self._latents(x_BTD, qr_BTQ, cos, sin), self.indexer(x_BTD, qr_BTQ, cos, sin)

    def _attend_rows(
        self,
        parts: Latents,
        index: IndexerTensors,
        layer: cache.LayerCache,
        view: cache.View,
        mode: DecodeMode,
    ) -> tuple[Array, Array]:
        """Read the selected rows only, in absorbed MQA form; also return their positions."""
        q, _ = self.absorb(parts)
        if mode == "sparse":
            chosen_BTK = self.choose(index, layer, view)
        else:
            place = jnp.arange(view.table.shape[1] * view.page_size, dtype=jnp.int32)
            chosen_BTK = jnp.where(place < view.end[..., None], place, -1)
        batch, n_tokens, n_slots = chosen_BTK.shape
        rows = view.rows(chosen_BTK.reshape(batch, -1)).reshape(batch, n_tokens, n_slots)
        out = sharded_ops.attend_cached(
            q, layer, rows, self.cfg.softmax_scale, self.cfg.implementation
        )
        return self.unabsorb(out.astype(q.dtype)), chosen_BTK

    def choose(self, index: IndexerTensors, layer: cache.LayerCache, view: cache.View) -> Array:
        """Return the positions [B, T, K] that each token attends to.

        Args:
            index: The tokens' index queries and weights.
            layer: The cache, with the tokens in it.
            view: Where the tokens stand.

        Returns:
            int32, ascending, then -1.
        """
        topk, kernels = self.cfg.indexer.topk, self.cfg.implementation
        return sharded_ops.select_cached(index, layer, view, topk, kernels)

    def _attend_masked(
        self,
        parts: Latents,
        index: IndexerTensors,
        layer: cache.LayerCache,
        view: cache.View,
        mode: DecodeMode,
    ) -> tuple[Array, Array | None]:
        """Expand every key of the sequence and mask, in MHA form; also return the mask, if there is one."""
        latent, k_rope = cache.read_latents(layer, view, parts.q_nope.dtype)
        q, k, v = self.expand(parts._replace(latent=latent, k_rope=k_rope))
        start, selected = jnp.zeros_like(view.end), None
        if mode == "sparse":
            keys = cache.read_index_keys(layer, view, index.q.dtype)
            selected = sharded_ops.select_mask(
                index._replace(k=keys),
                self.cfg.indexer.topk,
                start,
                view.end,
                self.cfg.selection_implementation,
                square=False,
            )
        scale, kernels = self.cfg.softmax_scale, self.cfg.implementation
        out, _ = sharded_ops.attend_range(
            q, k, v, start, view.end, selected, scale, kernels, square=False
        )
        return out, selected

    def _latents(self, x: Array, qr: Array, cos: Array, sin: Array) -> Latents:
        """Project to per-head queries and to the latent and rope key that all heads share."""
        dims = self.cfg.mla
        q = layers.project("btq,qhd->bthd", qr, self.wq_b)
        # Stated, or XLA lays the product out as its last user wants it and moves it to the others through full copies.
        q = sharding.constrain(q, "batch", "sequence", "heads", None)
        q_nope, q_rope = jnp.split(q, [dims.nope_dim], axis=-1)
        q_rope = rope.rotate_interleaved(q_rope, cos[:, :, None], sin[:, :, None])
        latent, k_rope = jnp.split(
            layers.project("btd,dc->btc", x, self.wkv_a), [dims.kv_lora_rank], axis=-1
        )
        latent = self.kv_norm(latent).astype(x.dtype)
        if dims.fp8_latent:
            latent = fp8.simulate(latent)
        return Latents(q_nope, q_rope, latent, rope.rotate_interleaved(k_rope, cos, sin))

    def expand(self, parts: Latents) -> tuple[Array, Array, Array]:
        """Return MHA form: queries [B,T,H,P+R], keys [B,S,H,P+R] and values [B,S,H,U].

        Args:
            parts: The layer's queries and latents.

        Returns:
            (q, k, v); `k` repeats the rope key for every head.
        """
        dims = self.cfg.mla
        kv = layers.project("btc,chd->bthd", parts.latent, self.wkv_b)
        kv = sharding.constrain(kv, "batch", "sequence", "heads", None)
        k_nope, v = jnp.split(kv, [dims.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(parts.k_rope[:, :, None], (*k_nope.shape[:-1], dims.rope_dim))
        q = jnp.concatenate([parts.q_nope, parts.q_rope], axis=-1)
        return q, jnp.concatenate([k_nope, k_rope], axis=-1), v

    def absorb(self, parts: Latents) -> tuple[Array, Array]:
        """Return absorbed MQA form: queries [B,T,H,C+R] and the one shared key-value head [B,S,C+R].

        Args:
            parts: The layer's queries and latents.

        Returns:
            (q, kv); the values are the first C columns of `kv`, see `unabsorb`.
        """
        w_uk = self.wkv_b[..., : self.cfg.mla.nope_dim].astype(parts.q_nope.dtype)
        q_latent = jnp.einsum("bthp,chp->bthc", parts.q_nope, w_uk)
        q = jnp.concatenate([q_latent, parts.q_rope], axis=-1)
        return q, jnp.concatenate([parts.latent, parts.k_rope], axis=-1)

    def unabsorb(self, out_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T H U"]:
        """Expand attended latents to each head's values.

        Args:
            out_BTHC: Weighted sums of latents.

        Returns:
            Weighted sums of values.
        """
        w_uv = self.wkv_b[..., self.cfg.mla.nope_dim :].astype(out_BTHC.dtype)
        return jnp.einsum("bthc,chu->bthu", out_BTHC, w_uv)
