"""Join the other processes of a run. Cloud TPU, GKE, Slurm and MPI are recognised; bare processes say which one they are."""

import os

import jax

from dsv32_jax.errors import UsageError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HINT = "`python -m train.doctor` says what is wrong"


def join(*, timeout_s: int = 300) -> None:
    """Start `jax.distributed`, before anything else asks for a device.

    Bare processes set the address of process 0 as HOST:PORT, their number and their own place from 0 on, in the
    environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        timeout_s: Seconds to wait for the others.

    Raises:
        UsageError: If no cluster is recognised, the environment is incomplete, or the others do not come.
    """
    place = bare_process()
    try:
        jax.distributed.initialize(**place, initialization_timeout=timeout_s)
    except ValueError as error:
        raise UsageError(
            f"distributed=true: no Cloud TPU, GKE, Slurm or MPI job is recognised here ({error}); for bare processes set"
            f" {ADDRESS}=HOST:PORT, {COUNT} and {INDEX}"
        ) from error
    except RuntimeError as error:
        raise UsageError(
            f"distributed=true: the other processes did not come within {timeout_s} s; {HINT} ({error})"
        ) from error


def bare_process() -> dict[str, str | int]:
    """Return the arguments of `jax.distributed.initialize` that the environment gives; none if it says nothing.

    Raises:
        UsageError: If the environment gives some and lacks others, or one is no number in range.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if not given:
        return {}
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
    if missing:
        raise UsageError(f"{', '.join(given)} set but not {', '.join(missing)}: set all three or none")
    host, _, port = given[ADDRESS].rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{ADDRESS}={given[ADDRESS]} must be HOST:PORT")
    for name in (COUNT, INDEX):
        if not given[name].isdecimal():
            raise UsageError(f"{name}={given[name]} must be a number")
    count, index = int(given[COUNT]), int(given[INDEX])
    if index >= count:
        raise UsageError(f"{INDEX}={index} must be below {COUNT}={count}")
    return {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": index}
