"""What a compiled step needs on a pod, as plain figures and as the text that a person reads."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from train import collectives, hlo, live_buffers, roofline
from train.hlo import Program
from train.pod_steps import GRPO, SERVING, PodStep
from train.roofline import Roofline
from train.topology import GIB, Topology

SOURCES = ("/dsv32_jax/", "/pallas_kernels/", "/train/")
N_LINES = 8  # of buffers and of collectives that are listed
MARGIN = 0.10  # share of memory to leave to the runtime and to what the compiler does not plan


@dataclass(frozen=True, kw_only=True)
class Line:
    """Buffers, or collectives, of one source line.

    Attributes:
        source: File and line.
        bytes: Of them all; of collectives in one step.
        what: Type, or kind and type.
        count: How many; of collectives how often they run.
    """

    source: str
    bytes: int
    what: str
    count: int


@dataclass(kw_only=True)
class StepReport:
    """One step on one topology. Bytes, FLOPs and seconds are of one device.

    Attributes:
        step: Its name.
        topology: Where.
        mesh: Sizes of the axes above 1.
        status: "fits", "tight" (less than MARGIN free), "does not fit", or "not compiled".
        limit_bytes: Device memory that the compiler gives a program.
        arguments_bytes: Parameters, optimizer state, batch.
        gradient_bytes: Of what trains, twice where microbatches are added up.
        peak_bytes: Most that is alive at once, arguments included; where it does not fit, what the compiler asks for.
        tokens: Of a step, over all devices.
        model_flops: What the mathematics asks for.
        executed_flops: Products that the program has, recomputation included.
        memory_bytes: Read and written in device memory.
        top_memory: The same by source line, most first.
        lower_s: Tracing and lowering.
        compile_s: Compiling.
        cpu_s: Processor time of both.
        rss_bytes: Largest memory of the compiling process.
        times: The roofline.
        collectives: By kind: how many in the text, how often they run, bytes.
        top_collectives: By source line, most bytes first.
        live: By source line, what is alive at the peak.
        live_bytes: Sum that the walk of the schedule finds, to compare with peak - arguments.
        findings: What should not be: buffers of T x S, gathers of whole stacks.
        message: What the compiler says where it fails.
    """

    step: str
    topology: str
    mesh: dict[str, int]
    status: str = "not compiled"
    limit_bytes: float = 0.0
    arguments_bytes: int = 0
    gradient_bytes: float = 0.0
    peak_bytes: int = 0
    tokens: int = 0
    model_flops: float = 0.0
    executed_flops: float = 0.0
    memory_bytes: float = 0.0
    top_memory: list[Line] = field(default_factory=list)
    lower_s: float = 0.0
    compile_s: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    times: Roofline | None = None
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    top_collectives: list[Line] = field(default_factory=list)
    live: list[Line] = field(default_factory=list)
    live_bytes: int = 0
    findings: list[str] = field(default_factory=list)
    message: str = ""

    @property
    def free(self) -> float:
        """Share of the limit that is left; negative where it does not fit."""
        return 1 - self.peak_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = asdict(self)
        values["times"] = None if self.times is None else self.times._asdict()
        return values


def read_compiled(
    report: StepReport, compiled: Any, topology: Topology, mesh: Any, step: PodStep
) -> None:
    """Fill a report in from a compiled step.

    Args:
        report: The report, with `model_flops` and `executed_flops`.
        compiled: jax.stages.Compiled.
        topology: What it was compiled for.
        mesh: Its mesh.
        step: The step.
    """
    memory = compiled.memory_analysis()
    report.arguments_bytes = memory.argument_size_in_bytes
    report.peak_bytes = memory.peak_memory_in_bytes
    report.status = (
        "does not fit" if report.free < 0 else "tight" if report.free < MARGIN else "fits"
    )
    read_program(report, hlo.parse(compiled.as_text()), topology, mesh, step)


def read_program(
    report: StepReport, program: Program, topology: Topology, mesh: Any, step: PodStep
) -> None:
    """Fill in what the program's text tells: collectives, live buffers, the roofline and findings.

    Args:
        report: The report, with `executed_flops`.
        program: The compiled program.
        topology: What it was compiled for.
        mesh: Its mesh.
        step: The step.
    """
    devices = list(mesh.devices.flat)
    found = collectives.find(program)
    report.collectives = by_kind(found)
    report.top_collectives = _lines(
        [(program.source(c.instruction, SOURCES), c.bytes * c.times, f"{c.kind} {c.shape}", c.times)
         for c in found],
        by_kind=True,
    )  # fmt: skip
    live = live_buffers.at_peak(program)
    report.live_bytes = live.bytes
    report.live = _lines(
        [(program.source(i, SOURCES), b, i.shape.split("{")[0], 1) for i, b in live.makers]
    )
    moved = list(roofline.memory_traffic(program))
    report.memory_bytes = float(sum(size for _, size, _ in moved))
    report.top_memory = _lines(
        [(program.source(i, SOURCES), size, f"{i.opcode} {i.shape.split('{')[0]}", times)
         for i, size, times in moved if size]
    )  # fmt: skip
    report.times = roofline.roofline(
        report.executed_flops, report.memory_bytes, found, devices, topology.chip
    )
    n_queries = step.seq_len // mesh.shape["context"]
    report.findings = square_buffers(program, step.seq_len, n_queries)
    report.findings += stack_gathers(found, step.n_stacked)


def by_kind(found: Sequence[collectives.Collective]) -> dict[str, dict[str, int]]:
    """Add collectives up by kind.

    Args:
        found: The collectives.

    Returns:
        For each kind "count" in the text, "runs" and "bytes" in a step.
    """
    table: dict[str, dict[str, int]] = {}
    for one in found:
        row = table.setdefault(one.kind, {"count": 0, "runs": 0, "bytes": 0})
        row["count"] += 1
        row["runs"] += one.times
        row["bytes"] += one.times * one.bytes
    return table


def square_buffers(program: Program, n_keys: int, n_queries: int) -> list[str]:
    """Find arrays in device memory that have a row of all keys for every query of the device.

    Args:
        program: The program.
        n_keys: S, keys of a row.
        n_queries: T, queries of a row on one device.

    Returns:
        A line for each source line that makes one.
    """
    found: dict[str, str] = {}
    for instruction, _ in program.runs():
        for dtype, dims, layout in instruction.arrays:
            sizes = [int(size) for size in re.findall(r"\d+", dims)]
            if n_keys not in sizes or not hlo.array_bytes(dtype, dims, layout):
                continue
            # Keys come last; queries before them may be cut into blocks, neighbours that multiply to T.
            last = len(sizes) - 1 - sizes[::-1].index(n_keys)
            runs = itertools.combinations(range(last + 1), 2)
            if any(math.prod(sizes[a:b]) == n_queries for a, b in runs):
                source = program.source(instruction, SOURCES)
                found.setdefault(source, f"a buffer of T x S, {dtype}[{dims}], at {source}")
    return list(found.values())


def stack_gathers(found: Sequence[collectives.Collective], n_stacked: int) -> list[str]:
    """Find gathers of a weight of all layers at once.

    Args:
        found: The collectives.
        n_stacked: Layers along the first axis of a stacked weight.

    Returns:
        A line for each.
    """
    whole = [
        one
        for one in found
        if one.kind == "all-gather" and re.search(rf"\[{n_stacked},\d+,\d+", one.shape)
    ]
    return [f"a gather of all layers at once, {one.shape}" for one in whole if n_stacked > 1]


def _lines(parts: list[tuple[str, int, str, int]], *, by_kind: bool = False) -> list[Line]:
    """Add up by source line, and by the first word of the type, keep the largest; the largest part names the type."""
    grouped: dict[tuple[str, str], list[tuple[str, int, str, int]]] = {}
    for part in parts:
        kind = part[2].split(" ")[0] if by_kind else ""
        grouped.setdefault((part[0], kind), []).append(part)
    lines = [
        Line(
            source=source,
            bytes=sum(part[1] for part in group),
            what=max(group, key=lambda part: part[1])[2],
            count=sum(part[3] for part in group),
        )
        for (source, _), group in grouped.items()
    ]
    return sorted(lines, key=lambda line: -line.bytes)[:N_LINES]


def bytes_asked_for(message: str) -> int:
    """Read off the compiler's refusal how much memory it asked for; 0 where it does not say.

    Args:
        message: Such as "... the total memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G)".

    Returns:
        Bytes.
    """
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    return round(float(found[1]) * 2.0 ** (10 * (1 + "KMGT".index(found[2])))) if found else 0


def smallest_pod(report: StepReport, topology: Topology, smaller: Sequence[Topology]) -> str:
    """Estimate the fewest chips on which the step leaves MARGIN free.

    Arguments and gradients are spread over fewer devices, and the rest stays, as the tokens that a device works on at
    once do (more microbatches, or a smaller batch). An estimate: compile it there to be sure.

    Args:
        report: Of a step that compiled.
        topology: Where.
        smaller: Smaller slices, large to small.

    Returns:
        The topology's name; "" where not even this one leaves the margin.
    """
    spread = report.arguments_bytes + report.gradient_bytes
    rest = max(report.peak_bytes - spread, 0)
    best = str(topology) if report.free >= MARGIN else ""
    for one in smaller:
        if spread * topology.n_devices / one.n_devices + rest > (1 - MARGIN) * report.limit_bytes:
            break
        best = str(one)
    return best


def text(report: StepReport, topology: Topology, smallest: str) -> str:
    """Write a report for a person.

    Args:
        report: The report.
        topology: Where.
        smallest: From `smallest_pod`.

    Returns:
        Lines.
    """
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    lines = [
        f"{report.step} on {report.topology} ({topology.n_devices} devices; {mesh}): {report.status}",
        f"  memory       {_gib(report.peak_bytes)} of {_gib(report.limit_bytes)} at the peak, {report.free:.0%} free; "
        f"{_gib(report.arguments_bytes)} of it arguments",
    ]
    if report.message:
        lines.append(f"  compiler     {report.message}")
    if report.times is not None:
        lines += _time_lines(report, topology)
    for kind, row in sorted(report.collectives.items(), key=lambda item: -item[1]["bytes"]):
        lines.append(f"  {kind:20} {row['runs']:6} runs {_gib(row['bytes']):>12} a step")
    lines += _table("most on links", report.top_collectives)
    lines += _table("most in memory", report.top_memory)
    lines += _table("alive at the peak" if report.times else "largest values", report.live)
    lines += [f"  finding      {finding}" for finding in report.findings]
    if smallest:
        lines.append(
            f"  smallest pod {smallest} (estimate: arguments and gradients spread, the rest as here)"
        )
    lines += [f"  try          {hint}" for hint in suggestions(report)]
    lines.append(
        f"  compiled in  {report.compile_s:.0f} s after {report.lower_s:.0f} s of lowering, {report.cpu_s:.0f} s of "
        f"processor time, {_gib(report.rss_bytes)}"
    )
    return "\n".join(lines)


def _time_lines(report: StepReport, topology: Topology) -> list[str]:
    times, chip = report.times, topology.chip
    assert times is not None
    best, serial = (
        roofline.mfu(report.model_flops, s, chip) for s in (times.best_s, times.serial_s)
    )
    return [
        f"  FLOPs        {report.model_flops:.3g} asked for, {report.executed_flops:.3g} executed in products",
        f"  time         products {times.products_s:.3g} s, memory {times.memory_s:.3g} s, links {times.links_s:.3g} s",
        f"  step         {times.best_s:.3g} s if all overlaps (MFU {best:.1%}), {times.serial_s:.3g} s if nothing does "
        f"(MFU {serial:.1%}); {report.tokens / times.serial_s / topology.n_chips:.0f} tokens/s/chip then",
    ]


def _table(title: str, rows: list[Line]) -> list[str]:
    return [
        f"  {title if place == 0 else '':18} {_gib(row.bytes):>12}  {row.source}  {row.what}"
        + (f" x{row.count}" if row.count > 1 else "")
        for place, row in enumerate(rows)
    ]


def suggestions(report: StepReport) -> list[str]:
    """Name the settings that would make a step smaller, the likeliest first.

    Args:
        report: The report.

    Returns:
        Lines; none where the step leaves MARGIN free.
    """
    if report.status in ("fits", "not compiled"):
        return []
    hints = []
    if report.arguments_bytes > report.limit_bytes / 2:
        hints.append(
            "more devices: arguments alone take over half of the memory (mesh.ici_fsdp, or @N slices)"
        )
    if report.step in SERVING:
        return [*hints, "--slots or --max-len smaller, or mesh.ici_tensor and ici_expert larger"]
    grpo = report.step == GRPO
    parts = "--grpo-microbatches N" if grpo else f"{report.step}.microbatches=N"
    moments = "" if grpo else f"{report.step}.optimizer.adam.mu_dtype=bfloat16, "
    return [
        *hints,
        f"{parts}, so that a device has one row or less at once",
        "mesh.ici_context=N, so that a device has fewer tokens of each row",
        f"{moments}model.remat=full",
    ]


def _gib(size: int | float) -> str:
    return f"{size / GIB:.2f} GiB"
