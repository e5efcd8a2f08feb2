"""The collectives of a compiled program: bytes, devices, how often, and the time that the links need for them."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from train.hlo import Instruction, Program, array_bytes
from train.topology import Chip

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective of the program.

    Attributes:
        kind: One of KINDS.
        bytes: Of the whole array on one device: an all-gather's result, the input of the others.
        times: How often it runs in a step.
        group: Places in the mesh of the devices that work together, one group of them all.
        instruction: Where it stands.
        shape: Text of the array's type.
    """

    kind: str
    bytes: int
    times: int
    group: tuple[int, ...]
    instruction: Instruction
    shape: str


def find(program: Program) -> list[Collective]:
    """List the collectives of a program, those in fusions too.

    Args:
        program: The program.

    Returns:
        The collectives in order.
    """
    found = []
    for instruction, times in program.runs():
        for inner in _collectives_of(program, instruction):
            kind = inner.opcode.removesuffix("-start")
            callee = (instruction.callees.get("calls") or [""])[0]
            if kind == "all-reduce" and callee.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            size, shape = _array(inner, kind)
            found.append(Collective(kind, size, times, group_of(inner.attributes), inner, shape))
    return found


def _collectives_of(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    if instruction.opcode.removesuffix("-start") in KINDS:
        yield instruction
    elif instruction.opcode == "fusion":
        for name in instruction.callees.get("calls", []):
            for inner in program.computations[name]:
                yield from _collectives_of(program, inner)


def _array(instruction: Instruction, kind: str) -> tuple[int, str]:
    """Return bytes and type of the array; the start of an asynchronous one lists operands and results."""
    sizes = [(_bytes(*found), f"{found[0]}[{found[1]}]") for found in instruction.arrays]
    if instruction.opcode.endswith("-start") or kind in ("all-gather", "collective-permute"):
        return max(sizes, default=(0, ""))
    total = sum(size for size, _ in sizes)
    if instruction.opcode == "reduce-scatter":
        total *= len(group_of(instruction.attributes))
    return total, max(sizes, default=(0, ""))[1]


def _bytes(dtype: str, dims: str, layout: str) -> int:
    del layout  # what travels is not padded, and may come from another memory
    return array_bytes(dtype, dims)


def group_of(attributes: str) -> tuple[int, ...]:
    """Read one group of devices off a collective.

    Args:
        attributes: Text with replica_groups in one of its three forms ({{0,1},{2,3}}, [2,2]<=[4]T(0), or
            mesh['a'=2,'b'=4] {'b'}), or source_target_pairs.

    Returns:
        Places of the first group; of a permutation the pair furthest apart; () where none is named.
    """
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
    if pairs:
        found = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
        return max(((int(a), int(b)) for a, b in found), key=lambda pair: abs(pair[0] - pair[1]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(map(int, listed[1].split(",")))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        sizes = [int(size) for size in iota[3].split(",")]
        order = [int(i) for i in iota[4].split(",")] if iota[4] else list(range(len(sizes)))
        return _first_group(sizes, order, int(iota[2]))
    axes = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? ?\{([^}]*)\}", attributes
    )
    if axes:
        return _along_axes(axes[1], axes[2])
    return ()


def _first_group(sizes: list[int], order: list[int], n: int) -> tuple[int, ...]:
    """Return the first n entries of arange(prod(sizes)).reshape(sizes).transpose(order)."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    places = itertools.product(*(range(sizes[axis]) for axis in order))
    moved = [strides[axis] for axis in order]
    first = itertools.islice(places, n)
    return tuple(sum(i * s for i, s in zip(place, moved, strict=True)) for place in first)


def _along_axes(mesh: str, axes: str) -> tuple[int, ...]:
    """Return the group at the mesh's origin; an axis written 'a':(2)4 is the part of 4 after a part of 2."""
    named = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)]
    names, sizes = [name for name, _ in named], [size for _, size in named]
    steps = []
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        axis = names.index(name)
        size = int(part or sizes[axis])
        after = sizes[axis] // (int(before or 1) * size)
        stride = math.prod(sizes[axis + 1 :]) * after
        steps.append([i * stride for i in range(size)])
    return tuple(sum(step) for step in itertools.product(*steps))


def seconds(
    kind: str, size: int, group: tuple[int, ...], devices: Sequence[Any], chip: Chip
) -> float:
    """Estimate what the links need for one collective, all of them busy and nothing else on them.

    Within a slice an array of `size` bytes passes at 2 x (dimensions of the torus that the group spans) x one link's
    rate: (n - 1)/n of it in an all-gather or reduce-scatter, twice that in an all-reduce; an all-to-all's messages
    travel a quarter of the ring on average. Between slices each device brings its share over the data-centre network.

    Args:
        kind: One of KINDS.
        size: Bytes, as in `Collective`.
        group: Places of the devices that work together.
        devices: The mesh's devices in order.
        chip: Rates.

    Returns:
        Seconds.
    """
    members = [devices[place] for place in group]
    n = len(members)
    if n < 2:
        return 0.0
    slices = len({getattr(member, "slice_index", 0) or 0 for member in members})
    sides = [
        len(set(column)) for column in zip(*(member.coords for member in members), strict=True)
    ]
    spanned = sum(side > 1 for side in sides) or 1
    passes = 2.0 if kind == "all-reduce" else 1.0
    if kind == "collective-permute":
        rate = chip.dcn_bytes_per_s if slices > 1 else chip.link_bytes_per_s
        return size / rate
    within, total = n // slices, 0.0
    if within > 1:
        share = (within - 1) / within * (max(sides) / 4 if kind.endswith("all-to-all") else 1)
        total += passes * size * share / (2 * spanned * chip.link_bytes_per_s)
    if slices > 1:
        total += passes * size * (slices - 1) / slices / (within * chip.dcn_bytes_per_s)
    return total
