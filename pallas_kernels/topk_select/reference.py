"""Definition of the exact, repeatable top-k selection."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.indexer_scores.reference import key_mask

SIGN_BIT = np.uint32(0x80000000)


def sortable(scores_TS: Float[Array, "T S"], valid_TS: Bool[Array, "T S"]) -> UInt[Array, "T S"]:
    """Map float32 to uint32 of the same order; invalid entries become 0, below every finite score."""
    bits = jax.lax.bitcast_convert_type(scores_TS, jnp.uint32)
    # -0.0 and 0.0 tie. By the bits: a comparison with 0 flushes subnormals on some backends.
    bits = jnp.where(bits == SIGN_BIT, jnp.uint32(0), bits)
    ordered = jnp.where(bits >= SIGN_BIT, ~bits, bits | SIGN_BIT)
    return jnp.where(valid_TS, ordered, jnp.uint32(0))


def topk_mask(
    scores_TS: Float[Array, "T S"], k: int, start_T: Int[Array, " T"], end_T: Int[Array, " T"]
) -> Bool[Array, "T S"]:
    """Mark the k largest finite scores of each row, ties to the smaller index."""
    valid_TS = key_mask(start_T, end_T, scores_TS.shape[1]) & jnp.isfinite(scores_TS)
    order_TS = sortable(scores_TS, valid_TS)

    def settle_bit(i: Array, kth_T: Array) -> Array:
        # Bit by bit from the top: keep a bit if at least k entries are not below the larger value.
        candidate_T = kth_T | (SIGN_BIT >> i.astype(jnp.uint32))
        count_T = jnp.sum(order_TS >= candidate_T[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count_T >= k, candidate_T, kth_T)

    kth_T = jax.lax.fori_loop(0, 32, settle_bit, jnp.zeros_like(order_TS[:, 0]))
    above_TS = order_TS > kth_T[:, None]
    tied_TS = (order_TS == kth_T[:, None]) & valid_TS
    room_T = k - jnp.sum(above_TS, axis=1, dtype=jnp.int32)
    return above_TS | (tied_TS & (jnp.cumsum(tied_TS, axis=1, dtype=jnp.int32) <= room_T[:, None]))


def mask_to_indices(mask_TS: Bool[Array, "T S"], k: int) -> Int[Array, "T K"]:
    """List the marked positions of each row in ascending order, then -1 up to k."""
    count_TS = jnp.cumsum(mask_TS, axis=1, dtype=jnp.int32)
    nth = jnp.arange(1, k + 1, dtype=jnp.int32)
    index_TK = jax.vmap(lambda count: jnp.searchsorted(count, nth))(count_TS).astype(jnp.int32)
    return jnp.where(nth <= count_TS[:, -1:], index_TK, -1)
