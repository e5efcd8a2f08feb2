"""The kernels, shapes and backends that `benchmarks/kernels.py` times."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.fp8 import op as fp8

Arrays = tuple[Any, ...]
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
        expected, _ = jax.jit(plain)(*float32(inputs), *others)
        return relative_error(jax.jit(fast)(*inputs, *others)[0], expected)

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


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, *, scale: float
) -> tuple[jax.Array, None]:
    """Attend by cuDNN, which wants values as wide as keys: they are padded."""
    padded = jnp.pad(v, ((0, 0), (0, 0), (0, k.shape[-1] - v.shape[-1])))
    options = {"scale": scale, "is_causal": True, "implementation": "cudnn"}
    out = jax.nn.dot_product_attention(q[None], k[None], padded[None], **options)
    return out[0, :, :, : v.shape[-1]], None


def dense_mla_cases() -> Iterator[Case]:
    """Causal attention in MHA form, beside cuDNN's."""
    dim = NOPE + ROPE

    def op(*arrays: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array | None]:
        q, k, v, end = arrays
        if implementation == "cudnn":
            return cudnn_attention(q, k, v, end, scale=dim**-0.5)
        options = {"scale": dim**-0.5, "start": jnp.zeros_like(end), "end": end, "causal": True}
        return pallas_kernels.dense_mla(q, k, v, **options, implementation=implementation)

    def draw(n: int) -> tuple[Arrays, Arrays, jax.Array]:
        q, k, v, d_out = normal(2, *((n, HEADS, dim),) * 2, *((n, HEADS, VALUE),) * 2)
        return (q, k, v), (jnp.arange(1, n + 1, dtype=jnp.int32),), d_out

    for n, backend in itertools.product((4096, 8192), ("pallas_gpu", "cudnn")):
        pairs = n * (n + 1) // 2 * HEADS
        flops = 2 * pairs * (dim + VALUE), 2 * pairs * (3 * dim + 2 * VALUE)
        yield from forward_and_backward(
            "dense_mla", op, backend, f"T=S={n} H={HEADS} causal", draw, (n, 512), flops
        )


def indexer_scores_cases() -> Iterator[Case]:
    """Scores of every key for every query, no key skipped; FP8 values go through bf16 products exactly."""
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

    for eight, backend in (
        (False, "pallas_gpu"),
        (True, "pallas_gpu"),
        (True, "pallas_gpu_fp8"),
        (False, "reference"),
    ):
        fast = functools.partial(op, implementation=backend)

        def error(eight: bool = eight, fast: Callable = fast) -> float:
            arguments = draw(64, eight)
            plain = functools.partial(op, implementation="reference")
            return relative_error(jax.jit(fast)(*arguments), jax.jit(plain)(*float32(arguments)))

        yield Case(
            kernel="indexer_scores",
            shape=f"T={QUERIES} J={INDEX_HEADS} X={INDEX_DIM} S={n_keys}"
            + (" FP8 values" if eight else ""),
            backend=backend,
            make=functools.partial(draw, QUERIES, eight),
            run=jax.jit(fast),
            work=2 * QUERIES * n_keys * INDEX_HEADS * INDEX_DIM,
            ceiling="fp8 matmul" if backend == "pallas_gpu_fp8" else "bf16 matmul",
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
