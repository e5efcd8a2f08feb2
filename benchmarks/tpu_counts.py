"""What a TPU kernel does, counted from its trace: products, vector operations, bytes, VMEM; no TPU is needed."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LANES, SUBLANES = 128, 8
BUFFERS = 2  # a block that a grid moves is loaded while the one before is worked on
# Moves and views: none of them takes a slot of the vector units that arithmetic uses.
FREE = {
    *("get", "swap", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "bitcast"),
    *("concatenate", "dma_wait", "program_id", "roll", "multiple_of"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What all calls of one kernel do.

    Attributes:
        flops: Of its CostEstimate; of `products` they are the part that causal ranges reach.
        products: Operations of the matrix products that the kernel's code contains, the whole square.
        transcendentals: Of its CostEstimate.
        vector_ops: Arithmetic on single elements.
        copies: Of rows or pages, that the kernel starts by itself.
        bytes: Moved between HBM and VMEM, in whole tiles, by the grid and by those copies.
        estimated_bytes: Of its CostEstimate.
        array_bytes: Of its operands and results, but for tables that it copies rows from.
        vmem: Blocks, twice where the grid moves them, and scratch.
        parallel: Whether the cores of a chip share the grid.
    """

    flops: float
    products: float
    transcendentals: float
    vector_ops: float
    copies: float
    bytes: float
    estimated_bytes: float
    array_bytes: float
    vmem: int
    parallel: bool


def count(
    fn: Callable[..., Any],
    *shapes: Any,
    causal: bool = False,
    dynamic: int = 1,
    copied_rows: int = 1,
) -> dict[str, Counts]:
    """Trace a function and count each Pallas kernel in it, by name; XLA's own operations are not counted.

    Args:
        fn: Calls the kernels.
        shapes: Its arguments' shapes.
        causal: Take the kernels' spans of keys for those of one causal document: about half of the square.
        dynamic: Steps of a grid's axis whose length only the device knows.
        copied_rows: Rows of a table that one copy of the kernel's own brings.
    """
    found: dict[str, Counts] = {}
    for eqn, calls in _kernels(jax.make_jaxpr(fn)(*shapes).jaxpr, 1):
        counts = _count_kernel(eqn, calls, causal, dynamic, copied_rows)
        name = _name(eqn)
        if name in found:
            # The same kernel at several places of the function: the sums, in the VMEM of the larger.
            sums = {
                f.name: getattr(found[name], f.name) + getattr(counts, f.name)
                for f in dataclasses.fields(Counts)
                if f.name not in ("vmem", "parallel")
            }
            vmem = max(found[name].vmem, counts.vmem)
            counts = Counts(**sums, vmem=vmem, parallel=counts.parallel)
        found[name] = counts
    return found


def _kernels(jaxpr: Any, calls: int) -> Iterator[tuple[Any, int]]:
    """Yield the Pallas calls of a trace, each with how often it runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn, calls
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn):
            yield from _kernels(inner, calls * times)


def _inner(eqn: Any) -> list[Any]:
    """Return the traces inside an operation."""
    values = (x for v in eqn.params.values() for x in (v if isinstance(v, list | tuple) else (v,)))
    jaxprs = (getattr(x, "jaxpr", x) for x in values)
    return [x for x in jaxprs if hasattr(x, "eqns")]


def _name(eqn: Any) -> str:
    return eqn.params["name"] or eqn.params["jaxpr"].debug_info.func_name


def _count_kernel(eqn: Any, calls: int, causal: bool, dynamic: int, copied_rows: int) -> Counts:
    mapping, cost = eqn.params["grid_mapping"], eqn.params["cost_estimate"]
    if cost is None:
        raise ValueError(f"kernel {_name(eqn)} has no CostEstimate")
    grid = tuple(n if isinstance(n, int) else dynamic for n in mapping.grid)
    spans = mapping.num_index_operands >= 2  # every kernel here with ranges of keys prefetches them
    inner = 1 if len(grid) < 3 or _name(eqn) == "attention_target" else 2
    share = (1 + 1 / grid[inner]) / 2 if causal and spans else 1.0
    steps = math.prod(grid)
    body = _Body(grid, share, trips=round(share * grid[inner]) if len(grid) > 1 else 1)
    products, vector_ops, copies = steps * body.walk(eqn.params["jaxpr"], {}, 1.0)
    moved, vmem = copies * copied_rows * _row_bytes(mapping.block_mappings), 0
    for block in mapping.block_mappings:
        size = _block_bytes(block)
        last, through_span = _last_axis(block.index_map_jaxpr.jaxpr, len(grid))
        times = math.prod(grid[: last + 1]) * (share if through_span else 1.0)
        moved += times * size
        vmem += size * (BUFFERS if last >= 0 else 1)
    scratch = eqn.params["jaxpr"].invars[
        len(eqn.params["jaxpr"].invars) - mapping.num_scratch_operands :
    ]
    vmem += sum(_padded_bytes(v.aval.shape, v.aval.dtype) for v in scratch if "vmem" in str(v.aval))
    semantics = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
    whole = [x.array_aval for x in mapping.block_mappings if not _is_table(x)]
    return Counts(
        flops=calls * cost.flops * share,
        products=calls * products,
        transcendentals=calls * cost.transcendentals * share,
        vector_ops=calls * vector_ops,
        copies=calls * copies,
        bytes=calls * moved,
        estimated_bytes=calls * cost.bytes_accessed,
        array_bytes=calls * sum(x.size * x.dtype.itemsize for x in whole),
        vmem=vmem,
        parallel=any("parallel" in str(x).lower() for x in semantics),
    )


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array whose last two axes lie in tiles of 8 x 128 words."""
    itemsize = jnp.dtype(dtype).itemsize
    if len(shape) < 2:
        return math.prod(shape) * itemsize
    rows = -(-shape[-2] // (SUBLANES if shape[-2] > 1 else 1)) * (SUBLANES if shape[-2] > 1 else 1)
    return math.prod(shape[:-2]) * rows * -(-shape[-1] // LANES) * LANES * itemsize


def _block_bytes(block: Any) -> int:
    """Return the bytes of VMEM that a block takes: none in scalar memory or where the kernel copies by itself."""
    if any(place in str(block.transformed_block_aval) for place in ("any", "smem", "sem")):
        return 0
    shape = tuple(getattr(n, "block_size", n) for n in block.block_shape)
    return _padded_bytes(tuple(n for n in shape if isinstance(n, int)), block.array_aval.dtype)


def _is_table(block: Any) -> bool:
    """Say whether the kernel copies by itself from or to an operand, which stays in HBM."""
    return "any" in str(block.transformed_block_aval)


def _row_bytes(blocks: Any) -> int:
    """Return the bytes of a row of the table that a kernel copies rows from."""
    tables = [x.array_aval for x in blocks if _is_table(x)]
    return _padded_bytes(tables[0].shape[1:], tables[0].dtype) if tables else 0


def _last_axis(index_map: Any, n_axes: int) -> tuple[int, bool]:
    """Return the innermost grid axis that a block's place depends on, -1 for none, and whether through a span."""
    axes, refs = index_map.invars[:n_axes], set(index_map.invars[n_axes:])
    needed = {v for v in index_map.outvars if not hasattr(v, "val")}
    through_span = False
    for eqn in reversed(index_map.eqns):
        if needed & set(eqn.outvars):
            used = {v for v in eqn.invars if not hasattr(v, "val")}
            through_span |= bool(used & refs)
            needed |= used - refs
    return max((i for i, v in enumerate(axes) if v in needed), default=-1), through_span


@dataclasses.dataclass(frozen=True)
class _Body:
    """Counts a kernel's code, the mean of a step of its grid.

    Attributes:
        grid: Steps of each axis.
        share: Of the steps whose tile is in the span.
        trips: Of a loop whose length only the device knows: tiles of a span.
    """

    grid: tuple[int, ...]
    share: float
    trips: int

    def walk(self, jaxpr: Any, made_by: dict[Any, Any], weight: float) -> np.ndarray:
        """Return operations of products, operations of vectors, and copies."""
        total = np.zeros(3)
        made_by = dict(made_by)
        for eqn in jaxpr.eqns:
            made_by |= dict.fromkeys(eqn.outvars, eqn)
            name, inner = eqn.primitive.name, _inner(eqn)
            if name == "cond":
                taken = weight * self._share_of(eqn.invars[0], made_by)
                otherwise, then = inner  # every branch of these kernels is a yes or no
                total += self.walk(then, made_by, taken)
                total += self.walk(otherwise, made_by, weight - taken)
            elif inner:
                times = {"scan": eqn.params.get("length", 1), "while": self.trips}.get(name, 1)
                total += sum(self.walk(x, {}, weight * times) for x in inner)
            elif name == "dot_general":
                total[0] += weight * _product_ops(eqn)
            elif name == "dma_start":
                total[2] += weight
            elif name not in FREE:
                total[1] += weight * _elements(eqn)
        return total

    def _share_of(self, predicate: Any, made_by: dict[Any, Any]) -> float:
        """Return how often a branch is taken: at one place of an axis, or at the steps of the span."""
        share, waiting = 1.0, [predicate]
        while waiting:
            eqn = None if hasattr(waiting[-1], "val") else made_by.get(waiting[-1])
            waiting.pop()
            if eqn is None:
                continue
            if eqn.primitive.name == "eq":
                axes = self._axes(eqn, made_by)
                share *= 1 / math.prod(self.grid[axis] for axis in axes)
            elif eqn.primitive.name == "get":
                share = min(share, self.share)
            else:
                waiting += eqn.invars
        return share

    def _axes(self, eqn: Any, made_by: dict[Any, Any]) -> set[int]:
        """Return the grid axes that an operation's inputs are places of."""
        found: set[int] = set()
        waiting = list(eqn.invars)
        while waiting:
            source = waiting.pop()
            maker = None if hasattr(source, "val") else made_by.get(source)
            if maker is not None and maker.primitive.name == "program_id":
                found.add(maker.params["axis"])
            elif maker is not None:
                waiting += maker.invars
        return found


def _product_ops(eqn: Any) -> float:
    """Return twice the multiplications of a matrix product."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * summed


def _elements(eqn: Any) -> float:
    """Return the elements that an operation works on: of its result, or of what it reduces; scalars are free."""
    shapes = [getattr(v.aval, "shape", ()) for v in (*eqn.outvars, *eqn.invars)]
    return float(max((math.prod(s) for s in shapes if s), default=0))
