"""The paged cache: what each token leaves in each layer, and where it lies.

A sequence owns pages of `page_size` rows, in any order; its page table lists them. One table serves all layers, each
of which has arrays of its own. A page may belong to several sequences that begin alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, UInt

from dsv32_jax import sharding
from dsv32_jax.config import ModelConfig, require
from pallas_kernels import dispatch
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_indexer import reference as pages
from pallas_kernels.paged_mla import layout
from pallas_kernels.paged_mla.layout import Parts, Records

CacheDtype = Literal["model", "fp8"]
CacheLayout = Literal["auto", "parts", "records"]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size and format of the cache.

    Attributes:
        n_pages: Pages shared by all sequences.
        page_size: Tokens of a page.
        dtype: "model" keeps rows in the model's dtype; "fp8" keeps the latent and the index key in e4m3 with
            power-of-two scales and the rope key in bfloat16: with the official widths records of 656 and 132 bytes.
        layout: How latents and rope keys lie: "parts" as the kernels for GPUs read them, "records" as those for TPUs
            do; "auto" is records on a TPU whose mesh does not cut the cache, else parts.
        keep_experts: Also keep the experts each token was sent to.
        keep_selection: Also keep the keys each token selected, in every layer: index_topk x 2 bytes a token, x 4 where
            there are more rows than 16 bits count.
    """

    n_pages: int = 512
    page_size: int = 64
    dtype: CacheDtype = "model"
    layout: CacheLayout = "auto"
    keep_experts: bool = False
    keep_selection: bool = False

    def __post_init__(self) -> None:
        """Check the sizes."""
        require(self.n_pages >= 1, f"n_pages={self.n_pages} must be at least 1")
        require(self.page_size >= 1, f"page_size={self.page_size} must be at least 1")
        layouts = get_args(CacheLayout)
        require(
            self.layout in layouts, f"layout={self.layout!r} must be one of {', '.join(layouts)}"
        )

    def in_records(self) -> bool:
        """Whether latents and rope keys lie in records."""
        if self.layout == "auto":
            return dispatch.platform() == "tpu" and not is_cut()
        return self.layout == "records"


class LayerCache(NamedTuple):
    """One layer's rows, N = n_pages * page_size of them.

    Attributes:
        attended: Normed latents and rotated rope keys; in "fp8" the latents are quantised.
        index: [N, X] index keys; in "fp8" float8_e4m3fn.
        index_scale: float32 [N, X / 128], or None.
        experts: [N, A] chosen experts, in the smallest unsigned type, or None.
        selection: [N, K] positions of the selected keys, each plus 1, then 0; in the smallest unsigned type, or None.
    """

    attended: Parts | Records
    index: Float[Array, "N X"]  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    index_scale: Float[Array, "N G"] | None
    experts: Int[Array, "N A"] | None
    selection: UInt[Array, "N K"] | None = None


class View(NamedTuple):
    """Where a step's tokens stand.

    Attributes:
        position: int32 [B, T], place in the sequence; -1 for padding.
        table: int32 [B, P], the pages of each sequence in order; entries past its end may be anything in range.
        page_size: Tokens of a page.
    """

    position: Int[Array, "B T"]
    table: Int[Array, "B P"]
    page_size: int

    @property
    def end(self) -> Int[Array, "B T"]:
        """One past the last visible position of each token; 0 for padding."""
        return self.position + 1

    def rows(self, position: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Return the cache rows of positions; -1 stays -1."""
        page = jnp.maximum(position, 0) // self.page_size
        row = jnp.take_along_axis(self.table, page, axis=1) * self.page_size
        return jnp.where(position >= 0, row + position % self.page_size, -1)


def make_layer(cfg: ModelConfig, cache: CacheConfig, *, moe: bool) -> LayerCache:
    """Return an empty layer; its rows are zero.

    Args:
        cfg: The model.
        cache: Size and format.
        moe: Whether the layer has experts to keep.

    Returns:
        The layer.
    """
    n, quantised = cache.n_pages * cache.page_size, cache.dtype == "fp8"

    def zeros(width: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((n, width), dtype)

    dtype = "bfloat16" if quantised else cfg.dtype
    row = layout.Format(cfg.mla.kv_lora_rank, cfg.mla.rope_dim, dtype, quantised)
    empty = layout.empty_records if cache.in_records() else layout.empty_parts
    width = cfg.indexer.head_dim
    index = zeros(width, "float8_e4m3fn" if quantised else cfg.dtype)
    index_scale = zeros(max(width // fp8.FP8_BLOCK, 1), "float32") if quantised else None
    experts = None
    if moe and cache.keep_experts:
        experts = zeros(cfg.moe.n_active, "uint8" if cfg.moe.n_experts <= 256 else "uint16")
    selection = _empty_selection(cfg, n) if cache.keep_selection else None
    layer = LayerCache(empty(n, row), index, index_scale, experts, selection)
    return jax.tree.map(lambda x: sharding.constrain(x, "cache", None), layer)


def _empty_selection(cfg: ModelConfig, n: int) -> Array:
    return jnp.zeros((n, cfg.indexer.topk), "uint16" if n <= 0xFFFF else "uint32")


def is_cut() -> bool:
    """Whether a sequence's pages may lie on another device: then XLA partitions the definitions' gathers.

    A kernel would have to be given the whole cache on every device.
    """
    return sharding.axis_size(*sharding.BATCH_AXES) > 1


def make_cache(cfg: ModelConfig, cache: CacheConfig, *, mtp: bool) -> tuple[LayerCache, ...]:
    """Return an empty cache.

    Args:
        cfg: The model.
        cache: Size and format.
        mtp: Whether the MTP module's layer is cached too, as the last one.

    Returns:
        A layer's rows for each main layer in order, then MTP's.
    """
    main = [make_layer(cfg, cache, moe=i >= cfg.n_dense_layers) for i in range(cfg.n_layers)]
    return (*main, make_layer(cfg, cache, moe=True)) if mtp else tuple(main)


def with_selection(
    cfg: ModelConfig, layers: Sequence[LayerCache], keep: bool
) -> tuple[LayerCache, ...]:
    """Begin or end keeping selections in a cache.

    Args:
        cfg: The model.
        layers: The cache.
        keep: Whether to keep them.

    Returns:
        The cache, its other rows as they were.
    """
    if not keep:
        return tuple(layer._replace(selection=None) for layer in layers)
    empty = (_empty_selection(cfg, len(layer.index)) for layer in layers)
    return tuple(
        layer._replace(selection=sharding.constrain(selection, "cache", None))
        for layer, selection in zip(layers, empty, strict=True)
    )


def write(
    layer: LayerCache,
    rows_BT: Int[Array, "B T"],
    latent_BTC: Float[Array, "B T C"],
    rope_BTR: Float[Array, "B T R"],
    index_BTX: Float[Array, "B T X"],
) -> LayerCache:
    """Write tokens into their rows.

    Args:
        layer: The layer.
        rows_BT: Cache row of each token; -1 writes nothing.
        latent_BTC: Normed latents.
        rope_BTR: Rotated rope keys.
        index_BTX: Index keys.

    Returns:
        The layer with the rows replaced.
    """

    def flat(values: Array) -> Array:
        return values.reshape(-1, values.shape[-1])

    rows_N = rows_BT.reshape(-1)
    index, index_scale = flat(index_BTX), layer.index_scale
    if index_scale is not None:
        index, scale = fp8.quantize(index)
        index_scale = layout.put(index_scale, rows_N, scale)
    return layer._replace(
        attended=layout.write(layer.attended, rows_N, flat(latent_BTC), flat(rope_BTR)),
        index=layout.put(layer.index, rows_N, index),
        index_scale=index_scale,
    )


def write_experts(
    layer: LayerCache, rows_BT: Int[Array, "B T"], experts_BTA: Int[Array, "B T A"]
) -> LayerCache:
    """Write the tokens' experts into their rows, where the layer keeps them.

    Args:
        layer: The layer.
        rows_BT: Cache row of each token; -1 writes nothing.
        experts_BTA: Chosen experts.

    Returns:
        The layer.
    """
    if layer.experts is None:
        return layer
    experts_NA = experts_BTA.reshape(-1, experts_BTA.shape[-1])
    return layer._replace(experts=layout.put(layer.experts, rows_BT.reshape(-1), experts_NA))


def write_selection(
    layer: LayerCache, rows_BT: Int[Array, "B T"], keys_BTK: Int[Array, "B T K"]
) -> LayerCache:
    """Write the keys that tokens selected into their rows, where the layer keeps them.

    Args:
        layer: The layer.
        rows_BT: Cache row of each token; -1 writes nothing.
        keys_BTK: Positions in the token's sequence, then -1.

    Returns:
        The layer.
    """
    if layer.selection is None:
        return layer
    keys_NK = keys_BTK.reshape(-1, keys_BTK.shape[-1])
    return layer._replace(selection=layout.put(layer.selection, rows_BT.reshape(-1), keys_NK + 1))


def read_experts(
    layers: Sequence[LayerCache], owned: Sequence[int], n_tokens: int, page_size: int
) -> Integer[np.ndarray, "L T A"] | None:
    """Read the experts of a sequence's first tokens.

    Args:
        layers: The layers; those that keep no experts are left out.
        owned: The sequence's pages in order.
        n_tokens: Tokens that have rows.
        page_size: Tokens of a page.

    Returns:
        int32, a layer that keeps experts each; None where none does.
    """
    kept = [layer.experts for layer in layers if layer.experts is not None]
    return _read_rows(kept, owned, n_tokens, page_size) if kept else None


def read_selection(
    layers: Sequence[LayerCache], owned: Sequence[int], n_tokens: int, page_size: int
) -> Integer[np.ndarray, "L T K"] | None:
    """Read the keys that a sequence's first tokens selected.

    Args:
        layers: The layers, which all keep them or none.
        owned: The sequence's pages in order.
        n_tokens: Tokens that have rows.
        page_size: Tokens of a page.

    Returns:
        int32 positions in the sequence, ascending, then -1; None where none are kept.
    """
    kept = [layer.selection for layer in layers if layer.selection is not None]
    return _read_rows(kept, owned, n_tokens, page_size) - 1 if kept else None


def _read_rows(
    arrays: Sequence[Array], owned: Sequence[int], n_tokens: int, page_size: int
) -> Integer[np.ndarray, "L T W"]:
    """Return the rows of a sequence's first tokens of each array, int32."""
    # Padded to a power of two, so that few lengths compile.
    place = np.zeros(1 << max(n_tokens - 1, 0).bit_length(), np.int32)
    place[:n_tokens] = np.arange(n_tokens)
    rows = np.asarray([*owned, 0], np.int32)[place // page_size] * page_size + place % page_size
    read = [sharding.to_host(jnp.take(array, rows, axis=0)) for array in arrays]
    return np.stack(read)[:, :n_tokens].astype(np.int32)


def read_latents(
    layer: LayerCache, view: View, dtype: DTypeLike
) -> tuple[Float[Array, "B S C"], Float[Array, "B S R"]]:
    """Return every sequence's latents and rope keys in order of position, zeros past its last token.

    Args:
        layer: The layer.
        view: The sequences.
        dtype: Of the result.

    Returns:
        (latents, rope keys), S = P * page_size.
    """
    rows_BS = pages.page_rows(view.table, view.page_size)
    place = jnp.arange(rows_BS.shape[1], dtype=jnp.int32)
    inside_BS = place < jnp.max(view.end, axis=1, keepdims=True)
    latent, rope = layout.read(layer.attended, jnp.where(inside_BS, rows_BS, -1))
    return latent.astype(dtype), rope.astype(dtype)


def read_index_keys(layer: LayerCache, view: View, dtype: DTypeLike) -> Float[Array, "B S X"]:
    """Return every sequence's index keys in order of position, zeros past its last token.

    Args:
        layer: The layer.
        view: The sequences.
        dtype: Of the result.

    Returns:
        Index keys, S = P * page_size.
    """
    last_B = jnp.max(view.end, axis=1)
    keys = pages.read_pages(layer.index, view.table, view.page_size, last_B)
    if layer.index_scale is not None:
        scale = pages.read_pages(layer.index_scale, view.table, view.page_size, last_B)
        keys = fp8.dequantize(keys, scale)
    return keys.astype(dtype)
