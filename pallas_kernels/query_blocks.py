"""Run a row-wise function over blocks of queries, so that only one block's work is alive at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

MAX_SPANS = 4  # key prefixes compiled apart; 4 of them skip 37% of a causal square
MAX_BLOCK_ROWS = 128
MAX_BLOCK_ELEMENTS = 2**28  # float32: 1 GiB for one block's largest array


def _max_spans() -> int:
    """Return MAX_SPANS, or 1 for a TPU, whose compiler takes minutes for what is written four times."""
    return 1 if dispatch.platform() == "tpu" else MAX_SPANS


def rows_per_block(row_elements: int) -> int:
    """Choose how many query rows are worked on at once.

    Args:
        row_elements: Elements of the largest array one row needs (heads x keys for attention).

    Returns:
        Rows, a power of two in [1, 128].
    """
    rows = MAX_BLOCK_ROWS
    while rows > 1 and rows * row_elements > MAX_BLOCK_ELEMENTS:
        rows //= 2
    return rows


def map_query_blocks(
    fn: Callable[[Any, Any], Any], rows: Any, keys: Any, *, block: int, causal: bool
) -> Any:
    """Compute `fn(rows, keys)`, a function of each row alone, one block of rows at a time.

    With `causal`, row t reads keys [0, t] only, so rows are cut into at most MAX_SPANS spans and each
    span is given the keys before its end: about half of the square is never computed. Longer spans run
    as a loop whose body is rematerialised, so that the backward pass holds one block too.

    Args:
        fn: Maps (rows, keys) to a tree of arrays whose first axis is the row.
        rows: Tree of arrays [T, ...].
        keys: Tree of arrays [S, ...].
        block: Rows worked on at once.
        causal: A promise that rows and keys are the same T positions and no row reads a later key.

    Returns:
        The tree that `fn(rows, keys)` would return.
    """
    n_rows = jax.tree.leaves(rows)[0].shape[0]
    n_blocks = -(-n_rows // block)
    n_spans = min(n_blocks, _max_spans()) if causal else 1
    span = -(-n_blocks // n_spans) * block
    parts = []
    for first in range(0, n_rows, span):
        last = min(first + span, n_rows)
        span_rows = jax.tree.map(lambda x, a=first, b=last: x[a:b], rows)
        span_keys = jax.tree.map(lambda x, b=last: x[:b], keys) if causal else keys
        parts.append(_loop(fn, span_rows, span_keys, last - first, block))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _loop(fn: Callable[[Any, Any], Any], rows: Any, keys: Any, n_rows: int, block: int) -> Any:
    """Apply fn to blocks in turn; one block needs no loop and no rematerialisation."""
    if n_rows <= block:
        return fn(rows, keys)
    n_blocks = -(-n_rows // block)
    pad = n_blocks * block - n_rows

    def split(x: jax.Array) -> jax.Array:
        # Repeats of the last row are valid rows, so padding needs no mask; they are cut off below.
        padded = jnp.concatenate([x, jnp.repeat(x[-1:], pad, axis=0)]) if pad else x
        return padded.reshape(n_blocks, block, *x.shape[1:])

    out = jax.lax.map(jax.checkpoint(lambda r: fn(r, keys)), jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n_rows], out)
