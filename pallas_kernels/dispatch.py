"""Choose the implementation of an op, and let ops written for one sequence take leading batch axes."""

from collections.abc import Callable
from typing import Any

import jax


def choose(op: str, implementation: str | None, available: tuple[str, ...]) -> str:
    """Return the implementation to run: the named one, or the first available.

    Args:
        op: Name of the op, for the message.
        implementation: A name out of `available`, or None for the first.
        available: Names, best first.

    Returns:
        The chosen name.

    Raises:
        ValueError: If `implementation` is not available.
    """
    if implementation is None:
        return available[0]
    if implementation not in available:
        raise ValueError(f"{op}: implementation={implementation!r} must be one of {available}")
    return implementation


def over_batch(fn: Callable[..., Any], n_batch_axes: int) -> Callable[..., Any]:
    """Map a function of one sequence over leading batch axes shared by all its arguments."""
    for _ in range(n_batch_axes):
        fn = jax.vmap(fn)
    return fn


def check_keyword(op: str, name: str, value: int, minimum: int) -> None:
    """Raise ValueError if an integer option is below its minimum."""
    if value < minimum:
        raise ValueError(f"{op}: {name}={value} must be at least {minimum}")


def check_causal(op: str, causal: bool, n_queries: int, n_keys: int) -> None:
    """Raise ValueError if a causal promise is given for queries and keys of different length."""
    if causal and n_queries != n_keys:
        raise ValueError(
            f"{op}: causal=True needs as many queries as keys, got {n_queries} and {n_keys}"
        )
