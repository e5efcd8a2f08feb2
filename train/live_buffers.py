"""What is alive in device memory when a compiled program needs most: its schedule is walked, buffer by buffer."""

from typing import NamedTuple

from train.hlo import ALIASES, Instruction, Program

Buffers = frozenset[int]  # places in the list of instructions that made them


class Live(NamedTuple):
    """The most that is alive at once.

    Attributes:
        bytes: Their sum, without the program's arguments.
        makers: (instruction, bytes) of each buffer, largest first.
    """

    bytes: int
    makers: list[tuple[Instruction, int]]


def at_peak(program: Program) -> Live:
    """Find the moment at which most temporary memory is needed.

    The compiler's own assignment is not in the text; this frees each buffer after its last user and takes loops' states
    and in-place updates as one buffer each, which comes near the compiler's figure and names who is to blame.

    Args:
        program: The scheduled program.

    Returns:
        The buffers alive then.
    """
    return _peak(program, program.entry, {})


def _peak(program: Program, name: str, known: dict[str, Live]) -> Live:
    if name in known:
        return known[name]
    instructions = program.computations[name]
    by_name = {instruction.name: instruction for instruction in instructions}
    refers = _references(program, instructions)
    last_use: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        used = set().union(*(refers[o][-1] for o in instruction.operands if o in refers), {place})
        last_use |= dict.fromkeys(used, place)
    root = next((i for i in instructions if i.is_root), instructions[-1])
    last_use |= dict.fromkeys(refers[root.name][-1], len(instructions))
    alive: dict[int, int] = {}
    total, best = 0, Live(0, [])
    for place, instruction in enumerate(instructions):
        size = 0
        if place in refers[instruction.name][-1]:
            size = _new_bytes(instruction, by_name)
        if size:
            alive[place] = size
            total += size
        inside = _inside(program, instruction, known)
        if total + inside.bytes > best.bytes:
            makers = [(instructions[p], b) for p, b in alive.items()]
            best = Live(total + inside.bytes, makers + inside.makers)
        for buffer in [b for b in alive if last_use[b] <= place]:
            total -= alive.pop(buffer)
    known[name] = Live(best.bytes, sorted(best.makers, key=lambda maker: -maker[1]))
    return known[name]


def _new_bytes(instruction: Instruction, by_name: dict[str, Instruction]) -> int:
    """Return the bytes of a result; the start of an asynchronous operation lists its operands in it again."""
    size = instruction.hbm_bytes
    if instruction.opcode.endswith("-start"):
        size -= sum(by_name[name].hbm_bytes for name in instruction.operands if name in by_name)
    return max(size, 0)


def _inside(program: Program, instruction: Instruction, known: dict[str, Live]) -> Live:
    """Return the most that is alive inside the computations that an instruction runs."""
    if instruction.opcode not in ("while", "call", "conditional"):
        return Live(0, [])
    names = [name for names in instruction.callees.values() for name in names]
    return max((_peak(program, name, known) for name in names), key=lambda live: live.bytes)


def _references(
    program: Program, instructions: list[Instruction]
) -> dict[str, tuple[Buffers, ...]]:
    """Return the buffers of each element of each result, then all of them together."""
    refers: dict[str, tuple[Buffers, ...]] = {}
    for place, instruction in enumerate(instructions):
        operands = [refers.get(name, (frozenset(),)) for name in instruction.operands]
        elements: tuple[Buffers, ...]
        if instruction.opcode == "tuple":
            elements = tuple(operand[-1] for operand in operands)
        elif instruction.opcode == "get-tuple-element":
            index = int(instruction.attributes.split("index=")[1].split(",")[0].split()[0])
            source = operands[0]
            elements = (source[index] if index < len(source) - 1 else source[-1],)
        elif instruction.opcode == "parameter":
            elements = (frozenset(),)
        elif instruction.opcode in ALIASES:
            elements = operands[0][:-1] or (operands[0][-1],)
        elif instruction.opcode.endswith(("-done", "-update")):
            elements = (operands[0][-1],)
        else:
            reused = _updated_in_place(program, instruction)
            known = reused is not None and reused in refers
            elements = (refers[reused][-1] if known and reused else frozenset({place}),)
        refers[instruction.name] = (*elements, frozenset().union(*elements))
    return refers


def _updated_in_place(program: Program, instruction: Instruction) -> str | None:
    """Return the operand whose memory the result takes: that of a dynamic-update-slice, in a fusion or not."""
    if instruction.opcode == "dynamic-update-slice":
        return instruction.operands[0]
    if instruction.opcode != "fusion":
        return None
    inner = program.computations[instruction.callees["calls"][0]]
    by_name = {one.name: one for one in inner}
    at = next((one for one in inner if one.is_root), inner[-1])
    while at.opcode in ("bitcast", "dynamic-update-slice") and at.operands:
        if at.operands[0] not in by_name:
            return None
        at = by_name[at.operands[0]]
    root = next((one for one in inner if one.is_root), inner[-1])
    if at.opcode != "parameter" or root.opcode == "parameter":
        return None
    number = int(at.arguments)
    return instruction.operands[number] if number < len(instruction.operands) else None
