"""Join the other processes of a run, agree with them, and say when one is gone.

Cloud TPU, GKE, Slurm and MPI jobs are recognised by jax; bare processes say in the environment which one they are.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv32_jax.errors import OthersMissingError, UsageError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
CONNECT_S, RETRY_S = 2, 0.2  # an attempt to reach process 0, and between two
SHUTDOWN_S = 15  # how long a process that ends waits for the others to end too
# What a collective or the coordination service says when the process at its other end is gone.
LOST = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection", "NCCL", "task died")


def join(*, timeout_s: int = 300) -> None:
    """Start `jax.distributed`, before anything else asks for a device.

    Bare processes set the address of process 0 as HOST:PORT, their number and their own place from 0 on, in the
    environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Schedulers give notice of a preemption by SIGTERM. jax would take that signal for itself, also where nobody asks it
    for what it took; `signals.StopOnSignal` and `largest` stop a run instead, with SIGINT and without a cluster alike.

    Args:
        timeout_s: Seconds to wait for the others.

    Raises:
        UsageError: If no cluster is recognised, the environment is incomplete, or the others do not come.
    """
    place, began = bare_process(), time.monotonic()
    if place:
        _meet(place["coordinator_address"], place["process_id"], timeout_s)
    jax.config.update("jax_enable_preemption_service", False)
    left = max(1, round(timeout_s - (time.monotonic() - began)))
    try:
        jax.distributed.initialize(
            **place, initialization_timeout=left, shutdown_timeout_seconds=SHUTDOWN_S
        )
    except ValueError as error:
        raise UsageError(
            f"distributed=true: no Cloud TPU, GKE, Slurm or MPI job is recognised here ({error});"
            f" for bare processes set {ADDRESS}=HOST:PORT, {COUNT} and {INDEX}"
        ) from error
    except RuntimeError as error:
        raise UsageError(
            f"distributed=true: the other processes did not come within {timeout_s} s;"
            f" `python -m train.doctor` on every host says why ({error})"
        ) from error


def _meet(address: str, index: int, timeout_s: float) -> None:
    """Wait until process 0 listens or, as process 0, see that it can; jax itself would end this process by a signal.

    Raises:
        UsageError: If the port is taken, or nobody listens in time.
    """
    host, _, port = address.rpartition(":")
    if index == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UsageError(
                f"{ADDRESS}={address}: port {port} cannot be listened on ({error.strerror})"
            ) from error
        return
    until, reason = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < until:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(RETRY_S)
        else:
            return
    raise UsageError(
        f"distributed=true: process 0 was not reached at {address} within {timeout_s:.0f} s ({reason});"
        " `python -m train.doctor` on every host says why"
    )


def bare_process() -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` that the environment gives; none if it says nothing.

    Raises:
        UsageError: If the environment gives some and lacks others, or one is no number in range.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if not given:
        return {}
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
    if missing:
        raise UsageError(
            f"{', '.join(given)} set but not {', '.join(missing)}: set all three or none"
        )
    address = re.fullmatch(r"(\[[\w:.%]+\]|[^:/\[\]\s]+):([0-9]{1,5})", given[ADDRESS])
    if address is None or not 0 < int(address[2]) < 2**16:
        raise UsageError(
            f"{ADDRESS}={given[ADDRESS]} must be HOST:PORT, an IPv6 address as [ADDRESS]:PORT, the port from 1 to 65535"
        )
    for name in (COUNT, INDEX):
        if not given[name].isdecimal() or int(given[name]) >= 2**31:
            raise UsageError(f"{name}={given[name]} must be a number below 2**31")
    count, index = int(given[COUNT]), int(given[INDEX])
    if index >= count:
        raise UsageError(f"{INDEX}={index} must be below {COUNT}={count}")
    return {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": index}


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
