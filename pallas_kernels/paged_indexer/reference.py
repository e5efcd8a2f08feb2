"""Definition of reading a sequence's rows from the pages of a cache."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def page_rows(table_BP: Int[Array, "B P"], page_size: int) -> Int[Array, "B S"]:
    """Return the cache row of every position of every sequence, S = P * page_size."""
    offset = jnp.arange(page_size, dtype=jnp.int32)
    rows_BPO = table_BP[..., None] * page_size + offset
    return rows_BPO.reshape(table_BP.shape[0], -1)


def read_pages(
    array_NX: Array, table_BP: Int[Array, "B P"], page_size: int, end_B: Int[Array, " B"]
) -> Array:
    """Return each sequence's rows [B, S, X] in order; zeros from its end on, whatever an earlier owner left there."""
    rows_BS = page_rows(table_BP, page_size)
    inside_BS = jnp.arange(rows_BS.shape[1], dtype=jnp.int32) < end_B[:, None]
    return jnp.where(inside_BS[..., None], array_NX[rows_BS], 0)
