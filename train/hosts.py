"""Agree with the other processes of a run, and say when one is gone."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv32_jax.errors import OthersMissingError

# What a collective or the coordination service says when the process at its other end is gone.
LOST = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection", "NCCL", "task died")


def largest(number: int) -> int:
    """Return the largest of a number over the processes; every process asks at the same step."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Say in the `with` block that another process is gone, where a collective of several fails for it.

    jax itself ends the others, with "another task died" and status 134, at once when process 0 is gone, which
    coordinates them, and 100 s after any other is gone where they wait for it in a save and not in a collective.

    Raises:
        OthersMissingError: In place of the collective's error.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() == 1 or not any(word in str(error) for word in LOST):
            raise
        raise OthersMissingError(
            "a process of this run is gone; start all of them again to go on from the last checkpoint"
            f" ({str(error).splitlines()[0][:200]})"
        ) from error
