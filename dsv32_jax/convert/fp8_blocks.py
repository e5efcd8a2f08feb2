"""FP8 weights in blocks of 128x128 with one scale each, by numpy.

Source: DeepSeek-V3 README_WEIGHTS.md: `W[i, j] = float32(W8[i, j]) * weight_scale_inv[i // 128, j // 128]`; a block at
the edge is cut, not padded. DeepSeek-V3.2's scales are powers of two (scale_fmt ue8m0) held as float32.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

BLOCK = 128  # DeepSeek-V3 config.json, weight_block_size
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
MIN_EXPONENT = -126  # of normal float32 numbers; the largest, 2^128 / 448 < 2^120, is normal anyway
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def blocks(n: int) -> int:
    """Return how many blocks cover n rows or columns."""
    return -(-n // BLOCK)


def has_nan(q: Shaped[np.ndarray, "..."]) -> bool:
    """Tell whether e4m3 numbers hold a NaN, the only value of theirs that is not finite."""
    return bool(((q.view(np.uint8) & 0x7F) == 0x7F).any())


def values_of(q: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return e4m3 numbers as float32."""
    return np.take(_VALUES, q.view(np.uint8))


def dequantise(
    q_OI: Shaped[np.ndarray, "O I"], scales: Float[np.ndarray, "o i"]
) -> Float[np.ndarray, "O I"]:
    """Multiply each block by its scale.

    Args:
        q_OI: float8_e4m3fn, beginning at the edge of a block.
        scales: float32 [ceil(O/128), ceil(I/128)].

    Returns:
        float32; exact where the scales are powers of two.
    """
    out = values_of(q_OI)
    for row in range(scales.shape[0]):
        per_column = np.repeat(scales[row], BLOCK)[: q_OI.shape[1]]
        out[row * BLOCK : (row + 1) * BLOCK] *= per_column
    return out


def quantise(
    x_OI: Float[np.ndarray, "O I"],
) -> tuple[Shaped[np.ndarray, "O I"], Float[np.ndarray, "o i"]]:
    """Round a matrix to e4m3 with a power-of-two scale for each block.

    `scale = 2^ceil(log2(max|block| / 448))`, the smallest with which no value overflows, and 1 for a block of zeros;
    `q = round_to_even(x / scale)`.

    Args:
        x_OI: float32, finite, beginning at the edge of a block.

    Returns:
        float8_e4m3fn [O, I] and float32 [ceil(O/128), ceil(I/128)].

    Source: DeepSeek-V3.2 inference/kernel.py, act_quant with scale_fmt ue8m0; its floor of 1e-4 on the maximum is for
    activations and left out.
    """
    n_out, n_in = x_OI.shape
    q = np.empty((n_out, n_in), E4M3)
    scales = np.empty((blocks(n_out), blocks(n_in)), np.float32)
    edges = np.arange(0, n_in, BLOCK)
    for row in range(scales.shape[0]):
        rows = x_OI[row * BLOCK : (row + 1) * BLOCK]
        largest = np.maximum.reduceat(np.abs(rows).max(axis=0), edges)
        scales[row] = _scale_of(largest)
        per_column = np.repeat(scales[row], BLOCK)[:n_in]
        q[row * BLOCK : (row + 1) * BLOCK] = (rows / per_column).astype(E4M3)
    return q, scales


def _scale_of(largest: Float[np.ndarray, " i"]) -> Float[np.ndarray, " i"]:
    # In float64 the quotient's mantissa is right, so that 448 * 2^k gives exactly 2^k.
    mantissa, exponent = np.frexp(largest.astype(np.float64) / E4M3_MAX)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = np.maximum(exponent, MIN_EXPONENT)
    return np.ldexp(np.float32(1), exponent)  # 1 for zero, whose exponent is 0
