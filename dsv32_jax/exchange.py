"""Rows that travel between the devices of a mesh axis, each device sending others a run of rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Route(NamedTuple):
    """What one device sends to and receives from each of the n devices of an axis, int32 [n] each.

    Attributes:
        start: First row of the run that goes to a device.
        length: Rows of it.
        place: Where the run begins at its receiver.
        arriving: Rows that come from a device.
    """

    start: Int[Array, " n"]
    length: Int[Array, " n"]
    place: Int[Array, " n"]
    arriving: Int[Array, " n"]


def exchange(
    rows: Array, into: Array, route: Route, axis: str, *, longest: int, ragged: bool
) -> Array:
    """Send every device its run of rows, under `jax.shard_map`.

    Args:
        rows: [M, ...], rows to send.
        into: [R, ...], rows that received ones are written over.
        route: The runs.
        axis: The mesh axis.
        longest: Upper bound of a run.
        ragged: By `jax.lax.ragged_all_to_all`, which only moves what there is but which XLA does not have on a CPU;
            else by an all-to-all of runs filled up to the longest. The results are the same bits.

    Returns:
        [R, ...], `into` with the received rows.
    """
    if ragged:
        return jax.lax.ragged_all_to_all(
            rows, into, route.start, route.length, route.place, route.arriving, axis_name=axis
        )
    step = jnp.arange(longest, dtype=jnp.int32)
    index = jnp.where(step < route.length[:, None], route.start[:, None] + step, rows.shape[0])
    runs = rows.at[index].get(mode="fill", fill_value=0)
    runs, place = (
        jax.lax.all_to_all(a, axis, split_axis=0, concat_axis=0) for a in (runs, route.place)
    )
    target = jnp.where(step < route.arriving[:, None], place[:, None] + step, into.shape[0])
    received = runs.reshape(-1, *into.shape[1:])
    return into.at[target.reshape(-1)].set(received, mode="drop")
