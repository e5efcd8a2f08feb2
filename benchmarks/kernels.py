"""Time every kernel against this device's ceilings: `python benchmarks/kernels.py --help`."""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.fp8 import op as fp8

Arrays = tuple[Any, ...]
ROUND_S = 0.05  # one timed round lasts about this long
QUERIES, HEADS, SLOTS = 4096, 128, 2048  # the 671B model's attention, one piece of 4096 tokens
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM = 64, 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        kernel: Name of the op and direction.
        shape: What distinguishes this case.
        backend: The op's `implementation`.
        make: Draws the arguments.
        run: Maps the arguments to outputs.
        work: Floating-point operations that the mathematics needs, or bytes that must be read and written once.
        ceiling: What bounds it: "bf16 matmul", "fp8 matmul" or "copy".
        error: Measures the error of a smaller problem, or None.
    """

    kernel: str
    shape: str
    backend: str
    make: Callable[[], Arrays]
    run: Callable[..., Any]
    work: float
    ceiling: str = "bf16 matmul"
    error: Callable[[], float] | None = None


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


def median_seconds(run: Callable[..., Any], arguments: Arrays, rounds: int) -> float:
    """Return the median over rounds of the mean time of back-to-back calls."""
    jax.block_until_ready(run(*arguments))
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = max(1, int(ROUND_S / max(time.perf_counter() - began, 1e-6)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            out = run(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times))


def relative_error(got: Any, expected: Any) -> float:
    """Return the largest Frobenius error over outputs, each relative to its reference."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


def keys(n: int, seed: int = 0) -> jax.Array:
    """Return n random keys."""
    return jax.random.split(jax.random.key(seed), n)


def normal(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Arrays:
    """Draw standard normal arrays."""
    drawn = zip(keys(len(shapes), seed), shapes, strict=True)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in drawn)


def float32(tree: Any) -> Any:
    """Raise every low-precision array to float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def distinct_indices(n_rows: int, n_keys: int, n_slots: int) -> jax.Array:
    """Draw random distinct keys of each row, ascending as a selection gives them."""

    def row(key: jax.Array) -> jax.Array:
        order = jnp.argsort(jax.random.uniform(key, (n_keys,)))
        return jnp.sort(order[:n_slots]).astype(jnp.int32)

    return jax.jit(lambda k: jax.lax.map(row, k, batch_size=64))(keys(n_rows, 7))


def ceilings(rounds: int) -> dict[str, float]:
    """Measure operations and bytes a second of one large product and one large copy, random data."""
    a, b = normal(0, (8192, 8192), (8192, 8192))
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16))
    product8 = jax.jit(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=jnp.bfloat16))
    eight = tuple(x.astype(jnp.float8_e4m3fn) for x in (a, b))
    (big,) = normal(0, (2**29,), dtype=jnp.float32)
    return {
        "bf16 matmul": 2 * 8192**3 / median_seconds(product, (a, b), rounds),
        "fp8 matmul": 2 * 8192**3 / median_seconds(product8, eight, rounds),
        "copy": 2 * big.nbytes / median_seconds(jax.jit(lambda x: x + 1), (big,), rounds),
    }


def forward_and_backward(
    name: str,
    op: Callable[..., tuple[jax.Array, jax.Array]],
    backend: str,
    shape: str,
    draw: Callable[[int], tuple[Arrays, Arrays, jax.Array]],
    sizes: tuple[int, int],
    flops: tuple[float, float],
) -> Iterator[Case]:
    """Make the two cases of an attention op.

    Args:
        name: The op's name.
        op: Maps (differentiable inputs, other inputs) to (out, lse); takes `implementation`.
        backend: The implementation.
        shape: The table's description.
        draw: Draws (differentiable inputs, other inputs, cotangent of out) for a number of queries.
        sizes: Queries of the timed problem and of the one whose error is measured.
        flops: Operations forward and backward.
    """
    fast = functools.partial(op, implementation=backend)
    plain = functools.partial(op, implementation="reference")

    def gradients(attend: Callable, inputs: Arrays, others: Arrays, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *others)[0], *inputs)
        return pull(d_out.astype(out.dtype))

    def forward_error() -> float:
        inputs, others, _ = draw(sizes[1])
        return relative_error(
            jax.jit(fast)(*inputs, *others), jax.jit(plain)(*float32(inputs), *others)
        )

    def backward_error() -> float:
        inputs, others, d_out = draw(sizes[1])
        got = jax.jit(functools.partial(gradients, fast))(inputs, others, d_out)
        reference = jax.jit(functools.partial(gradients, plain))
        return relative_error(got, reference(float32(inputs), others, float32(d_out)))

    def residuals() -> Arrays:
        inputs, others, d_out = draw(sizes[0])
        pull = jax.jit(lambda i, o: jax.vjp(lambda *x: fast(*x, *o)[0], *i)[1])(inputs, others)
        return pull, d_out

    def arguments() -> Arrays:
        inputs, others, _ = draw(sizes[0])
        return (*inputs, *others)

    common = {"shape": shape, "backend": backend}
    yield Case(
        kernel=f"{name} forward",
        make=arguments,
        run=jax.jit(fast),
        work=flops[0],
        error=forward_error,
        **common,
    )
    yield Case(
        kernel=f"{name} backward",
        make=residuals,
        run=jax.jit(lambda pull, d_out: pull(d_out)),
        work=flops[1],
        error=backward_error,
        **common,
    )


def sparse_mla_cases() -> Iterator[Case]:
    """Attention to 2048 listed rows."""
    dim = LATENT + ROPE
    op = functools.partial(pallas_kernels.sparse_mla, scale=dim**-0.5, value_dim=LATENT)
    work = 2 * QUERIES * HEADS * SLOTS
    for n_keys, backend in itertools.product((8192, 131072), ("gluon_gpu", "pallas_gpu")):

        def draw(n_queries: int, n_keys: int = n_keys) -> tuple[Arrays, Arrays, jax.Array]:
            shapes = (n_queries, HEADS, dim), (n_keys, dim), (n_queries, HEADS, LATENT)
            q, kv, d_out = normal(1, *shapes)
            return (q, kv), (distinct_indices(n_queries, n_keys, SLOTS),), d_out

        shape = f"T={QUERIES} H={HEADS} K={SLOTS} S={n_keys}"
        flops = work * (dim + LATENT), work * (3 * dim + 2 * LATENT)
        yield from forward_and_backward(
            "sparse_mla", op, backend, shape, draw, (QUERIES, 64), flops
        )


def dense_mla_cases() -> Iterator[Case]:
    """Causal attention in MHA form."""
    dim = NOPE + ROPE

    def op(*arrays: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array]:
        q, k, v, end = arrays
        options = {"scale": dim**-0.5, "start": jnp.zeros_like(end), "end": end, "causal": True}
        return pallas_kernels.dense_mla(q, k, v, **options, implementation=implementation)

    for n, backend in itertools.product((4096, 8192), ("pallas_gpu", "cudnn")):

        def draw(n: int) -> tuple[Arrays, Arrays, jax.Array]:
            shapes = *((n, HEADS, dim),) * 2, *((n, HEADS, VALUE),) * 2
            q, k, v, d_out = normal(2, *shapes)
            return (q, k, v), (jnp.arange(1, n + 1, dtype=jnp.int32),), d_out

        pairs = n * (n + 1) // 2 * HEADS
        flops = 2 * pairs * (dim + VALUE), 2 * pairs * (3 * dim + 2 * VALUE)
        yield from forward_and_backward(
            "dense_mla", op, backend, f"T=S={n} H={HEADS} causal", draw, (n, 512), flops
        )


def indexer_scores_cases() -> Iterator[Case]:
    """Scores of every key for every query, no key skipped, in bf16 and FP8."""
    n_keys = 8192

    def draw(n_queries: int, eight: bool) -> Arrays:
        q, k = normal(3, (n_queries, INDEX_HEADS, INDEX_DIM), (n_keys, INDEX_DIM))
        (w,) = normal(4, (n_queries, INDEX_HEADS), dtype=jnp.float32)
        if eight:
            q, k = fp8.simulate(q), fp8.simulate(k)
        zero = jnp.zeros(n_queries, jnp.int32)
        return q, k, w * (INDEX_HEADS * INDEX_DIM) ** -0.5, zero, zero + n_keys

    def op(
        q: jax.Array,
        k: jax.Array,
        w: jax.Array,
        start: jax.Array,
        end: jax.Array,
        **options: Any,
    ) -> jax.Array:
        return pallas_kernels.indexer_scores(q, k, w, start=start, end=end, **options)

    for eight, backend in itertools.product((False, True), ("pallas_gpu", "reference")):
        fast = functools.partial(op, fp8=eight, implementation=backend)

        def error(eight: bool = eight, fast: Callable = fast) -> float:
            arguments = draw(64, eight)
            plain = functools.partial(op, implementation="reference")
            return relative_error(jax.jit(fast)(*arguments), jax.jit(plain)(*float32(arguments)))

        yield Case(
            kernel="indexer_scores " + ("fp8" if eight else "bf16"),
            shape=f"T={QUERIES} J={INDEX_HEADS} X={INDEX_DIM} S={n_keys}",
            backend=backend,
            make=functools.partial(draw, QUERIES, eight),
            run=jax.jit(fast),
            work=2 * QUERIES * n_keys * INDEX_HEADS * INDEX_DIM,
            ceiling="fp8 matmul" if eight else "bf16 matmul",
            error=error,
        )


def topk_cases() -> Iterator[Case]:
    """The 2048 largest of each row; the error is the share of rows whose list differs from the definition's."""
    for n_rows, n_keys in ((1024, 8192), (1024, 32768), (1024, 131072), (128, 131072)):

        def draw(n_rows: int = n_rows, n_keys: int = n_keys) -> Arrays:
            (scores,) = normal(5, (n_rows, n_keys), dtype=jnp.float32)
            zero = jnp.zeros(n_rows, jnp.int32)
            return scores, zero, zero + n_keys

        def select(scores: jax.Array, start: jax.Array, end: jax.Array, name: str) -> jax.Array:
            return pallas_kernels.topk_select(
                scores, k=SLOTS, start=start, end=end, implementation=name
            )

        def largest(scores: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
            return jax.lax.top_k(scores, SLOTS)[1]

        def error(draw: Callable = draw) -> float:
            arguments = tuple(x[:64] for x in draw())
            got, expected = (select(*arguments, name) for name in ("pallas_gpu", "reference"))
            return float(jnp.mean(jnp.any(got != expected, axis=1)))

        common = {"kernel": "topk_select", "shape": f"{n_rows} rows of {n_keys}, k={SLOTS}"}
        common |= {"make": draw, "work": 4 * n_rows * (n_keys + SLOTS), "ceiling": "copy"}
        fast = jax.jit(functools.partial(select, name="pallas_gpu"))
        yield Case(backend="pallas_gpu", run=fast, error=error, **common)
        yield Case(backend="lax.top_k", run=jax.jit(largest), **common)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sparse_mla": sparse_mla_cases,
    "dense_mla": dense_mla_cases,
    "indexer_scores": indexer_scores_cases,
    "topk_select": topk_cases,
}


def measure(case: Case, ceiling: dict[str, float], rounds: int) -> Result:
    """Time one case; an implementation that cannot take it gives a note."""
    names = {k: getattr(case, k) for k in ("kernel", "shape", "backend", "ceiling")}
    try:
        seconds = median_seconds(case.run, case.make(), rounds)
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
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each case (7)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}; jax {jax.__version__}; {time.strftime('%Y-%m-%d')}")
    ceiling = ceilings(args.rounds)
    print("; ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in ceiling.items()))
    print("| kernel | shape | backend | us (median) | rate | of the measured ceiling | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = []
    for case in itertools.chain.from_iterable(GROUPS[name]() for name in args.kernels):
        results.append(measure(case, ceiling, args.rounds))
        print(row(results[-1]), flush=True)
    if args.json:
        report = {"device": device.device_kind, "jax": jax.__version__, "ceilings": ceiling}
        report |= {"date": time.strftime("%Y-%m-%d"), "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
