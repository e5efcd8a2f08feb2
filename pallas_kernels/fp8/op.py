"""FP8 (e4m3) activation quantisation with power-of-two scales, and its simulation in training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

E4M3_MAX = 448.0
E4M3_MANTISSA_BITS = 3
E4M3_MIN_NORMAL = 2.0**-6
E4M3_STEP = 2.0**-9  # between values below the smallest normal
MIN_AMAX = 1e-4  # floor of the block maximum, DeepSeek-V3.2 inference/kernel.py act_quant
FP8_BLOCK = 128  # channels that share a scale, DeepSeek-V3 report, section 3.3
EXPONENT_BITS = 23
MANTISSA_MASK = (1 << EXPONENT_BITS) - 1


def power_of_two_ceil(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Round a positive normal float32 up to a power of two, by its bits; a power of two stays.

    Args:
        x: float32, positive and normal.

    Returns:
        float32, the smallest power of two that is >= x.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    up = (bits & MANTISSA_MASK) != 0
    exponent = (bits >> EXPONENT_BITS) + up.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(exponent << EXPONENT_BITS, jnp.float32)


def round_to_e4m3(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Round float32 values in [-448, 448] to the nearest that e4m3 holds, ties to even, without leaving float32.

    XLA for GPUs drops a conversion to fewer bits and back from one program, and the rounding with it
    (`xla_allow_excess_precision`); arithmetic and `reduce_precision` stay.

    Args:
        x: float32 values within +-448; NaN stays.

    Returns:
        float32 values that convert to e4m3 exactly.
    """
    near_zero = jnp.abs(x) < E4M3_MIN_NORMAL
    subnormal = jnp.round(x * (1.0 / E4M3_STEP)) * E4M3_STEP
    return jnp.where(near_zero, subnormal, jax.lax.reduce_precision(x, 8, E4M3_MANTISSA_BITS))


def quantize(
    x: Float[Array, "*N X"], *, block: int = FP8_BLOCK
) -> tuple[Float[Array, "*N X"], Float[Array, "*N G"]]:
    """Quantise to e4m3 with one power-of-two scale per block of channels.

    `a = max(max |x|, 1e-4)` over the block, `scale = 2^ceil(log2(a / 448))`, `x8 = e4m3(clamp(x / scale, +-448))`,
    rounded to nearest even.

    Args:
        x: Float, the last axis a multiple of `block`, or narrower than it (then one block).
        block: Channels per scale.

    Returns:
        (float8_e4m3fn of the shape of `x`, float32 scales of shape [..., X / block]).

    Raises:
        ValueError: If `block` does not divide the last axis.

    Source: DeepSeek-V3.2 inference/kernel.py `act_quant` with `scale_fmt="ue8m0"`.
    """
    dim = x.shape[-1]
    block = min(block, dim)
    if dim % block:
        raise ValueError(f"fp8.quantize: block={block} must divide the last axis {dim}")
    x_GX = x.astype(jnp.float32).reshape(*x.shape[:-1], dim // block, block)
    amax_G = jnp.maximum(jnp.max(jnp.abs(x_GX), axis=-1), MIN_AMAX)
    scale_G = power_of_two_ceil(amax_G * (1.0 / E4M3_MAX))
    clipped_GX = jnp.clip(x_GX / scale_G[..., None], -E4M3_MAX, E4M3_MAX)
    x8_GX = round_to_e4m3(clipped_GX).astype(jnp.float8_e4m3fn)
    return x8_GX.reshape(x.shape), scale_G


def dequantize(x8: Float[Array, "*N X"], scale: Float[Array, "*N G"]) -> Float[Array, "*N X"]:
    """Multiply e4m3 values by their scales, in float32.

    Args:
        x8: float8_e4m3fn values.
        scale: float32, one per block of X / G channels.

    Returns:
        float32 values; exact, as the scales are powers of two.
    """
    n_blocks = scale.shape[-1]
    blocks = x8.astype(jnp.float32).reshape(*x8.shape[:-1], n_blocks, x8.shape[-1] // n_blocks)
    return (blocks * scale[..., None]).reshape(x8.shape)


@jax.custom_jvp
def simulate(x: Float[Array, "*N X"]) -> Float[Array, "*N X"]:
    """Round to what FP8 storage keeps: quantise, dequantise, cast back; the gradient passes straight through.

    Args:
        x: Float, the last axis a multiple of 128 or narrower.

    Returns:
        The rounded values in the dtype of `x`.
    """
    return dequantize(*quantize(x)).astype(x.dtype)


@simulate.defjvp
def _simulate_jvp(primals: tuple, tangents: tuple) -> tuple:
    return simulate(primals[0]), tangents[0]
