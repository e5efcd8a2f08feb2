"""Packed documents: which keys a token may read, and its position in its own document."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


class Segments(NamedTuple):
    """Where each token's document begins and ends in its row.

    Attributes:
        start: int32 [B, T], first key of the token's document.
        end: int32 [B, T], one past its last visible key: t + 1, or `start` for padding.
        position: int32 [B, T], place within the document.
        valid: bool [B, T], false for padding (segment id 0).
    """

    start: Int[Array, "B T"]
    end: Int[Array, "B T"]
    position: Int[Array, "B T"]
    valid: Bool[Array, "B T"]


def from_ids(segment_ids: Int[Array, "B T"]) -> Segments:
    """Read the documents off a row of ids.

    Args:
        segment_ids: int, 0 for padding; each run of equal ids is one document.

    Returns:
        Its Segments.
    """
    place = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    start = jax.lax.cummax(jnp.where(segment_ids != before, place, 0), axis=1)
    valid = segment_ids != 0
    return Segments(start, jnp.where(valid, place + 1, start), place - start, valid)


def next_is_same(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Tell which tokens have their successor in the same document."""
    after = jnp.pad(segment_ids, ((0, 0), (0, 1)))[:, 1:]
    return (segment_ids == after) & (segment_ids != 0)


def shift_left(x: Shaped[Array, "B T"]) -> Shaped[Array, "B T"]:
    """Move every token's successor onto it; the last place repeats its own."""
    return jnp.concatenate([x[:, 1:], x[:, -1:]], axis=1)


def running_sum(values_BTE: Float[Array, "B T E"], segments: Segments) -> Float[Array, "B T E"]:
    """Sum from the start of each token's document up to the token, without crossing documents."""
    first_BT1 = (segments.position == 0)[..., None]

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        fresh = left[0] | right[0]
        return fresh, jnp.where(right[0], right[1], left[1] + right[1])

    return jax.lax.associative_scan(combine, (first_BT1, values_BTE), axis=1)[1]
