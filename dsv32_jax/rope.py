"""Rotary positions with YaRN, in the two layouts the model uses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsv32_jax.config import YarnConfig


def inverse_frequencies(cfg: YarnConfig, rope_dim: int) -> np.ndarray:
    """Compute the R/2 angular frequencies with YaRN.

    `theta_i = theta^(-2i/R)`; a frequency that turns more than beta_fast times over original_len is kept, one that
    turns less than beta_slow times is divided by `factor`, with a linear ramp over the index in between.

    Args:
        cfg: Frequencies' settings.
        rope_dim: R, even.

    Returns:
        float32 [R/2], radians per position.

    Source: DeepSeek-V3.2 inference/model.py `precompute_freqs_cis`; YaRN, arXiv 2309.00071, section 3.2.
    """
    # NumPy's float32 power is an ulp off where torch's is not, and an angle is position times frequency.
    periods = np.float64(cfg.theta) ** (np.arange(0, rope_dim, 2) / rope_dim)
    freq = np.float32(1.0) / periods.astype(np.float32)
    if cfg.factor <= 1:
        return freq

    def turning_index(rotations: float) -> float:
        wavelengths = math.log(cfg.original_len / (rotations * 2 * math.pi))
        return rope_dim * wavelengths / (2 * math.log(cfg.theta))

    low = max(math.floor(turning_index(cfg.beta_fast)), 0)
    high = float(min(math.ceil(turning_index(cfg.beta_slow)), rope_dim - 1))
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    ramp = ramp.astype(np.float32)
    return freq / np.float32(cfg.factor) * ramp + freq * (1 - ramp)


def rotation(
    cfg: YarnConfig, rope_dim: int, positions: Int[Array, "*B T"]
) -> tuple[Float[Array, "*B T R2"], Float[Array, "*B T R2"]]:
    """Return cos and sin of every position's angles.

    Args:
        cfg: Frequencies' settings.
        rope_dim: R.
        positions: int32 positions within each document.

    Returns:
        (cos, sin), float32 [..., R/2], times the YaRN amplitude (1 for the official settings).
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(cfg, rope_dim)
    return jnp.cos(angles) * cfg.amplitude, jnp.sin(angles) * cfg.amplitude


def rotate_interleaved(
    x: Float[Array, "... R"], cos: Float[Array, "... R2"], sin: Float[Array, "... R2"]
) -> Float[Array, "... R"]:
    """Rotate the pairs (2i, 2i+1) in float32; the main attention's layout.

    Args:
        x: Values to rotate, last axis R.
        cos: float32, broadcastable to the pairs of `x`.
        sin: The same.

    Returns:
        Rotated values in the dtype of `x`.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_half_split(
    x: Float[Array, "... R"], cos: Float[Array, "... R2"], sin: Float[Array, "... R2"]
) -> Float[Array, "... R"]:
    """Rotate the pairs (i, i + R/2) in float32; the indexer's layout.

    Args:
        x: Values to rotate, last axis R.
        cos: float32, broadcastable to the pairs of `x`.
        sin: The same.

    Returns:
        Rotated values in the dtype of `x`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


def hadamard(x: Float[Array, "*B X"]) -> Float[Array, "*B X"]:
    """Multiply the last axis by the orthonormal Walsh-Hadamard matrix in natural order.

    `H[i, j] = (-1)^popcount(i & j) X^-0.5`. The signs are exact in every dtype, so this is one matrix product with sums
    in float32; butterflies take fewer operations, but each of the log2(X) steps is a pass through memory.

    Args:
        x: Float, last axis X a power of two.

    Returns:
        Transformed values in the dtype of `x`.

    Raises:
        ValueError: If X is no power of two.
    """
    dim = x.shape[-1]
    if dim & (dim - 1) or dim == 0:
        raise ValueError(f"hadamard: the last axis must be a power of two, got {dim}")
    place = np.arange(dim)
    odd = np.bitwise_count(place[:, None] & place) % 2
    signs = jnp.asarray(1 - 2 * odd.astype(np.int8), x.dtype)
    y = jnp.matmul(x, signs, precision="highest", preferred_element_type=jnp.float32)
    return (y * jax.lax.rsqrt(jnp.float32(dim))).astype(x.dtype)
