"""Read a compiled program's text: computations, instructions, sizes in device memory, source lines, loop counts."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

DTYPE_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
# Results that are other names of their operands' memory.
ALIASES = frozenset(
    {"bitcast", "tuple", "get-tuple-element", "opt-barrier", "while", "conditional", "parameter"}
)
# They run other computations once, the last two beside what follows: on SparseCores, such as tpu7x's collectives.
CALLS = frozenset({"call", "conditional", "async-start", "call-start"})
CALLERS = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)"
)
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: Unique in the program.
        opcode: Such as "fusion" or "all-gather-start".
        shape: Text of the result's type.
        operands: Names of the arguments.
        arguments: Text between the parentheses.
        attributes: The rest of the line.
        is_root: Whether it is the computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def callees(self) -> dict[str, list[str]]:
        """Names of the computations it calls, by the attribute that names them."""
        found: dict[str, list[str]] = {}
        for kind, name in CALLERS.findall(self.attributes):
            found.setdefault(kind, []).append(name)
        for names in BRANCHES.findall(self.attributes):
            found["branches"] = re.findall(r"%([\w.-]+)", names)
        return found

    @property
    def arrays(self) -> list[tuple[str, str, str]]:
        """(dtype, dims, layout) of each array of the result."""
        return ARRAY.findall(self.shape)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the result in device memory, tiles filled up."""
        return sum(array_bytes(*array) for array in self.arrays)


@dataclass
class Program:
    """A compiled program's text, taken apart.

    Attributes:
        computations: Instructions in the order in which they run, by the computation's name.
        entry: Name of the main computation.
        files: File names by number.
        locations: (file number, line) by number.
        frames: (location number, number of the calling frame or 0) by number.
    """

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    files: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)

    def source(self, instruction: Instruction, roots: tuple[str, ...]) -> str:
        """Name the innermost line of this project that an instruction comes from.

        Args:
            instruction: One of the program's.
            roots: Folder names that mark the project's files, such as "/dsv32_jax/".

        Returns:
            "dsv32_jax/mla.py:210", or what the compiler says of it, or "".
        """
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frame = int(match[1]) if match else 0
        while frame in self.frames:
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            path = self.files.get(file, "")
            for root in roots:
                if root in path:
                    return f"{root.strip('/')}/{path.split(root)[-1]}:{line}"
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if match:
            return f"{match[1].split('/')[-1]}:{match[2]}"
        match = re.search(r'op_name="([^"]*)"', instruction.attributes)
        return match[1][-60:] if match else ""

    def trip_count(self, loop: Instruction) -> int:
        """Return how often a `while`'s body runs: its counter starts at 0 and is compared with a constant.

        Args:
            loop: The instruction.

        Returns:
            The count; 1 where the condition is no such comparison.
        """
        condition = self.computations[loop.callees["condition"][0]]
        bounds = [int(i.arguments) for i in condition if _is_whole_number(i)]
        if (
            condition[-1].opcode == "fusion"
        ):  # the comparison may be inside, the bound among its operands
            inner = self.computations[condition[-1].callees["calls"][0]]
            bounds += [int(i.arguments) for i in inner if _is_whole_number(i)]
        return max([*bounds, 1])

    def runs(self) -> Iterator[tuple[Instruction, int]]:
        """List every instruction that is scheduled by itself, with how often it runs.

        Yields:
            (instruction, times); the inside of fusions and reductions is left out.
        """
        yield from self._runs(self.entry, 1)

    def _runs(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[name]:
            yield instruction, times
            callees = instruction.callees
            if instruction.opcode == "while":
                times_inside = times * self.trip_count(instruction)
                yield from self._runs(callees["body"][0], times_inside)
            elif instruction.opcode in CALLS:
                for names in callees.values():
                    for callee in names:
                        yield from self._runs(callee, times)


def parse(text: str) -> Program:
    """Take a program's text apart.

    Args:
        text: `compiled.as_text()`.

    Returns:
        The program.
    """
    program, body, table = Program(), None, ""
    for line in text.splitlines():
        if body is None and line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif body is None and table and re.match(r"\d+ ", line):
            _read_table(program, table, line)
        elif body is None and line.rstrip().endswith("{") and (line[0] in "%E"):
            name = re.match(r"(ENTRY )?%?([\w.-]+)", line)
            assert name is not None
            body = program.computations.setdefault(name[2], [])
            if name[1]:
                program.entry = name[2]
        elif line.startswith("}"):
            body = None
        elif body is not None:
            instruction = _read_instruction(line)
            if instruction is not None:
                body.append(instruction)
    return program


def array_bytes(dtype: str, dims: str, layout: str = "") -> int:
    """Return the bytes of an array in device memory.

    Args:
        dtype: Such as "bf16".
        dims: Such as "8,128".
        layout: Such as "1,0:T(8,128)(2,1)S(1)": minor dimension first, tile, memory space.

    Returns:
        Bytes, the two minor dimensions filled up to whole tiles; 0 in another memory than the device's (S above 0).
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        digits = re.search(r"\d+", dtype)
        if digits is None:
            return 0
        bits = int(digits[0])
    if re.search(r"S\([1-9]\d*\)", layout):
        return 0
    sizes = [int(size.lstrip("<=")) for size in dims.split(",") if size]
    order = [int(i) for i in re.findall(r"\d+", layout.split(":")[0])]
    tile = re.search(r"T\((\d+)(?:,(\d+))?\)", layout)
    if tile and order:
        tiles = [int(size) for size in tile.groups() if size][::-1]
        for axis, size in zip(order, tiles, strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return math.prod(sizes) * bits // 8


def _is_whole_number(instruction: Instruction) -> bool:
    return instruction.opcode == "constant" and instruction.arguments.isdecimal()


def _read_table(program: Program, table: str, line: str) -> None:
    number = int(line.split(" ", 1)[0])
    if table == "FileNames":
        program.files[number] = line.split('"')[1]
    elif table == "FileLocations":
        found = dict(re.findall(r"(\w+)=(\d+)", line))
        program.locations[number] = (int(found.get("file_name_id", 0)), int(found.get("line", 0)))
    elif table == "StackFrames":
        found = dict(re.findall(r"(\w+)=(\d+)", line))
        # Printed one too high, so that 1 means none (libtpu 0.0.48).
        parent = int(found.get("parent_frame_id", 1)) - 1
        program.frames[number] = (int(found.get("file_location_id", 0)), parent)


def _read_instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    operands = tuple(re.findall(r"%([\w.-]+)", rest[opened:closed]))
    return Instruction(
        name=match[2],
        opcode=rest[:opened],
        shape=shape,
        operands=operands,
        arguments=rest[opened + 1 : closed],
        attributes=rest[closed + 1 :],
        is_root=match[1] is not None,
    )


def _closing(text: str, opened: int) -> int:
    """Return where the parenthesis that opens at a place closes."""
    depth = 0
    for place in range(opened, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
