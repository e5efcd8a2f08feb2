"""Say what bounds each TPU kernel, by counting, without a TPU: `python benchmarks/tpu_roofline.py --help`."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
from tpu_cases import Case, cases
from tpu_counts import LANES, SUBLANES, Counts, count

from pallas_kernels.topk_select import pallas_tpu as topk

# Vector operations, and transcendentals, of a bundle; the compiler's own figures.
VALU_SLOTS, EUP_SLOTS = 4, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What jax calls a device: a whole v5p or v6e, half a tpu7x.

    Attributes:
        cores: That share a parallel axis.
        bf16: Operations a second of all cores; Google's published figure.
        hbm: Bytes a second; Google's published figure.
        clock: Cycles a second; the rate that makes `bf16` out of the matrix units, with two rows a cycle of the
            256-wide ones.
        vmem: Bytes of a core.
        copy_bundles: Instructions of the scalar core to start the copy of one row, in the compiler's final schedule
            (libtpu 0.0.48.1).
    """

    cores: int
    bf16: float
    hbm: float
    clock: float
    vmem: int
    copy_bundles: float


CHIPS = {
    "v5p": Chip(cores=2, bf16=459e12, hbm=2765e9, clock=1.75e9, vmem=64 * 2**20, copy_bundles=4.75),
    "v6e": Chip(
        cores=1, bf16=918e12, hbm=1638e9, clock=1.75e9, vmem=128 * 2**20, copy_bundles=7.25
    ),
    "tpu7x": Chip(
        cores=1, bf16=2307e12 / 2, hbm=7380e9 / 2, clock=2.2e9, vmem=64 * 2**20, copy_bundles=4.75
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that each resource is busy, the whole, and the name of what bounds it.

    The scalar core starts copies and then issues the products of another query: the two add up. Everything else runs
    beside each other at best.
    """

    mxu: float
    vpu: float
    eup: float
    hbm: float
    issue: float
    total: float
    bound: str


def counts_of(case: Case) -> Counts:
    """Count a case's kernels together."""
    options = {name: getattr(case, name) for name in ("causal", "dynamic", "copied_rows")}
    found = count(case.run, *case.shapes, **options)
    chosen = [found[name] for name in case.kernels]
    sums = {
        field.name: sum(getattr(x, field.name) for x in chosen)
        for field in dataclasses.fields(Counts)
        if field.name not in ("vmem", "parallel")
    }
    sums["bytes"] += case.xla_bytes
    vmem = max(x.vmem for x in chosen)
    return Counts(**sums, vmem=vmem, parallel=all(x.parallel for x in chosen))


def times_of(counts: Counts, chip: Chip) -> Times:
    """Return how long a chip's resources are busy."""
    cores = chip.cores if counts.parallel else 1
    cycles = cores * chip.clock
    register = LANES * SUBLANES
    units = {
        "mxu": counts.flops / (chip.bf16 * cores / chip.cores),
        "vpu": counts.vector_ops / (register * VALU_SLOTS * cycles),
        "eup": counts.transcendentals / (register * EUP_SLOTS * cycles),
    }
    hbm, issue = counts.bytes / chip.hbm, counts.copies * chip.copy_bundles / cycles
    in_order = issue + max(units.values())
    busy = units | {"issue": issue}
    bound = "hbm" if hbm >= in_order else max(busy, key=lambda name: busy[name])
    return Times(**busy, hbm=hbm, total=max(hbm, in_order), bound=bound)


def forms(n: int, chip: Chip, backward: bool) -> tuple[float, float]:
    """Return the seconds of masked and of gathered attention of a prompt, selection included."""
    by_name = {case.name: case for case in cases(n)}
    names = (
        ("indexer_topk mask", "dense_mla masked forward", "dense_mla masked backward"),
        ("indexer_topk list", "sparse_mla forward", "sparse_mla backward"),
    )
    masked, gathered = (
        sum(times_of(counts_of(by_name[x]), chip).total for x in form[: 3 if backward else 2])
        for form in names
    )
    return masked, gathered


def crossover(chip: Chip, backward: bool) -> int:
    """Return the least multiple of 1024 tokens at which gathered attention is no slower than masked."""
    low, high = 0, topk.MAX_KEYS // 1024
    while high - low > 1:
        middle = (low + high) // 2
        masked, gathered = forms(middle * 1024, chip, backward)
        low, high = (low, middle) if gathered <= masked else (middle, high)
    return high * 1024


def digits(value: float) -> str:
    """Format a number with three digits or, of a larger one, all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(name: str, n: int, counts: Counts, times: dict[str, Times]) -> str:
    """Format a line of the table, times in milliseconds."""
    cells = [name, f"{n:,}", digits(counts.flops / 1e12), digits(counts.bytes / 1e9)]
    cells.append(f"{counts.vmem / 2**20:.0f}")
    cells += [f"{digits(1e3 * t.total)} {t.bound}" for t in times.values()]
    return "| " + " | ".join(cells) + " |"


def lengths_of(text: str) -> list[int]:
    """Read a command line's lengths."""
    try:
        lengths = [int(x) for x in text.split(",")]
    except ValueError:
        lengths = [0]
    if not all(LANES <= n <= topk.MAX_KEYS and n % LANES == 0 for n in lengths):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be multiples of {LANES} up to {topk.MAX_KEYS}, as 4096,32768"
        )
    return lengths


def writable(text: str) -> Path:
    """Open a file to write in, before minutes are spent on what goes there."""
    try:
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return Path(text)


def main() -> None:
    """Print the table and the crossovers, and write them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/tpu_roofline.py --lengths 4096,32768 --json roofline.json",
    )
    parser.add_argument("--lengths", type=lengths_of, default=[4096, 32768, 131072])
    parser.add_argument("--no-crossover", action="store_true", help="skip the search of lengths")
    parser.add_argument("--json", type=writable, help="also write the results here")
    args = parser.parse_args()
    print("| kernel | tokens | TFLOP | GB | VMEM, MiB | " + " | ".join(CHIPS) + " |")
    print("| --- " * (5 + len(CHIPS)) + "|", flush=True)
    results = []
    for n in args.lengths:
        for case in cases(n):
            counts = counts_of(case)
            times = {name: times_of(counts, chip) for name, chip in CHIPS.items()}
            print(row(case.name, n, counts, times), flush=True)
            on_chips = {name: dataclasses.asdict(t) for name, t in times.items()}
            head = {"kernel": case.name, "tokens": n}
            results.append(head | dataclasses.asdict(counts) | {"seconds": on_chips})
    crossings = {}
    if not args.no_crossover:
        for name, chip in CHIPS.items():
            crossings[name] = [crossover(chip, backward) for backward in (False, True)]
            forward, both = crossings[name]
            print(
                f"{name}: gathered passes masked at {forward:,} tokens forward, {both:,} both ways"
            )
    if args.json:
        head = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
        head["chips"] = {name: dataclasses.asdict(chip) for name, chip in CHIPS.items()}
        content = head | {"results": results, "crossover": crossings}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
