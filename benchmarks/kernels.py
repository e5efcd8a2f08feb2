"""Time every kernel against this device's ceilings: `python benchmarks/kernels.py --help`."""

import argparse
import functools
import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import timing
from attention_cases import GROUPS as ATTENTION
from kernel_cases import Case, normal
from selecting_cases import GROUPS as SELECTION

GROUPS = ATTENTION | SELECTION


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of a case; `rate` is operations or bytes a second, `note` says why there is none."""

    kernel: str
    shape: str
    backend: str
    ceiling: str
    seconds: float | None = None
    rate: float | None = None
    fraction: float | None = None
    error: float | None = None
    note: str = ""


def ceilings(rounds: int) -> dict[str, float]:
    """Measure operations and bytes a second of one large product and one large copy, random data."""
    a, b = normal(0, (8192, 8192), (8192, 8192))
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16))
    product8 = jax.jit(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=jnp.bfloat16))
    eight = tuple(x.astype(jnp.float8_e4m3fn) for x in (a, b))
    (big,) = normal(0, (2**29,), dtype=jnp.float32)
    return {
        "bf16 matmul": 2 * 8192**3 / timing.median_seconds(product, (a, b), rounds),
        "fp8 matmul": 2 * 8192**3 / timing.median_seconds(product8, eight, rounds),
        "copy": 2 * big.nbytes / timing.median_seconds(jax.jit(lambda x: x + 1), (big,), rounds),
    }


def measure(case: Case, ceiling: dict[str, float], rounds: int) -> Result:
    """Time one case; an implementation that cannot take it gives a note."""
    names = {k: getattr(case, k) for k in ("kernel", "shape", "backend", "ceiling")}
    try:
        seconds = timing.median_seconds(case.run, case.make(), rounds)
        error = None if case.error is None else case.error()
    except NotImplementedError as reason:
        return Result(**names, note=str(reason))
    rate = case.work / seconds
    return Result(
        **names, seconds=seconds, rate=rate, fraction=rate / ceiling[case.ceiling], error=error
    )


def row(result: Result) -> str:
    """Format one line of the table."""
    cells = [result.kernel, result.shape, result.backend]
    if result.seconds is None or result.rate is None or result.fraction is None:
        cells += ["-", result.note, "-", "-"]
    else:
        unit = "TB/s" if result.ceiling == "copy" else "TFLOP/s"
        error = "-" if result.error is None else f"{result.error:.1e}"
        cells += [f"{result.seconds * 1e6:,.0f}", f"{result.rate / 1e12:.3g} {unit}"]
        cells += [f"{result.fraction:.0%} of {result.ceiling}", error]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print a table as it is measured and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/kernels.py --kernels sparse_mla topk_select --json kernels.json",
    )
    parser.add_argument("--kernels", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument(
        "--rounds", type=timing.count, default=7, help="timed rounds of each case (7)"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    device = timing.accelerator(parser)
    print(f"{device.device_kind}; jax {jax.__version__}; {time.strftime('%Y-%m-%d')}")
    ceiling = ceilings(args.rounds)
    print("; ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in ceiling.items()))
    print("| kernel | shape | backend | us (median) | rate | of the measured ceiling | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    report = timing.Report(args.json, ceilings=ceiling)
    for case in itertools.chain.from_iterable(GROUPS[name]() for name in args.kernels):
        result = measure(case, ceiling, args.rounds)
        print(row(result), flush=True)
        report.add(asdict(result))
    if args.json:
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
