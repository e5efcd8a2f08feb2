"""Definition of the lightning indexer's score."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FEW_QUERIES = 8
UNROLLED_HEADS = 4  # few heads compile to straight code, many to a loop


def key_mask(start_T: Int[Array, " T"], end_T: Int[Array, " T"], n_keys: int) -> Array:
    """Return bool [T, S], true where start[t] <= s < end[t]."""
    s = jnp.arange(n_keys, dtype=jnp.int32)
    return (s >= start_T[:, None]) & (s < end_T[:, None])


def raw_scores(
    q_TJX: Float[Array, "T J X"], k_SX: Float[Array, "S X"], w_TJ: Float[Array, "T J"]
) -> Float[Array, "T S"]:
    """Score each key for each query in float32, head by head, so that no [T, J, S] array exists.

    A few queries, as in decoding, make one product for all heads, which reads the keys once; the heads are added in the
    same order.
    """
    if q_TJX.shape[0] <= FEW_QUERIES:
        dots_TJS = jnp.einsum("tjx,sx->tjs", q_TJX, k_SX, preferred_element_type=jnp.float32)
        total_TS = jnp.zeros_like(dots_TJS[:, 0])
        for j in range(q_TJX.shape[1]):
            total_TS += w_TJ[:, j, None].astype(jnp.float32) * jax.nn.relu(dots_TJS[:, j])
        return total_TS

    @jax.checkpoint
    def add_head(total_TS: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
        q_TX, w_T = head
        dots_TS = jnp.einsum("tx,sx->ts", q_TX, k_SX, preferred_element_type=jnp.float32)
        return total_TS + w_T[:, None].astype(jnp.float32) * jax.nn.relu(dots_TS), None

    zero_TS = jnp.zeros_like(w_TJ[:, :1] * k_SX[:, 0], jnp.float32)
    heads = (jnp.moveaxis(q_TJX, 1, 0), jnp.moveaxis(w_TJ, 1, 0))
    n_heads = q_TJX.shape[1]
    return jax.lax.scan(add_head, zero_TS, heads, unroll=min(n_heads, UNROLLED_HEADS))[0]


def indexer_scores(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    start_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
) -> Float[Array, "T S"]:
    """Score the keys in [start, end); the rest is -inf."""
    scores_TS = raw_scores(q_TJX, k_SX, w_TJ)
    return jnp.where(key_mask(start_T, end_T, k_SX.shape[0]), scores_TS, -jnp.inf)
