"""Join the other processes that run the same command, on other hosts or on this one.

Cloud TPU, GKE, Slurm and MPI jobs are recognised by jax; bare processes are told which one they are.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dsv32_jax import rendezvous
from dsv32_jax.errors import OthersMissingError, UsageError
from dsv32_jax.rendezvous import Greeting, Place

ADDRESS, COUNT, INDEX = VARIABLES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
SHUTDOWN_S = 15  # how long a process that ends waits for the others to end too
HINT = "`python -m train.doctor` on every host says why"


def join(place: Place | None = None, *, timeout_s: int = 300) -> None:
    """Start `jax.distributed`, before anything else asks for a device.

    Bare processes meet first, as jax would end them by a signal where a port is taken or a number is given twice.

    Schedulers give notice of a preemption by SIGTERM. jax would take that signal for itself, also where nobody asks it
    for what it took; this project's commands stop by themselves, with SIGINT and without a cluster alike.

    Args:
        place: This process's place; what the environment says by default.
        timeout_s: Seconds to wait for the others.

    Raises:
        UsageError: If no cluster is recognised, the environment is incomplete, a number is given twice, or the
            processes do not agree how many they are.
        OthersMissingError: If the others do not come.
    """
    began = time.monotonic()
    place = bare_place() if place is None else place
    given: dict[str, Any] = {}
    if place is not None:
        _meet(place, timeout_s)
        given = {
            "coordinator_address": place.address,
            "num_processes": place.count,
            "process_id": place.index,
        }
    jax.config.update("jax_enable_preemption_service", False)
    left = max(1, round(timeout_s - (time.monotonic() - began)))
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=left, shutdown_timeout_seconds=SHUTDOWN_S
        )
    except ValueError as error:
        raise UsageError(
            f"no Cloud TPU, GKE, Slurm or MPI job is recognised here ({error});"
            f" for bare processes set {ADDRESS}=HOST:PORT, {COUNT} and {INDEX}"
        ) from error
    except RuntimeError as error:
        raise OthersMissingError(
            f"the other processes did not come within {timeout_s} s; {HINT} ({error})"
        ) from error


def _meet(place: Place, timeout_s: float) -> None:
    """Wait for the other bare processes.

    Raises:
        UsageError: If something is wrong with what the processes were told.
        OthersMissingError: If not all of them come, or this process cannot reach or be reached.
    """
    own = Greeting(program="run", index=place.index, count=place.count)
    verdict = rendezvous.meet(place, own, timeout_s)
    if verdict.wrong:
        raise UsageError("; ".join(verdict.lines))
    if verdict.unmet:
        raise OthersMissingError(f"{verdict.unmet}; {HINT}")
    if verdict.missing:
        raise OthersMissingError(f"{verdict.missing} within {timeout_s:.0f} s; {HINT}")


def bare_place() -> Place | None:
    """Return the place that the environment gives this process; None if it says nothing.

    Raises:
        UsageError: If the environment gives some of it and lacks the rest, or one is no number in range.
    """
    return read_place(os.environ, VARIABLES)


def read_place(given: Mapping[str, str], names: Sequence[str]) -> Place | None:
    """Return the place that three texts name; None if none of them is there.

    Args:
        given: Texts by name; an empty one counts as absent.
        names: Of process 0's address as HOST:PORT, the number of processes, and this one's own, from 0 on.

    Raises:
        UsageError: If some are there and others are not, or one is no address or no number in range.
    """
    texts = {name: given[name] for name in names if given.get(name)}
    if not texts:
        return None
    if missing := [name for name in names if name not in texts]:
        raise UsageError(
            f"{', '.join(texts)} given but not {', '.join(missing)}: give all three or none"
        )
    address, count, index = names
    host = re.fullmatch(r"(\[[\w:.%]+\]|[^:/\[\]\s]+):([0-9]{1,5})", texts[address])
    if host is None or not 0 < int(host[2]) < 2**16:
        raise UsageError(
            f"{address}={texts[address]} must be HOST:PORT, an IPv6 address as [ADDRESS]:PORT, the port from 1 to 65535"
        )
    for name in (count, index):
        if not texts[name].isdecimal() or int(texts[name]) >= 2**31:
            raise UsageError(f"{name}={texts[name]} must be a number below 2**31")
    if int(texts[index]) >= int(texts[count]):
        raise UsageError(f"{index}={texts[index]} must be below {count}={texts[count]}")
    return Place(host[1].strip("[]"), int(host[2]), int(texts[count]), int(texts[index]))
