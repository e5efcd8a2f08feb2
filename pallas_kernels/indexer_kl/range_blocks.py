"""The indexer's KL over a range of keys: joins the kernels of its parts, a block of queries at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_BLOCK_BYTES = 2**30  # of one float32 array [rows, keys]; about four of them live at a time
MAX_BLOCK_ROWS = 8192


class Kernels(NamedTuple):
    """A backend's kernels of the parts.

    Attributes:
        target: (q, k, lse, start, end, *, scale) -> float32 [T, S], the heads' weights summed; anything out of range.
        scores: (q, k, w, start, end) -> float32 [T, S] indexer scores; anything out of range.
        score_gradients: (q, k, w, d_scores, start, end) -> gradients of q, k and w.
        row_multiple: Their tiles of queries.
    """

    target: Callable[..., Array]
    scores: Callable[..., Array]
    score_gradients: Callable[..., tuple[Array, Array, Array]]
    row_multiple: int


class Rows(NamedTuple):
    """What each query brings; the first axis is the query."""

    q: Float[Array, "T J X"]
    w: Float[Array, "T J"]
    attn_q: Float[Array, "T H D"]
    lse: Float[Array, "T H"]
    start: Int[Array, " T"]
    end: Int[Array, " T"]
    selected: Bool[Array, "T S"] | None


class Keys(NamedTuple):
    """What all queries share."""

    k: Float[Array, "S X"]
    attn_k: Float[Array, "S H D"]


def kl_rows(kernels: Kernels, rows: Rows, keys: Keys, *, scale: float) -> Float[Array, " T"]:
    """Return the KL of each query, see `op.indexer_kl`; 0 for an empty row.

    Args:
        kernels: The parts.
        rows: The queries; of a dtype that the kernels take, but for `w` and `lse`, which are float32.
        keys: The keys, of the same dtype.
        scale: The attention's factor on the logits.

    Returns:
        float32.
    """

    def block_kl(block: Rows) -> Array:
        target, log_q, allowed = _distributions(kernels, block, keys, scale)
        return jnp.sum(
            jnp.where(allowed & (target > 0), target * (jnp.log(target) - log_q), 0.0), axis=1
        )

    return _by_blocks(block_kl, rows, keys.k.shape[0], kernels.row_multiple)


def gradients(
    kernels: Kernels, rows: Rows, keys: Keys, d_kl_T: Float[Array, " T"], *, scale: float
) -> tuple[Float[Array, "T J X"], Float[Array, "S X"], Float[Array, "T J"]]:
    """Pull a cotangent of `kl_rows` back to the indexer's q, k and w: `dI = d_kl (softmax(I) - p)`.

    The target and the scores are computed again, so that nothing of size T x S is kept for it.

    Args:
        kernels: The parts.
        rows: As for `kl_rows`.
        keys: As for `kl_rows`.
        d_kl_T: float32 cotangent of each row.
        scale: As for `kl_rows`.

    Returns:
        Gradients of q, k and w, in the dtypes that the kernel returns; sums over blocks are float32.
    """

    def block_gradients(block: tuple[Rows, Array]) -> tuple[Array, Array, Array]:
        queries, d_kl = block
        target, log_q, allowed = _distributions(kernels, queries, keys, scale)
        d_scores = jnp.where(allowed, jnp.exp(log_q) - target, 0.0) * d_kl[:, None]
        return kernels.score_gradients(
            queries.q, keys.k, queries.w, d_scores, queries.start, queries.end
        )

    blocks, n_rows = _split((rows, d_kl_T), keys.k.shape[0], kernels.row_multiple)
    if len(jax.tree.leaves(blocks)[0]) == 1:
        return block_gradients(jax.tree.map(lambda x: x[0], blocks))

    def add_block(d_k: Array, block: tuple[Rows, Array]) -> tuple[Array, tuple[Array, Array]]:
        d_q, more_d_k, d_w = block_gradients(block)
        return d_k + more_d_k, (d_q, d_w)

    zero = jnp.zeros(keys.k.shape, jnp.float32)
    d_k, (d_q, d_w) = jax.lax.scan(add_block, zero, blocks)
    d_q, d_w = (x.reshape(-1, *x.shape[2:])[:n_rows] for x in (d_q, d_w))
    return d_q, d_k, d_w


def _distributions(
    kernels: Kernels, rows: Rows, keys: Keys, scale: float
) -> tuple[Array, Array, Array]:
    """Return the target, the logarithm of the indexer's softmax, and the keys they are over, each [rows, S]."""
    place_S = jnp.arange(keys.k.shape[0], dtype=jnp.int32)
    allowed = (rows.start[:, None] <= place_S) & (place_S < rows.end[:, None])
    if rows.selected is not None:
        allowed &= rows.selected
    weights = kernels.target(rows.attn_q, keys.attn_k, rows.lse, rows.start, rows.end, scale=scale)
    # An unselected key's weight may be anything, even infinite: it was not under the logarithm's sum.
    weights = jnp.where(allowed, weights, 0.0)
    total = jnp.sum(weights, axis=1, keepdims=True)
    target = weights / jnp.where(total > 0, total, 1.0)
    scores = kernels.scores(rows.q, keys.k, rows.w, rows.start, rows.end)
    scores = jnp.where(allowed, scores, -jnp.inf)
    some = jnp.any(allowed, axis=1, keepdims=True)
    log_sum = jnp.where(some, jax.nn.logsumexp(scores, axis=1, keepdims=True), 0.0)
    return target, scores - log_sum, allowed


def _split(tree: Any, n_keys: int, row_multiple: int) -> tuple[Any, int]:
    """Cut the rows of every array into blocks [n, rows, ...]; rows of padding have no key."""
    n_rows = jax.tree.leaves(tree)[0].shape[0]
    largest = max(1, MAX_BLOCK_BYTES // (4 * n_keys * row_multiple)) * row_multiple
    n_blocks = -(-n_rows // min(largest, MAX_BLOCK_ROWS))
    # One block is taken as it is; more are of one size, with little padding.
    block = n_rows if n_blocks == 1 else -(-n_rows // (n_blocks * row_multiple)) * row_multiple

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, n_blocks * block - n_rows),) + ((0, 0),) * (x.ndim - 1))
        return padded.reshape(n_blocks, block, *x.shape[1:])

    return jax.tree.map(split, tree), n_rows


def _by_blocks(fn: Callable[[Rows], Array], rows: Rows, n_keys: int, row_multiple: int) -> Array:
    """Apply a function of each row alone to the blocks in turn."""
    blocks, n_rows = _split(rows, n_keys, row_multiple)
    if len(blocks.q) == 1:
        return fn(jax.tree.map(lambda x: x[0], blocks))
    return jax.lax.map(fn, blocks).reshape(-1)[:n_rows]
