"""Sums that do not depend on their order: multiples of a power of two, added as int64 words."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BITS = 61  # of int64's 63: the bound on a sum is rounded up to a power of two
MAX_EXPONENT = 120  # float32 holds 2**127


def counts_per_one(bound: Float[Array, ""]) -> Float[Array, "1"]:
    """Return how many counts make 1.0, a power of two, so that no sum within the bound leaves int64.

    Args:
        bound: float32, at least every sum's absolute value.

    Returns:
        float32; NaN if the bound is not finite, so that this is not hidden by a cast to integers.
    """
    _, exponent = jnp.frexp(bound)  # bound < 2**exponent
    counts = jnp.ldexp(jnp.float32(1.0), jnp.clip(BITS - exponent, -MAX_EXPONENT, MAX_EXPONENT))
    return jnp.where(jnp.isfinite(bound), counts, jnp.nan)[None]


def to_float32(words: Int[Array, "*N 2"], counts: Float[Array, "1"]) -> Float[Array, "*N"]:
    """Return int64 counts, given as low and high int32 word, as float32.

    Args:
        words: int32, the low word first.
        counts: Of `counts_per_one`.

    Returns:
        Sums, rounded to float32.
    """
    low = words[..., 0]
    # With the low word read as signed, small sums of either sign keep all their bits.
    high = words[..., 1] + (low < 0)
    return (high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)) / counts
