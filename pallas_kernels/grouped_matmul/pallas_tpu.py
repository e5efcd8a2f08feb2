"""Grouped products on TPU: jax's megablox kernels, padded to whole tiles."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES

MAX_TILE_ROWS = 512
MAX_TILE_BYTES = 2048  # of a tile's columns: megablox asks for no VMEM, and v5p gives 16 MiB then


def check(x_MK: Array, w_EKN: Array) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not take."""
    mosaic_tpu.check_floats(x_MK, w_EKN)


def _tiles(n_rows: int, widths: tuple[int, int], dtype: Any) -> tuple[int, int, int]:
    """Return tiles of rows, of what is summed over or kept, and of columns."""
    most = MAX_TILE_BYTES // jnp.dtype(dtype).itemsize
    return min(MAX_TILE_ROWS, n_rows), min(most, widths[0]), min(most, widths[1])


def _whole_tiles(x_MK: Array) -> Array:
    """Append rows of zeros up to whole tiles."""
    n_rows = x_MK.shape[0]
    multiple = MAX_TILE_ROWS if n_rows > MAX_TILE_ROWS else LANES
    return mosaic_tpu.pad_rows(x_MK, mosaic_tpu.round_up(n_rows, multiple))


def multiply_rows(
    x_MK: Float[Array, "M K"],
    w_EKN: Float[Array, "E _ _"],
    sizes_E: Int[Array, " E"],
    *,
    transposed: bool = False,
) -> Float[Array, "M N"]:
    """Multiply each group of consecutive rows by its own weight; rows past the last group give 0.

    Args:
        x_MK: Rows, sorted by group, bfloat16 or float32.
        w_EKN: One weight a group, of the same dtype; [E, N, K] if transposed.
        sizes_E: int, rows of each group.
        transposed: Multiply by the transposes of the weights.

    Returns:
        Products in the dtype of `x_MK`, accumulated in float32.

    Raises:
        NotImplementedError: As `check`.
    """
    check(x_MK, w_EKN)
    n_rows = x_MK.shape[0]
    padded = _whole_tiles(x_MK)
    n_columns = w_EKN.shape[1 if transposed else 2]
    tiling = _tiles(padded.shape[0], (x_MK.shape[1], n_columns), x_MK.dtype)
    sizes = sizes_E.astype(jnp.int32)
    out = gmm(padded, w_EKN, sizes, x_MK.dtype, tiling, transpose_rhs=transposed)
    inside = jnp.arange(n_rows) < jnp.sum(sizes)
    return jnp.where(inside[:, None], out[:n_rows], 0)


def weight_gradient(
    x_MK: Float[Array, "M K"], d_out_MN: Float[Array, "M N"], sizes_E: Int[Array, " E"]
) -> Float[Array, "E K N"]:
    """Return `dw[e] = sum of x[m]^T d_out[m]` over the rows of group e, 0 for a group without rows.

    Args:
        x_MK: Rows, sorted by group, bfloat16 or float32.
        d_out_MN: Cotangent of the products, of the same dtype.
        sizes_E: int, rows of each group.

    Returns:
        Gradients in the dtype of `x_MK`, accumulated in float32.

    Raises:
        NotImplementedError: As `check`.
    """
    check(x_MK, d_out_MN)
    x, d_out = _whole_tiles(x_MK), _whole_tiles(d_out_MN)
    tiling = _tiles(x.shape[0], (x.shape[1], d_out.shape[1]), x.dtype)
    return tgmm(x.T, d_out, sizes_E.astype(jnp.int32), x.dtype, tiling)
