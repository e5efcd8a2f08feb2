"""Say what bounds each TPU kernel, by counting, without a TPU: `python benchmarks/tpu_roofline.py --help`."""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tpu_counts import LANES, SUBLANES, Counts, count

from pallas_kernels.dense_mla import pallas_tpu as dense
from pallas_kernels.grouped_matmul import pallas_tpu as grouped
from pallas_kernels.indexer_kl import pallas_tpu_listed as listed_kl
from pallas_kernels.indexer_kl import pallas_tpu_score_gradients as score_gradients
from pallas_kernels.indexer_kl import pallas_tpu_target as target
from pallas_kernels.indexer_scores import pallas_tpu as scores
from pallas_kernels.paged_indexer import pallas_tpu as paged_indexer
from pallas_kernels.paged_mla import layout
from pallas_kernels.paged_mla import pallas_tpu as paged
from pallas_kernels.sparse_mla import pallas_tpu as sparse
from pallas_kernels.sparse_mla import pallas_tpu_backward as sparse_backward
from pallas_kernels.topk_select import pallas_tpu as topk

VALU_SLOTS, EUP_SLOTS = (
    4,
    1,
)  # vector operations, and transcendentals, of a bundle; the compiler's own figures
HEADS, INDEX_HEADS, INDEX_DIM, SLOTS, SCALE = 128, 64, 128, 2048, 576**-0.5
DECODING, PAGE = 128, 64  # queries, one of each sequence; tokens of a page
EXPERTS = (256, 8)  # of which each token takes 8; a device holds 16
LOCAL_EXPERTS, HIDDEN, INNER = 16, 7168, 2048
MAX_CROSSOVER = topk.MAX_KEYS


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
class Case:
    """Kernels of one op at one length; `xla_bytes` are moved by XLA around them, the rest is `count`'s."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    kernels: tuple[str, ...]
    causal: bool = True
    xla_bytes: float = 0.0
    dynamic: int = 1
    copied_rows: int = 1


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


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return an argument's shape and dtype."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def cases(n: int) -> Iterator[Case]:
    """Yield every kernel at the released widths: a prompt of n tokens, and decoding with n tokens in the cache."""
    f32, i32 = (
        functools.partial(shape, dtype=jnp.float32),
        functools.partial(shape, dtype=jnp.int32),
    )
    bounds = i32(n), i32(n)
    heads = shape(n, HEADS, 192), shape(n, HEADS, 192), shape(n, HEADS, 128)
    index = shape(n, INDEX_HEADS, INDEX_DIM), shape(n, INDEX_DIM), f32(n, INDEX_HEADS)
    absorbed = shape(n, HEADS, 576), shape(n, 576)
    lse, idx = f32(n, HEADS), i32(n, SLOTS)
    gradient_rows = (
        3 * 4 * n * SLOTS
    )  # float32 rows are read, added to sums that are read and written

    def attend(q: Any, k: Any, v: Any, start: Any, end: Any, mask: Any = None) -> Any:
        options = {"scale": SCALE, "start": start, "end": end, "selected": mask}
        return dense.dense_mla(q, k, v, **options)

    def attend_backward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *rest), q, k, v)
        return pull(out)

    mask = shape(n, n, dtype=jnp.bool_)
    gradients = ("dense_mla_query_gradient", "dense_mla_key_gradient")
    for name, more in (("dense_mla", ()), ("dense_mla masked", (mask,))):
        arguments = (*heads, *bounds, *more)
        yield Case(
            name=f"{name} forward", run=attend, shapes=arguments, kernels=("dense_mla_forward",)
        )
        yield Case(
            name=f"{name} backward", run=attend_backward, shapes=arguments, kernels=gradients
        )
    for form, select in (("mask", topk.indexer_topk_mask), ("list", topk.indexer_topk)):
        yield Case(
            name=f"indexer_topk {form}",
            run=lambda q, k, w, start, end, select=select: select(
                q, k, w, k=SLOTS, start=start, end=end
            ),
            shapes=(*index, *bounds),
            kernels=(f"topk_{form}",),
        )
    options = {"scale": SCALE, "value_dim": 512}
    yield Case(
        name="sparse_mla forward",
        run=functools.partial(sparse.forward, **options),
        shapes=(*absorbed, idx),
        kernels=("sparse_mla_forward",),
    )
    yield Case(
        name="sparse_mla backward",
        run=functools.partial(sparse_backward.backward, **options),
        shapes=(*absorbed, idx, shape(n, HEADS, 512), lse, shape(n, HEADS, 512), lse),
        kernels=("sparse_mla_backward",),
        xla_bytes=gradient_rows * 640,
    )
    # The mask or the scores of a long prompt are for blocks of queries: the kernels of the loss take 4096 at a time.
    rows = min(n, 4096)
    block = tuple(shape(rows, *x.shape[1:], dtype=x.dtype) for x in (index[0], index[2]))
    ends = i32(rows), i32(rows)
    last = rows == n  # of a longer prompt the last block, which reads nearly all keys
    yield Case(
        name="indexer_scores",
        run=scores.scores,
        shapes=(block[0], index[1], block[1], *ends),
        kernels=("indexer_scores",),
        causal=last,
    )
    yield Case(
        name="indexer_scores gradients",
        run=score_gradients.score_gradients,
        shapes=(block[0], index[1], block[1], f32(rows, n), *ends),
        kernels=("indexer_query_gradient", "indexer_key_gradient"),
        causal=last,
    )
    yield Case(
        name="indexer_kl target",
        run=functools.partial(target.attention_target, scale=SCALE),
        shapes=(shape(rows, HEADS, 192), heads[1], f32(rows, HEADS), *ends),
        kernels=("attention_target",),
        causal=last,
    )
    arguments = (*index, *absorbed, lse, idx)

    def listed_gradients(*arguments: Any) -> Any:
        kl, residuals = listed_kl.kl_rows(*arguments, scale=SCALE)
        return listed_kl.gradients(residuals, kl)

    yield Case(
        name="sparse_indexer_kl",
        run=functools.partial(listed_kl.kl_rows, scale=SCALE),
        shapes=arguments,
        kernels=("listed_kl",),
    )
    yield Case(
        name="sparse_indexer_kl gradients",
        run=listed_gradients,
        shapes=arguments,
        kernels=("listed_kl_gradient",),
        xla_bytes=gradient_rows * INDEX_DIM,
    )
    # Rows that reach a device; a tile that two experts share is worked on twice.
    sent = n * EXPERTS[1] * LOCAL_EXPERTS // EXPERTS[0]
    tiles = -(-sent // grouped.MAX_TILE_ROWS) + LOCAL_EXPERTS - 1
    yield Case(
        name="grouped_matmul forward",
        run=grouped.multiply_rows,
        shapes=(shape(sent, HIDDEN), shape(LOCAL_EXPERTS, HIDDEN, INNER), i32(LOCAL_EXPERTS)),
        kernels=("kernel",),
        causal=False,
        dynamic=tiles,
    )
    yield Case(
        name="grouped_matmul dw",
        run=grouped.weight_gradient,
        shapes=(shape(sent, HIDDEN), shape(sent, INNER), i32(LOCAL_EXPERTS)),
        kernels=("kernel",),
        causal=False,
        dynamic=tiles,
    )
    yield Case(
        name=f"paged_indexer_topk, {DECODING} queries",
        run=lambda q, keys, w, table, end: paged_indexer.paged_indexer_topk(
            q, keys, w, table, k=SLOTS, page_size=PAGE, end=end
        ),
        shapes=(
            shape(DECODING, 1, INDEX_HEADS, INDEX_DIM),
            shape(DECODING * n, INDEX_DIM),
            f32(DECODING, 1, INDEX_HEADS),
            i32(DECODING, n // PAGE),
            i32(DECODING, 1),
        ),
        kernels=("paged_topk",),
        causal=False,
        copied_rows=PAGE,
    )
    for name, quantised in (("paged_mla", False), ("paged_mla FP8", True)):
        row = layout.Format(512, 64, "bfloat16", quantised)
        cache = layout.Records(i32(DECODING * n * row.lines, LANES), row)
        yield Case(
            name=f"{name}, {DECODING} queries",
            run=functools.partial(paged.paged_mla, scale=SCALE),
            shapes=(shape(DECODING, HEADS, 576), cache, i32(DECODING, SLOTS)),
            kernels=("paged_mla",),
            causal=False,
            copied_rows=row.lines,
        )


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
    low, high = 0, MAX_CROSSOVER // 1024
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
    if min(lengths) < LANES or any(n % LANES for n in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} must be multiples of {LANES}, as 4096,32768")
    return lengths


def main() -> None:
    """Print the table and the crossovers, and write them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/tpu_roofline.py --lengths 4096,32768 --json roofline.json",
    )
    parser.add_argument("--lengths", type=lengths_of, default=[4096, 32768, 131072])
    parser.add_argument("--no-crossover", action="store_true", help="skip the search of lengths")
    parser.add_argument("--json", type=Path, help="also write the results here")
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
        try:
            args.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise SystemExit(f"error: {args.json} cannot be written: {error.strerror}") from error
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
