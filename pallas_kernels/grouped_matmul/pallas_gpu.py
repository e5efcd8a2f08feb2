"""Grouped product and its gradients on Hopper: what the three kernels of `pallas_gpu_pipeline` load and store.

    out[m] = x[m] @ w[e]        left: rows of x       right: w[e], contraction down its rows
    dx[m]  = dy[m] @ w[e]^T     left: rows of dy      right: w[e], contraction along its rows
    dw[e]  = x_e^T @ dy_e       left: columns of x    right: columns of dy, contraction over the group's rows

No tile has rows of two groups: the tables of `tiles` start each group's tiles at its first row.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import pallas_gpu_pipeline as pipeline
from pallas_kernels.grouped_matmul import tiles
from pallas_kernels.grouped_matmul.pallas_gpu_pipeline import Config, Product, Ref, Tile, span

TILE, HALF, COLUMNS, STEP = pipeline.TILE, pipeline.HALF, pipeline.COLUMNS, pipeline.STEP


def check(x_MK: Array, w_EKN: Array) -> None:
    """Raise NotImplementedError, saying why, if the kernels cannot take the operands."""
    if not x_MK.dtype == w_EKN.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {x_MK.dtype} and {w_EKN.dtype}")
    if 0 in (*x_MK.shape, *w_EKN.shape):
        raise NotImplementedError("an axis of length 0")
    if w_EKN.shape[1] % STEP or w_EKN.shape[2] % STEP:
        raise NotImplementedError(
            f"takes K and N that are multiples of {STEP}, got {w_EKN.shape[1:]}"
        )
    if x_MK.shape[0] < HALF or min(w_EKN.shape[1:]) < COLUMNS:
        # On an H200 boxes of 256 columns read zeros from an array of 64; fewer rows than a box has were not tried.
        shape = (x_MK.shape[0], *w_EKN.shape[1:])
        raise NotImplementedError(
            f"takes M of at least {HALF}, K and N of at least {COLUMNS}, got {shape}"
        )


@functools.partial(jax.jit, static_argnames=("align", "transposed", "config"))
def multiply_rows(
    x_MK: Float[Array, "M K"],
    w: Float[Array, "E _ _"],
    sizes_E: Int[Array, " E"],
    *,
    align: int,
    transposed: bool = False,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """Multiply each row by its group's weight, `x[m] @ w[e]`, or by its transpose.

    Args:
        x_MK: bfloat16 rows, sorted by group; K a multiple of 64.
        w: bfloat16 [E, K, N], or [E, N, K] if transposed; N a multiple of 64.
        sizes_E: Rows of each group, multiples of `align`.
        align: A multiple of 8 that divides M.
        transposed: Whether to multiply by the transposes.
        config: None takes the defaults.

    Returns:
        bfloat16 [M, N], summed in float32 in a fixed order; 0 in rows past the last group.
    """
    config = config or Config()
    n_rows, depth = x_MK.shape
    n_groups, n_columns = w.shape[0], w.shape[1 if transposed else 2]
    table, n_used = tiles.row_tiles(sizes_E, n_rows, TILE)
    n_across, unit = pl.cdiv(n_columns, COLUMNS), math.gcd(align, HALF)

    def make(x: Ref, w: Ref, table: Ref, n_used: Ref, out: Ref) -> Product:
        n_down = n_used[0]

        def read(i: Array) -> Tile:
            rank, across = pipeline.in_bands(i, n_down, n_across, config.band)
            group, row, n_rows = (table[rank, j] for j in range(3))
            in_group = group < n_groups  # else a tile of zeros
            return Tile(group, row, across * COLUMNS, n_rows, 0, jnp.where(in_group, depth, 0))

        def left(tile: Tile, half: int, index: Array, n: int) -> Ref:
            return x.at[span(tile.row + half * HALF, HALF, unit), span(index, n)]

        def right(tile: Tile, index: Array, n: int) -> Ref:
            columns, steps = span(tile.column, COLUMNS), span(index, n)
            place = (columns, steps) if transposed else (steps, columns)
            return w.at[tile.group, *place]

        def target(tile: Tile, row: Array, n: int, column: int) -> Ref:
            return out.at[span(tile.row + row, n, unit), span(tile.column + column, STEP)]

        n_tiles = n_down * n_across
        by_step = False, not transposed
        return Product(n_tiles, read, left, right, target, *by_step, STEP, unit)

    shared = pipeline.shared_memory(x_MK.dtype, config, not transposed, STEP)
    out = jax.ShapeDtypeStruct((n_rows, n_columns), x_MK.dtype)
    name = "grouped_matmul_transposed" if transposed else "grouped_matmul"
    operands = x_MK, w, table, n_used
    return pipeline.launch(make, operands, out, shared=shared, config=config, name=name)


@functools.partial(jax.jit, static_argnames=("align", "config"))
def weight_gradient(
    x_MK: Float[Array, "M K"],
    d_out_MN: Float[Array, "M N"],
    sizes_E: Int[Array, " E"],
    *,
    align: int,
    config: Config | None = None,
) -> Float[Array, "E K N"]:
    """Sum the outer products of each group's rows, `x_e^T @ d_out_e`.

    Args:
        x_MK: bfloat16 rows, sorted by group; K a multiple of 64.
        d_out_MN: bfloat16; N a multiple of 64.
        sizes_E: Rows of each group, multiples of `align`.
        align: A multiple of 8 that divides M.
        config: None takes the defaults.

    Returns:
        bfloat16 [E, K, N], summed in float32 in a fixed order; 0 for an empty group.
    """
    config = config or Config()
    (n_rows, depth), n_columns = x_MK.shape, d_out_MN.shape[1]
    n_groups = sizes_E.shape[0]
    n_down, n_across = pl.cdiv(depth, TILE), pl.cdiv(n_columns, COLUMNS)
    unit = math.gcd(align, HALF)

    def make(x: Ref, d_out: Ref, table: Ref, out: Ref) -> Product:
        def read(i: Array) -> Tile:
            size = jnp.int32(n_down * n_across)
            group, rest = lax.div(i, size), lax.rem(i, size)
            down, across = pipeline.in_bands(rest, n_down, n_across, config.band)
            first, n = table[group, 0], table[group, 1]
            return Tile(group, down * TILE, across * COLUMNS, TILE, first, n)

        def rows(index: Array, n: int, inside: Array | None) -> Any:
            index = index if inside is None else jnp.where(inside, index, n_rows)
            return span(index, n, unit)

        def left(tile: Tile, half: int, index: Array, n: int, inside: Array | None = None) -> Ref:
            return x.at[rows(index, n, inside), span(tile.row + half * HALF, HALF)]

        def right(tile: Tile, index: Array, n: int, inside: Array | None = None) -> Ref:
            return d_out.at[rows(index, n, inside), span(tile.column, COLUMNS)]

        def target(tile: Tile, row: Array, n: int, column: int) -> Ref:
            rows, columns = span(tile.row + row, n), span(tile.column + column, STEP)
            return out.at[tile.group, rows, columns]

        n_tiles = n_groups * n_down * n_across
        return Product(n_tiles, read, left, right, target, True, True, unit, HALF)

    shared = pipeline.shared_memory(x_MK.dtype, config, True, unit)
    out = jax.ShapeDtypeStruct((n_groups, depth, n_columns), x_MK.dtype)
    operands, name = (x_MK, d_out_MN, tiles.group_rows(sizes_E)), "grouped_matmul_dw"
    return pipeline.launch(make, operands, out, shared=shared, config=config, name=name)
