"""The model as generation runs it: layers apart, so that a step reads each weight where it lies."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv32_jax import layers, parameters
from dsv32_jax.block import Block
from dsv32_jax.cache import LayerCache, View
from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import DecodeMode
from dsv32_jax.model import FLOAT32_PRODUCTS, DeepSeekV32
from dsv32_jax.mtp import MTP

Cache = tuple[LayerCache, ...]


class Decoder(NamedTuple):
    """A model's parts, a pytree.

    Attributes:
        embed: [V, D].
        blocks: The main layers in order.
        norm: The final norm.
        head: [D, V].
        mtp: The MTP module, or None.
    """

    embed: Array
    blocks: tuple[Block, ...]
    norm: layers.RMSNorm
    head: Array
    mtp: MTP | None


def from_model(model: DeepSeekV32) -> Decoder:
    """Take a model's stacked layers apart and keep each weight in the dtype that its products have.

    The results do not change by it: the model casts the same weights at each use.

    Args:
        model: The model.

    Returns:
        Its parts.
    """
    cfg = model.cfg
    arrays = parameters.flatten(model)
    weights = {
        name: value.astype(parameters.product_dtype(name, cfg))
        for name, value in arrays.weights.items()
    }
    model = parameters.assemble(cfg, arrays._replace(weights=weights))
    blocks = []
    for stack, n_layers in (
        (model.dense_layers, cfg.n_dense_layers),
        (model.moe_layers, cfg.n_moe_layers),
    ):
        blocks += [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(n_layers)]
    return Decoder(model.embed[...], tuple(blocks), model.norm, model.head[...], model.mtp)


def extend(
    decoder: Decoder,
    cfg: ModelConfig,
    cache: Cache,
    tokens_BT: Int[Array, "B T"],
    view: View,
    mode: DecodeMode,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run new tokens of cached sequences through the main layers.

    Args:
        decoder: The model.
        cfg: Its config.
        cache: A layer's rows for each main layer; further ones pass through.
        tokens_BT: int32 ids; padding may be any.
        view: Where they stand.
        mode: "sparse" or "dense".

    Returns:
        (states after the final norm, the cache with the new tokens).
    """
    with jax.default_matmul_precision(FLOAT32_PRODUCTS):
        stream = embed(decoder, tokens_BT, cfg).astype(jnp.float32)
        extended = []
        for block, layer in zip(decoder.blocks, cache, strict=False):
            stream, layer = block.extend(stream, layer, view, mode=mode)
            extended.append(layer)
        hidden = decoder.norm(stream).astype(cfg.dtype)
    return hidden, (*extended, *cache[len(extended) :])


def extend_mtp(
    decoder: Decoder,
    cfg: ModelConfig,
    cache: Cache,
    hidden_BTD: Float[Array, "B T D"],
    next_BT: Int[Array, "B T"],
    view: View,
    mode: DecodeMode,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run new tokens through the MTP module.

    Args:
        decoder: A model with MTP.
        cfg: Its config.
        cache: The cache, whose last layer is the module's.
        hidden_BTD: The main model's states of the tokens.
        next_BT: Each token's successor.
        view: Where the tokens stand; one without a successor is padding.
        mode: "sparse" or "dense".

    Returns:
        (normed states, the cache with the new tokens).
    """
    assert decoder.mtp is not None, "only a model with MTP is asked for drafts"
    with jax.default_matmul_precision(FLOAT32_PRODUCTS):
        embedded = embed(decoder, next_BT, cfg)
        hidden, last = decoder.mtp.extend(hidden_BTD, embedded, cache[-1], view, mode=mode)
    return hidden, (*cache[:-1], last)


def embed(decoder: Decoder, tokens: Int[Array, "B T"], cfg: ModelConfig) -> Float[Array, "B T D"]:
    """Look tokens up."""
    return decoder.embed[tokens].astype(cfg.dtype)


def logits(decoder: Decoder, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Multiply by the head in float32."""
    with jax.default_matmul_precision(FLOAT32_PRODUCTS):
        return jnp.einsum(
            "...d,dv->...v", hidden.astype(jnp.float32), decoder.head.astype(jnp.float32)
        )
