"""Exact selection within VMEM: order-preserving int32 keys, the k-th largest bit by bit, lists by moving left.

Functions of a kernel whose scratch `keys` holds a block of rows, one column a key of the sequence. Only the columns of
the tiles [first, last) that the rows' ranges touch are read.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref

INVALID = np.int32(-(2**31))  # below the key of every finite score; as bits, only the sign
MAGNITUDE = np.int32(2**31 - 1)
EXPONENT = np.int32(0x7F800000)  # all set: infinite or NaN
NOTHING = np.int32(-1)


def sortable(scores: Float[Array, "T S"], inside: Bool[Array, "T S"]) -> Int[Array, "T S"]:
    """Map float32 to int32 of the same order; what is outside, infinite or NaN becomes INVALID."""
    bits = pltpu.bitcast(scores, jnp.int32)
    # -0.0 and 0.0 tie. All by the bits: float comparisons flush subnormals.
    bits = jnp.where(bits == INVALID, 0, bits)
    valid = inside & ((bits & EXPONENT) != EXPONENT)
    return jnp.where(valid, jnp.where(bits < 0, bits ^ MAGNITUDE, bits), INVALID)


def _lane_tiles(tile: Array) -> list[Array]:
    """Cut a tile into pieces of one register's lanes."""
    return [tile[:, c : c + LANES] for c in range(0, tile.shape[1], LANES)]


def _count(keys: Ref, tiles: tuple[Any, Any], block: int, bound: Array, strict: bool) -> Array:
    """Count each row's keys that are at least the bound, or above it: float32 [rows, 1], exact below 2**24."""
    wide = jnp.broadcast_to(bound, (keys.shape[0], LANES))

    def add_tile(t: Any, count: Array) -> Array:
        tile = keys[:, pl.ds(pl.multiple_of(t * block, LANES), block)]
        for part in _lane_tiles(tile):
            hit = part > wide if strict else part >= wide
            count += jnp.where(hit, 1.0, 0.0)
        return count

    zero = jnp.zeros((keys.shape[0], LANES), jnp.float32)
    return jnp.sum(lax.fori_loop(*tiles, add_tile, zero), axis=1, keepdims=True)


def kth_largest(keys: Ref, tiles: tuple[Any, Any], block: int, k: int) -> Int[Array, "T 1"]:
    """Return each row's k-th largest key, or INVALID if fewer than k are valid."""

    def settle_bit(i: Any, kth: Array) -> Array:
        # With the sign turned the order is unsigned: keep a bit if k keys are not below the larger value.
        candidate = kth | lax.shift_left(jnp.int32(1), 31 - i)
        enough = _count(keys, tiles, block, candidate ^ INVALID, strict=False) >= k
        return jnp.where(enough, candidate, kth)

    zero = jnp.zeros((keys.shape[0], 1), jnp.int32)
    return lax.fori_loop(0, 32, settle_bit, zero) ^ INVALID


def _earlier(marked: Bool[Array, "T S"]) -> Float[Array, "T S"]:
    """Count the marked places before each lane, as a product with a triangle of ones."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    here, before = (jnp.where(x, 1.0, 0.0).astype(jnp.bfloat16) for x in (marked, row < column))
    return mosaic_tpu.dot(here, before, mosaic_tpu.ROWS_BY_COLUMNS)


def choose(keys: Ref, tiles: tuple[Any, Any], block: int, k: int, emit: Any) -> None:
    """Find the chosen keys: all above the k-th largest and the first of those equal to it.

    Args:
        keys: int32 [rows, columns] of `sortable`.
        tiles: First and one past the last tile that holds valid keys.
        block: Columns of a tile.
        k: How many to choose.
        emit: Called as `emit(column, chosen, rank)` for each piece of 128 columns, with the first of them, which are
            chosen, and how many chosen are before each.
    """
    kth = kth_largest(keys, tiles, block, k)
    room = k - _count(keys, tiles, block, kth, strict=True)

    def visit(t: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
        above_before, tied_before = before
        for c in range(0, block, LANES):
            column = pl.multiple_of(t * block + c, LANES)
            part = keys[:, pl.ds(column, LANES)]
            above, tied = part > kth, (part == kth) & (kth != INVALID)
            above_rank, tied_rank = above_before + _earlier(above), tied_before + _earlier(tied)
            rank = above_rank + jnp.minimum(tied_rank, room)
            emit(column, above | (tied & (tied_rank < room)), rank.astype(jnp.int32))
            above_before += jnp.sum(jnp.where(above, 1.0, 0.0), axis=1, keepdims=True)
            tied_before += jnp.sum(jnp.where(tied, 1.0, 0.0), axis=1, keepdims=True)
        return above_before, tied_before

    zero = jnp.zeros((keys.shape[0], 1), jnp.float32)
    lax.fori_loop(*tiles, visit, (zero, zero))


def _moved(here: Array, right: Array, bit: int) -> Array:
    """Take what comes from `bit` columns to the right, or what stays; a move is a set bit of the distance."""
    sign_and_bit = jnp.int32(int(INVALID) | bit)
    comes, stays = (right & sign_and_bit) == bit, (here & sign_and_bit) == 0
    return jnp.where(comes, right, jnp.where(stays, here, NOTHING))


def move_left(keys: Ref, base: Any, n_columns: Any, block: int, k: int) -> None:
    """Move each distance in `keys` that many columns to the left, the smallest powers of two first.

    Places that hold a distance are in ascending order with distances that never fall, so no two meet on the way.

    Args:
        keys: int32 [rows, columns]: distances, -1 elsewhere; 128 more columns than there are keys.
        base: First column in use, a multiple of `block`.
        n_columns: Columns in use, a multiple of `block`.
        block: Columns of a tile.
        k: Columns at `base` that matter in the end.
    """
    keys[:, pl.ds(pl.multiple_of(base + n_columns, LANES), LANES)] = jnp.full(
        (keys.shape[0], LANES), NOTHING
    )

    @pl.loop(0, n_columns // block)
    def within_lanes(t: Any) -> None:
        start = pl.multiple_of(base + t * block, LANES)
        # All moves below 128 at once: together they reach 127 columns into the next tile.
        tile = keys[:, pl.ds(start, block + LANES)]
        for b in range(LANES.bit_length() - 1):
            right = pltpu.roll(tile, tile.shape[1] - 2**b, 1)
            tile = _moved(tile, right, 2**b)
        keys[:, pl.ds(start, block)] = tile[:, :block]

    for bit in range(LANES.bit_length() - 1, (keys.shape[1] - LANES - 1).bit_length()):
        sizes = (2**bit, min(2**bit, block))
        pl.when(2**bit < n_columns)(functools.partial(_move_by, keys, base, n_columns, sizes, k))


def _move_by(keys: Ref, base: Any, n_columns: Any, sizes: tuple[int, int], k: int) -> None:
    """Make the moves by `step` columns, in pieces of `width`.

    Distances are multiples of `step` by now, so what ends in the first k columns is within k of a multiple of it.
    """
    step, width = sizes
    pieces = min(2 * step // width, -(-k // width))  # of each 2 * step columns

    @pl.loop(0, pl.cdiv(n_columns, 2 * step) * pieces)
    def move(i: Any) -> None:
        offset = lax.div(i, pieces) * (2 * step) + lax.rem(i, pieces) * width
        here = pl.ds(pl.multiple_of(base + offset, LANES), width)
        source = offset + step
        there = jnp.minimum(source, n_columns - width)

        @pl.when(offset < n_columns)
        def piece() -> None:
            right = keys[:, pl.ds(pl.multiple_of(base + there, LANES), width)]
            right = jnp.where(source < n_columns, right, NOTHING)
            keys[:, here] = _moved(keys[:, here], right, step)
