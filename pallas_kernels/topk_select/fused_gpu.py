"""Selection by indexer score on Hopper: score a block of queries, select, go on to the next block.

Both kernels read and write only the keys in [start, end) of each row, so causal rows cost half of the square
without cutting it into spans, and the block of scores is never initialised.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk_select import pallas_gpu

MAX_BLOCK_BYTES = 2**31  # of scores
MAX_BLOCK_ROWS = 4096
ROW_MULTIPLE = 128  # the scoring kernel's tiles of queries

Scores = Callable[[Array, Array, Array, Array, Array], Array]


def rows_per_block(n_keys: int) -> int:
    """Choose how many queries are scored before their keys are selected."""
    rows = MAX_BLOCK_BYTES // (4 * n_keys)
    return max(min(rows, MAX_BLOCK_ROWS) // ROW_MULTIPLE, 1) * ROW_MULTIPLE


def indexer_topk(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    *,
    k: int,
    start: Int[Array, " T"],
    end: Int[Array, " T"],
    scores: Scores,
) -> Int[Array, "T K"]:
    """Select the k best keys of each query by indexer score.

    Args:
        q_TJX: Index queries.
        k_SX: Index keys.
        w_TJ: Head weights with the scales folded in.
        k: Slots per row, 1 to 2048.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        scores: Function of (q, k, w, start, end) that returns float32 [T, S]; keys outside the range may be anything.

    Returns:
        int32 key indices in ascending order, then -1.

    Raises:
        NotImplementedError: If the kernel cannot take k or S.
    """

    def select(rows: tuple[Array, ...]) -> Array:
        q, w, first, last = rows
        return pallas_gpu.topk_select(scores(q, k_SX, w, first, last), k=k, start=first, end=last)

    return _by_blocks(select, (q_TJX, w_TJ, start, end), k_SX.shape[0])


def indexer_topk_mask(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    *,
    k: int,
    start: Int[Array, " T"],
    end: Int[Array, " T"],
    scores: Scores,
) -> Bool[Array, "T S"]:
    """Mark the keys that `indexer_topk` lists; takes the same arguments and raises the same errors."""

    def select(rows: tuple[Array, ...]) -> Array:
        q, w, first, last = rows
        return pallas_gpu.topk_mask(scores(q, k_SX, w, first, last), k=k, start=first, end=last)

    return _by_blocks(select, (q_TJX, w_TJ, start, end), k_SX.shape[0])


def _by_blocks(
    select: Callable[[tuple[Array, ...]], Array], rows: tuple[Array, ...], n_keys: int
) -> Array:
    """Apply select to blocks of rows in turn; rows of padding are empty ranges."""
    n_rows, block = rows[0].shape[0], rows_per_block(n_keys)
    if n_rows <= block:
        return select(rows)
    n_blocks = -(-n_rows // block)
    block = (
        -(-n_rows // (n_blocks * ROW_MULTIPLE)) * ROW_MULTIPLE
    )  # blocks of one size, little padding
    pad = n_blocks * block - n_rows

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return padded.reshape(n_blocks, block, *x.shape[1:])

    out = jax.lax.map(select, jax.tree.map(split, rows))
    return out.reshape(-1, *out.shape[2:])[:n_rows]
