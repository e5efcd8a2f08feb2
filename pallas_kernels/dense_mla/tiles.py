"""What the dense kernels need to know about ranges and masks before they run, in plain jnp.

A tile is 128 queries or keys, two halves of 64 for two warpgroups.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels import padding

HALF = 64
TILE = 2 * HALF
DIMS, VALUE_DIMS = (64, 128, 192), (64, 128)  # what fits in shared memory and registers


def head_group(n_heads: int) -> int:
    """Return how many heads to work on at about the same time, so that what they share stays in L2.

    Measured on an H200 at 8192 keys: 1 is 10% slower than 4 forward, 16 is 17% slower than 4 backward.
    """
    return max(group for group in (1, 2, 4) if n_heads % group == 0)


def query_tiles(
    start_T: Int[Array, " T"], end_T: Int[Array, " T"], n_keys: int, block_kv: int
) -> Int[Array, "N 7"]:
    """Describe each tile of 128 queries, longest first.

    Columns: tile, first and last + 1 block of keys that a query of it reads, then for each half of 64 queries the first
    and last + 1 block that all of them read whole. A tile without keys gets one block, in which all is masked.
    """
    n_tiles, n_blocks = start_T.shape[0] // TILE, -(-n_keys // block_kv)
    start, end = start_T.reshape(n_tiles, 2, HALF), end_T.reshape(n_tiles, 2, HALF)
    some = end > start
    first = jnp.min(jnp.where(some, start, n_keys), axis=(1, 2)) // block_kv
    last = -(-jnp.max(jnp.where(some, end, 0), axis=(1, 2)) // block_kv)
    first = jnp.clip(first, 0, n_blocks - 1)
    last = jnp.clip(last, first + 1, n_blocks)
    whole_first = -(-jnp.max(start, axis=2) // block_kv)
    whole_last = jnp.min(end, axis=2) // block_kv
    halves = jnp.stack([whole_first, whole_last], axis=2).reshape(n_tiles, 4)
    tile = jnp.arange(n_tiles, dtype=jnp.int32)
    table = jnp.concatenate([jnp.stack([tile, first, last], axis=1), halves], axis=1)
    return table.astype(jnp.int32)[jnp.argsort(first - last, stable=True)]


def key_tiles(start_T: Int[Array, " T"], end_T: Int[Array, " T"], n_keys: int) -> Int[Array, "N 4"]:
    """Describe each block of 128 keys: first and last + 1 step of 64 queries, and of those that need no mask."""
    n_steps, n_tiles = start_T.shape[0] // HALF, -(-n_keys // TILE)
    start, end = start_T.reshape(n_steps, HALF), end_T.reshape(n_steps, HALF)
    key = jnp.arange(n_tiles, dtype=jnp.int32)[:, None] * TILE
    some = end > start
    lowest = jnp.min(jnp.where(some, start, n_keys), axis=1)
    highest = jnp.max(jnp.where(some, end, 0), axis=1)
    used = (lowest < key + TILE) & (highest > key)  # [tiles, steps]
    whole = (jnp.max(start, axis=1) <= key) & (jnp.min(end, axis=1) >= key + TILE)
    any_used = jnp.any(used, axis=1)
    first = jnp.where(any_used, jnp.argmax(used, axis=1), 0)
    last = jnp.where(any_used, n_steps - jnp.argmax(used[:, ::-1], axis=1), 0)
    # The first run of whole steps; any further ones are masked for nothing.
    whole_first = jnp.where(jnp.any(whole, axis=1), jnp.argmax(whole, axis=1), n_steps)
    after = ~whole & (jnp.arange(n_steps) > whole_first[:, None])
    whole_last = jnp.where(jnp.any(after, axis=1), jnp.argmax(after, axis=1), n_steps)
    return jnp.stack([first, last, whole_first, whole_last], axis=1).astype(jnp.int32)


def pad_rows(x: Array, multiple: int) -> Array:
    """Append zero rows: TMA takes rows in tiles of 8."""
    pad = -x.shape[0] % multiple
    return jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))) if pad else x


def clip_ranges(
    start_T: Int[Array, " T"], end_T: Int[Array, " T"], n_keys: int, multiple: int
) -> tuple[Array, Array]:
    """Clip ranges to the keys there are, and repeat the last one up to a whole tile."""
    pad = (0, -start_T.shape[0] % multiple)
    clipped = (jnp.clip(x, 0, n_keys).astype(jnp.int32) for x in (start_T, end_T))
    start, end = (jnp.pad(x, pad, mode="edge") for x in clipped)
    return start, end


def selected_in_range(
    selected_TS: Bool[Array, "T S"], start_T: Int[Array, " T"], end_T: Int[Array, " T"]
) -> Bool[Array, "T S"]:
    """Take keys out of a mask that are outside the range."""
    key = jnp.arange(selected_TS.shape[1])
    return selected_TS & (key >= start_T[:, None]) & (key < end_T[:, None])


def pack_keys(allowed_TS: Bool[Array, "T S"], block_kv: int) -> Int[Array, "W P"]:
    """Pack a mask along the keys, 32 in an int32, padded to whole blocks and tiles and transposed."""
    n_queries, n_keys = allowed_TS.shape
    padded = jnp.pad(allowed_TS, ((0, -n_queries % TILE), (0, -n_keys % block_kv)))
    bits = padded.reshape(padded.shape[0], -1, 32).astype(jnp.uint32)
    bits <<= jnp.arange(32, dtype=jnp.uint32)
    return lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32).T


def pack_queries(allowed_TS: Bool[Array, "T S"]) -> Int[Array, "W P"]:
    """Pack a mask along the queries, 32 in an int32, padded to whole steps and blocks."""
    n_queries, n_keys = allowed_TS.shape
    padded = jnp.pad(allowed_TS, ((0, -n_queries % HALF), (0, -n_keys % TILE)))
    bits = padded.reshape(-1, 32, padded.shape[1]).astype(jnp.uint32)
    bits <<= jnp.arange(32, dtype=jnp.uint32)[:, None]
    return lax.bitcast_convert_type(jnp.sum(bits, axis=1, dtype=jnp.uint32), jnp.int32)


def check(q_THD: Array, k_SHD: Array, v_SHU: Array, scale: float) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not take."""
    if not q_THD.dtype == k_SHD.dtype == v_SHU.dtype == jnp.bfloat16:
        raise NotImplementedError(
            f"takes bfloat16, got {q_THD.dtype}, {k_SHD.dtype}, {v_SHU.dtype}"
        )
    padding.least(q_THD.shape[-1], DIMS, "dims")
    padding.least(v_SHU.shape[-1], VALUE_DIMS, "value dims")
    if 0 in (*q_THD.shape, *k_SHD.shape):
        raise NotImplementedError("an axis of length 0")
    if not scale > 0:
        raise NotImplementedError(f"scale={scale} must be positive")
