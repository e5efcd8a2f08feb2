"""Read a traced program: the products that it executes, and its largest values by source line.

XLA's own count of FLOPs takes a loop's body once, so that of a model with scanned layers it is nearly all missing; and
of a program that does not fit it says no more than a sum.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util


class Value(NamedTuple):
    """One array of a traced program.

    Attributes:
        bytes: On one device; outside a `shard_map` an even share is assumed.
        shape: Its type, as it is traced there.
        source: The line that makes it, such as "mla.py:210".
    """

    bytes: int
    shape: str
    source: str


def executed_flops(jaxpr: Any, n_devices: int, filled: float = 1.0, reach: float = 1.0) -> float:
    """Add up the FLOPs of every product of a program, a multiply and an add counted as two.

    Args:
        jaxpr: A Jaxpr or ClosedJaxpr.
        n_devices: Devices of the mesh; a `shard_map`'s body runs on each of them.
        filled: Share of the rows of grouped products that are in a group, and so are computed: see `moe.filled`.
        reach: Share of a row's keys that a query's range has on average, on the device with most of them. Kernels skip
            blocks of keys outside of the ranges.

    Returns:
        FLOPs of one run on all devices together. Loops count as often as they run (a `while` as often as a constant in
        its condition allows, once without one), of a conditional the dearest branch, of a kernel every step of its
        grid that it does not skip. What every device computes alike outside a `shard_map` counts once.
    """
    total = 0.0
    for eqn in _open(jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            total += _product(eqn)
        elif name in ("ragged_dot", "ragged_dot_general"):
            total += filled * _ragged_product(eqn)
        else:
            inner = [executed_flops(sub, n_devices, filled, reach) for sub in _inside(eqn)]
            if inner:
                times = eqn.params["length"] if name == "scan" else 1
                times *= _most_runs(eqn) if name == "while" else 1
                times *= n_devices if name == "shard_map" else 1
                times *= _grid_steps(eqn, reach) if name == "pallas_call" else 1
                total += times * (max(inner) if name == "cond" else sum(inner))
    return total


def largest_values(jaxpr: Any, n_devices: int, n: int) -> list[Value]:
    """List the largest results of a program's equations, one a source line.

    Args:
        jaxpr: A Jaxpr or ClosedJaxpr.
        n_devices: Devices of the mesh.
        n: How many to list.

    Returns:
        The values, largest first.
    """
    by_line: dict[str, Value] = {}
    for value in _values(jaxpr, n_devices):
        if value.bytes > by_line.get(value.source, value._replace(bytes=-1)).bytes:
            by_line[value.source] = value
    return sorted(by_line.values(), key=lambda value: -value.bytes)[:n]


def _values(jaxpr: Any, shards: int) -> Iterator[Value]:
    for eqn in _open(jaxpr).eqns:
        inner = _inside(eqn)
        for sub in inner:
            yield from _values(sub, 1 if eqn.primitive.name == "shard_map" else shards)
        if inner:
            continue  # its results are those of the program inside
        for out in eqn.outvars:
            if hasattr(out.aval, "shape") and hasattr(out.aval, "dtype"):
                size = math.prod(out.aval.shape) * out.aval.dtype.itemsize // shards
                yield Value(size, out.aval.str_short(), _line(eqn))


def _line(eqn: Any) -> str:
    place = source_info_util.summarize(eqn.source_info).split(" ")[0]  # file:line:column (function)
    return ":".join(place.split("/")[-1].split(":")[:2])


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _inside(eqn: Any) -> list[Any]:
    """Return the programs inside an equation; a `custom_vjp`'s backward is called elsewhere, where it is used."""

    def is_program(x: Any) -> bool:
        return hasattr(_open(x), "eqns")

    return [
        x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program) if is_program(x)
    ]


def _most_runs(eqn: Any) -> int:
    """Return what a counter that starts at 0 is compared with in a `while`'s condition; 1 where that is no constant."""
    bounds = (
        x
        for inner in _open(eqn.params["cond_jaxpr"]).eqns
        if inner.primitive.name == "lt"
        for x in inner.invars
    )
    return max((int(x.val) for x in bounds if isinstance(x, core.Literal)), default=1)


def _grid_steps(eqn: Any, reach: float) -> float:
    """Return how often a kernel's body runs; of one that is told spans of blocks, and a block more than they reach."""
    mapping = eqn.params["grid_mapping"]
    grid = [size for size in mapping.grid if isinstance(size, int)]
    spans = mapping.num_index_operands >= 2 and len(grid) >= 2  # first and last blocks
    return math.prod(grid) * (min(1.0, reach + 1 / sorted(grid)[-2]) if spans else 1.0)


def _product(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _ragged_product(eqn: Any) -> float:
    """Each row of the ragged axis meets one group: 2 x rows x the elements of one group's weight or result.

    The forms are [M, K] x [E, K, N] -> [M, N], and [M, K] x [M, N] -> [E, K, N] for the weights' gradient.
    """
    left, right, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    width = right[1] if len(out) == 3 else out[1]
    return 2.0 * left[0] * left[1] * width
