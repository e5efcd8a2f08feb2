"""Agree with the other processes of a run, and say when one is gone."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv32_jax.errors import OthersMissingError, UsageError, WorkFailedError

# What a collective or the coordination service says when the process at its other end is gone.
LOST = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection", "NCCL", "task died")


def largest(number: int) -> int:
    """Return the largest of a number over the processes; every process asks at the same step."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def as_process_0(value: Callable[[], Any]) -> Any:
    """Have process 0 alone compute a value that JSON can hold, and return it on every process.

    Args:
        value: What to compute.

    Returns:
        The value.

    Raises:
        UsageError: On every process, where it raised that on process 0.
        WorkFailedError: The same.
    """
    if jax.process_count() == 1:
        return value()
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": value()}
        except (UsageError, WorkFailedError) as error:
            answer = {"error": str(error), "is_usage": isinstance(error, UsageError)}
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(length, np.uint8)
    padded[: len(text)] = text[:length]
    found = json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if "error" in found:
        raise (UsageError if found["is_usage"] else WorkFailedError)(found["error"])
    return found["value"]


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
