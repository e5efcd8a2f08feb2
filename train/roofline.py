"""How long a step takes at best: products, memory and links, each at its peak rate."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from train import collectives
from train.collectives import Collective
from train.hlo import ALIASES, CALLS, Instruction, Program
from train.topology import Chip

# Reads that touch only a part of their first operand.
SLICES = frozenset({"dynamic-slice", "slice", "gather"})


class Roofline(NamedTuple):
    """Seconds of one step on one device.

    Attributes:
        products_s: Products executed, recomputation included, at the peak of bfloat16.
        memory_s: Bytes that the scheduled instructions read and write, at the peak of device memory.
        links_s: Collectives at the links' rate, one after the other.
    """

    products_s: float
    memory_s: float
    links_s: float

    @property
    def best_s(self) -> float:
        """All three at the same time: no step is faster."""
        return max(self)

    @property
    def serial_s(self) -> float:
        """One after the other: nothing overlaps."""
        return sum(self)


def roofline(
    executed_flops: float,
    memory_bytes: float,
    found: Sequence[Collective],
    devices: Sequence[Any],
    chip: Chip,
) -> Roofline:
    """Divide what a step does by what the device can do.

    Args:
        executed_flops: FLOPs of one device.
        memory_bytes: Bytes of one device.
        found: Its collectives.
        devices: The mesh's devices in order.
        chip: Peak rates.

    Returns:
        The seconds.
    """
    links = sum(
        one.times * collectives.seconds(one.kind, one.bytes, one.group, devices, chip)
        for one in found
    )
    return Roofline(executed_flops / chip.flops, memory_bytes / chip.hbm_bytes_per_s, links)


def mfu(model_flops: float, seconds: float, chip: Chip) -> float:
    """Return the share of peak that the model's own FLOPs make: model_flops / (seconds x peak), of one device."""
    return model_flops / (seconds * chip.flops)


def memory_traffic(program: Program) -> Iterator[tuple[Instruction, int, int]]:
    """List what every scheduled instruction reads from and writes to device memory in one step.

    A fusion counts its operands and result once; of an operand that it only slices or gathers from, and of a result
    that it only updates in place, the part. What lies in on-chip memory is free, so this is no lower bound of an ideal
    program but what this one moves, if each instruction moves each byte once.

    Args:
        program: The scheduled program.

    Yields:
        (instruction, bytes on one device in one step, how often it runs).
    """
    sizes = {i.name: i.hbm_bytes for c in program.computations.values() for i in c}
    for instruction, times in program.runs():
        yield instruction, times * _moved(program, instruction, sizes), times


def _moved(program: Program, instruction: Instruction, sizes: dict[str, int]) -> int:
    opcode = instruction.opcode
    if opcode in ALIASES or opcode in CALLS or opcode.endswith(("-done", "-update")):
        return 0
    result = instruction.hbm_bytes
    if opcode.endswith("-start"):
        return result  # the result's tuple holds the operands too
    if opcode == "fusion":
        inner = program.computations[instruction.callees["calls"][0]]
        return _fusion_result(inner, result) + sum(
            _fusion_operand(inner, place, sizes[name])
            for place, name in enumerate(instruction.operands)
            if name in sizes
        )
    if opcode in SLICES:
        return 2 * result
    if opcode == "dynamic-update-slice":
        return 2 * sizes.get(instruction.operands[1], 0)
    return result + sum(sizes.get(name, 0) for name in instruction.operands)


def _fusion_operand(inner: list[Instruction], place: int, size: int) -> int:
    """Return how much of a fusion's operand it reads."""
    names = {i.name for i in inner if i.opcode == "parameter" and i.arguments == str(place)}
    read = 0
    for instruction in inner:
        if not names & set(instruction.operands):
            continue
        if instruction.opcode == "bitcast":
            names.add(instruction.name)
        elif instruction.opcode in SLICES and instruction.operands[0] in names:
            read += instruction.hbm_bytes
        elif instruction.opcode == "dynamic-update-slice" and instruction.operands[0] in names:
            pass  # written in place; the part is counted with the result
        else:
            return size
    return min(read, size)


def _fusion_result(inner: list[Instruction], size: int) -> int:
    """Return how much of a fusion's result it writes: of an update in place the part."""
    by_name = {instruction.name: instruction for instruction in inner}
    root = next((instruction for instruction in inner if instruction.is_root), inner[-1])
    while root.opcode == "bitcast" and root.operands[0] in by_name:
        root = by_name[root.operands[0]]
    if root.opcode == "dynamic-update-slice" and root.operands[1] in by_name:
        return by_name[root.operands[1]].hbm_bytes or _unplaced(by_name[root.operands[1]])
    return size


def _unplaced(instruction: Instruction) -> int:
    """Return the bytes of a result wherever it lies."""
    return instruction._replace(shape=re.sub(r"\{[^}]*\}", "", instruction.shape)).hbm_bytes
