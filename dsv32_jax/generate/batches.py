"""Requests as the arrays that a step takes and gives, a row a slot."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8

from dsv32_jax.generate.request import Request
from dsv32_jax.generate.sampling import Knobs, SamplingParams


def page_table(rows: Sequence[Request | None], *, shortest: int) -> Int[np.ndarray, "B P"]:
    """Return the pages of each row's request.

    Args:
        rows: Requests; None is an idle row.
        shortest: Pages that the table has at least.

    Returns:
        int32, as wide as the next power of two, filled up with page 0.
    """
    widest = max([shortest, *(len(request.pages) for request in rows if request)])
    table = np.zeros((len(rows), 1 << (widest - 1).bit_length()), np.int32)
    for row, request in enumerate(rows):
        if request is not None:
            table[row, : len(request.pages)] = request.pages
    return table


def knobs(rows: Sequence[Request | None]) -> Knobs:
    """Return how each row's tokens are drawn.

    Args:
        rows: Requests; an idle row has the defaults.

    Returns:
        The settings.
    """
    idle = SamplingParams()
    params = [request.params if request else idle for request in rows]
    return Knobs(
        jnp.asarray([p.temperature for p in params], jnp.float32),
        jnp.asarray([p.top_p for p in params], jnp.float32),
        jnp.asarray([p.top_k for p in params], jnp.int32),
        jnp.asarray([p.seed for p in params], jnp.uint32),
    )


def unpack_kept(bits: UInt8[np.ndarray, " W"], vocab_size: int) -> Int[np.ndarray, " K"]:
    """Return the ids of a kept set.

    Args:
        bits: As `sampling.pack_kept` packs them.
        vocab_size: Ids there are.

    Returns:
        int32, ascending.
    """
    return np.flatnonzero(np.unpackbits(bits, count=vocab_size)).astype(np.int32)
