"""Choose the implementation of an op, and let ops written for one sequence take leading batch axes."""

import functools
import importlib
import logging
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

logger = logging.getLogger(__name__)

HOPPER = "9.0"  # compute capability of H100 and H200
MULTIPROCESSORS = 132  # of an H100 or H200, SXM
GPU_PACKAGE = "triton"  # of the extra `gpu`


def choose(
    op: str, implementation: str | None, backends: Mapping[str, Callable[[], object] | None]
) -> str:
    """Return the implementation to run: the named one, or the first that takes the input.

    The choice is logged once, with the reason of each better one that was passed over.

    Args:
        op: Name of the op, for messages.
        implementation: A name out of `backends`, or None for the best.
        backends: Names, best first; each with a check that raises NotImplementedError, saying why, where that backend
            cannot take the input, or None if it takes every input.

    Returns:
        The chosen name.

    Raises:
        ValueError: If `implementation` is unknown.
        NotImplementedError: If the named implementation, or every one, cannot take the input.
    """
    if implementation is not None:
        if implementation not in backends:
            raise ValueError(
                f"{op}: implementation={implementation!r} must be one of {tuple(backends)}"
            )
        _check(op, implementation, backends[implementation])
        return implementation
    reasons: list[str] = []
    for name, check in backends.items():
        try:
            _check(op, name, check)
        except NotImplementedError as error:
            reasons.append(str(error))
            continue
        _log_choice(op, name, tuple(reasons))
        return name
    raise NotImplementedError("; ".join(reasons))


def _check(op: str, name: str, check: Callable[[], object] | None) -> None:
    try:
        if check is not None:
            check()
    except NotImplementedError as error:
        raise NotImplementedError(f"{op}: {name}: {error}") from error


@functools.cache
def _log_choice(op: str, name: str, reasons: tuple[str, ...]) -> None:
    """Say once what runs; the cache is the memory of what was said."""
    passed_over = f" ({'; '.join(reasons)})" if reasons else ""
    logger.info("%s runs as %s%s", op, name, passed_over)


def require_hopper() -> None:
    """Raise NotImplementedError unless computations go to an NVIDIA Hopper GPU."""
    device = _device()
    capability = getattr(device, "compute_capability", None)
    if capability != HOPPER:
        kind = getattr(device, "device_kind", device)
        raise NotImplementedError(f"needs an NVIDIA Hopper GPU, this is {kind}")


def require_tpu() -> None:
    """Raise NotImplementedError unless computations go to a TPU."""
    device = _device()
    if device.platform != "tpu":
        kind = getattr(device, "device_kind", device)
        raise NotImplementedError(f"needs a TPU, this is {kind}")


def multiprocessors() -> int:
    """Return how many multiprocessors the GPU has that computations go to, an H100's or H200's if there is no GPU."""
    return int(getattr(_device(), "core_count", MULTIPROCESSORS))


def platform() -> str:
    """Return the platform that computations go to: "cpu", "gpu" or "tpu"."""
    return _device().platform


def _device() -> Any:
    """Return the device that computations go to; a mesh of another platform is one that is compiled for from here."""
    local = _local_device()
    target = jax.sharding.get_abstract_mesh().abstract_device
    return local if target is None or target.platform == local.platform else target


def _local_device() -> Any:
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):  # None, or a platform's name
        return jax.devices(default)[0]
    return default


def load(module: str) -> types.ModuleType:
    """Import a backend; raise NotImplementedError if the package that it is written in is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package != GPU_PACKAGE:
            raise
        raise NotImplementedError(f"needs {package}: pip install dsv32-jax[gpu]") from error


def over_batch(fn: Callable[..., Any], n_batch_axes: int) -> Callable[..., Any]:
    """Map a function of one sequence over leading batch axes shared by all its arguments."""
    for _ in range(n_batch_axes):
        fn = jax.vmap(fn)
    return fn


def each_sequence(fn: Callable[[Any], Any], arrays: Any, n_batch_axes: int) -> Any:
    """Apply a function of one sequence to each of a batch in turn: for kernels that fill the device by themselves.

    Args:
        fn: Maps a tree of arrays without batch axes to another.
        arrays: Tree of arrays that share their leading axes.
        n_batch_axes: How many of them are the batch.

    Returns:
        The results, with the batch axes in front.
    """
    batch = jax.tree.leaves(arrays)[0].shape[:n_batch_axes]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[n_batch_axes:]), arrays)
    if math.prod(batch) == 1:
        out = jax.tree.map(lambda x: x[None], fn(jax.tree.map(lambda x: x[0], flat)))
    else:
        out = jax.lax.map(fn, flat)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def check_keyword(op: str, name: str, value: int, minimum: int) -> None:
    """Raise ValueError if an integer option is below its minimum."""
    if value < minimum:
        raise ValueError(f"{op}: {name}={value} must be at least {minimum}")


def check_width(op: str, queries: int, keys: int) -> None:
    """Raise ValueError if queries and keys have different numbers of columns."""
    if queries != keys:
        raise ValueError(f"{op}: queries have {queries} columns and keys {keys}")


def number(op: str, name: str, value: Any) -> float:
    """Return an option as a number that kernels are compiled with; raise ValueError if it is traced or no number."""
    try:
        return float(value)
    except (TypeError, jax.errors.JAXTypeError) as error:
        raise ValueError(f"{op}: {name} must be a number, not a traced array") from error


def check_causal(op: str, causal: bool, n_queries: int, n_keys: int) -> None:
    """Raise ValueError if a causal promise is given for queries and keys of different length."""
    if causal and n_queries != n_keys:
        raise ValueError(
            f"{op}: causal=True needs as many queries as keys, got {n_queries} and {n_keys}"
        )
