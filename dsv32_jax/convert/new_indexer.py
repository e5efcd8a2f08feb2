"""Draw indexers for a model that has none, DeepSeek-V3: where continued pre-training begins."""

import zlib

import numpy as np
from jaxtyping import Float

from dsv32_jax.convert.slots import Slot


def is_indexer(name: str) -> bool:
    """Tell whether an official tensor belongs to an indexer."""
    return ".self_attn.indexer." in name


def draw(slot: Slot, *, seed: int, std: float) -> Float[np.ndarray, "..."]:
    """Draw one tensor as a new model's: weights from N(0, std^2), LayerNorms of weight 1 and bias 0.

    Args:
        slot: The tensor.
        seed: Of all draws; each tensor has its own stream, so that neither order nor number of processes matters.
        std: Standard deviation.

    Returns:
        float32, official shape.
    """
    if len(slot.own) == 1:
        return np.full(slot.official, float(slot.name.endswith(".weight")), np.float32)
    rng = np.random.default_rng([seed, zlib.crc32(slot.name.encode())])
    return (std * rng.standard_normal(slot.official, np.float32)).astype(np.float32, copy=False)
