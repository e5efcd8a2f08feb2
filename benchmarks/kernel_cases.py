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


def indexer_kl_cases() -> Iterator[Case]:
    """The warm-up's loss over causal ranges, and its gradients."""
    n, dim = 8192, NOPE + ROPE

    def op(*arrays: jax.Array, implementation: str) -> jax.Array:
        *tensors, end = arrays
        options = {"scale": dim**-0.5, "start": jnp.zeros_like(end), "end": end, "causal": True}
        return pallas_kernels.indexer_kl(*tensors, **options, implementation=implementation)

    def draw(n: int) -> Arrays:
        shapes = (n, INDEX_HEADS, INDEX_DIM), (n, INDEX_DIM), (n, HEADS, dim), (n, HEADS, dim)
        q, k, attn_q, attn_k = normal(6, *shapes)
        (w,) = normal(7, (n, INDEX_HEADS), dtype=jnp.float32)
        end = jnp.arange(1, n + 1, dtype=jnp.int32)
        v = attn_k[..., :VALUE]
        _, lse = pallas_kernels.dense_mla(
            *(attn_q, attn_k, v), scale=dim**-0.5, start=jnp.zeros_like(end), end=end, causal=True
        )
        return q, k, w * (INDEX_HEADS * INDEX_DIM) ** -0.5, attn_q, attn_k, lse, end

    pairs = n * (n + 1) // 2
    forward = 2 * pairs * (HEADS * dim + INDEX_HEADS * INDEX_DIM)
    shape = f"T=S={n} H={HEADS} J={INDEX_HEADS} causal"
    yield from loss_and_gradients("indexer_kl", op, "pallas_gpu", shape, draw, (n, 512), forward)


def sparse_indexer_kl_cases() -> Iterator[Case]:
    """The sparse stage's loss over listed keys, and its gradients."""
    dim = LATENT + ROPE

    def op(*arrays: jax.Array, implementation: str) -> jax.Array:
        return pallas_kernels.sparse_indexer_kl(
            *arrays, scale=dim**-0.5, implementation=implementation
        )

    for n_keys in (8192, 131072):

        def draw(n: int, n_keys: int = n_keys) -> Arrays:
            shapes = (n, INDEX_HEADS, INDEX_DIM), (n_keys, INDEX_DIM), (n, HEADS, dim)
            q, k, attn_q, kv = normal(8, *shapes, (n_keys, dim))
            (w,) = normal(9, (n, INDEX_HEADS), dtype=jnp.float32)
            index = distinct_indices(n, n_keys, SLOTS)
            _, lse = pallas_kernels.sparse_mla(attn_q, kv, index, scale=dim**-0.5, value_dim=LATENT)
            return q, k, w * (INDEX_HEADS * INDEX_DIM) ** -0.5, attn_q, kv, lse, index

        forward = 2 * QUERIES * SLOTS * (HEADS * dim + INDEX_HEADS * INDEX_DIM)
        shape = f"T={QUERIES} H={HEADS} J={INDEX_HEADS} K={SLOTS} S={n_keys}"
        yield from loss_and_gradients(
            "sparse_indexer_kl", op, "gluon_gpu", shape, draw, (QUERIES, 64), forward
        )


def loss_and_gradients(
    name: str,
    op: Callable[..., jax.Array],
    backend: str,
    shape: str,
    draw: Callable[[int], Arrays],
    sizes: tuple[int, int],
    flops: float,
) -> Iterator[Case]:
    """Make the two cases of a loss; the second computes the gradients of the mean by its first three arguments."""
    fast = functools.partial(op, implementation=backend)
    plain = functools.partial(op, implementation="reference")

    def gradients(loss: Callable[..., jax.Array], *arguments: jax.Array) -> Any:
        return jax.grad(lambda *x: jnp.mean(loss(*x, *arguments[3:])), (0, 1, 2))(*arguments[:3])

    for kind, form in (
        ("loss", lambda f: f),
        ("gradients", lambda f: functools.partial(gradients, f)),
    ):

        def error(form: Callable = form) -> float:
            small = draw(sizes[1])
            return relative_error(
                jax.jit(form(fast))(*small), jax.jit(form(plain))(*float32(small))
            )

        yield Case(
            kernel=f"{name} {kind}",
            shape=shape,
            backend=backend,
            make=functools.partial(draw, sizes[0]),
            run=jax.jit(form(fast)),
            work=flops,
            error=error,
        )


def decoding_cases() -> Iterator[Case]:
    """One query of each of 128 sequences of 131,072 tokens over a paged cache, in bf16 and in FP8 records."""
    batch, length, page = 128, 131072, 64
    n_rows = batch * length

    def rows_of_cache(seed: int, width: int, eight: bool) -> tuple[jax.Array, jax.Array | None]:
        (piece,) = normal(seed, (n_rows // 64, width))
        pieces = fp8.quantize(piece) if eight else (piece, None)
        return jax.tree.map(lambda x: jnp.tile(x, (64, 1)), pieces)

    def attention(eight: bool) -> Arrays:
        (q,) = normal(10, (batch, 1, HEADS, LATENT + ROPE))
        rows = distinct_indices(batch, length, SLOTS) + length * jnp.arange(batch)[:, None]
        latent, scales = rows_of_cache(11, LATENT, eight)
        rope, _ = rows_of_cache(12, ROPE, False)
        return q, latent, rope, rows[:, None].astype(jnp.int32), scales

    def attend(q: jax.Array, latent: jax.Array, rope: jax.Array, *rest: Any) -> Any:
        rows, scales = rest
        options = {"scale": (LATENT + ROPE) ** -0.5, "implementation": "gluon_gpu"}
        return pallas_kernels.paged_mla(q, latent, rope, rows, latent_scale_NG=scales, **options)

    def selection(eight: bool) -> Arrays:
        (q,) = normal(13, (batch, 1, INDEX_HEADS, INDEX_DIM))
        (w,) = normal(14, (batch, 1, INDEX_HEADS), dtype=jnp.float32)
        order = jax.random.permutation(keys(1)[0], n_rows // page).astype(jnp.int32)
        k, scales = rows_of_cache(15, INDEX_DIM, eight)
        return q, k, w, order.reshape(batch, -1), jnp.full((batch, 1), length, jnp.int32), scales

    def select(q: jax.Array, k: jax.Array, w: jax.Array, *rest: Any) -> jax.Array:
        table, end, scales = rest
        options = {"k": SLOTS, "page_size": page, "end": end, "k_scale_NG": scales}
        return pallas_kernels.paged_indexer_topk(
            q, k, w, table, **options, implementation="gluon_gpu"
        )

    for eight, kind in ((False, "bf16"), (True, "FP8")):
        yield Case(
            kernel="paged_mla",
            shape=f"B={batch} T=1 H={HEADS} K={SLOTS} S={length} {kind} cache",
            backend="gluon_gpu",
            make=functools.partial(attention, eight),
            run=jax.jit(attend),
            work=2 * batch * HEADS * SLOTS * (2 * LATENT + ROPE),
        )
        yield Case(
            kernel="paged_indexer_topk",
            shape=f"B={batch} T=1 J={INDEX_HEADS} S={length} {kind} keys",
            backend="gluon_gpu",
            make=functools.partial(selection, eight),
            run=jax.jit(select),
            work=n_rows * (INDEX_DIM + 4 if eight else 2 * INDEX_DIM),
            ceiling="copy",
        )


def grouped_matmul_cases() -> Iterator[Case]:
    """The routed experts' products, 16384 rows of 32 experts by uneven groups of whole blocks, and their gradients."""
    n_rows, n_groups, align = 16384, 32, 128

    def draw(depth: int, columns: int, n: int) -> Arrays:
        x, w, d_out = normal(16, (n, depth), (n_groups, depth, columns), (n, columns))
        blocks = np.random.default_rng(16).multinomial(n // align, [1 / n_groups] * n_groups)
        return x, w * depth**-0.5, jnp.asarray(blocks * align, jnp.int32), d_out

    def products(name: str, kind: str) -> Callable[..., jax.Array]:
        op = functools.partial(pallas_kernels.grouped_matmul, align=align, implementation=name)

        def run(x: jax.Array, w: jax.Array, sizes: jax.Array, d_out: jax.Array) -> jax.Array:
            if kind == "forward":
                return op(x, w, sizes)
            if kind == "dx":
                return jax.vjp(lambda x: op(x, w, sizes), x)[1](d_out)[0]
            return jax.vjp(lambda w: op(x, w, sizes), w)[1](d_out)[0]

        return jax.jit(run)

    shapes, backends = ((7168, 2048), (2048, 7168)), ("pallas_gpu", "ragged_dot", "blocked")
    for shape, kind, backend in itertools.product(shapes, ("forward", "dx", "dw"), backends):
        fast, plain = products(backend, kind), products("blocked", kind)

        def error(
            shape: tuple[int, int] = shape, fast: Callable = fast, plain: Callable = plain
        ) -> float:
            small = draw(*shape, 1024)
            return relative_error(fast(*small), plain(*float32(small)))

        yield Case(
            kernel=f"grouped_matmul {kind}",
            shape=f"M={n_rows} E={n_groups} K={shape[0]} N={shape[1]}",
            backend=backend,
            make=functools.partial(draw, *shape, n_rows),
            run=fast,
            work=2 * n_rows * shape[0] * shape[1],
            error=error,
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sparse_mla": sparse_mla_cases,
    "dense_mla": dense_mla_cases,
    "indexer_scores": indexer_scores_cases,
    "topk_select": topk_cases,
    "indexer_kl": indexer_kl_cases,
    "sparse_indexer_kl": sparse_indexer_kl_cases,
    "grouped_matmul": grouped_matmul_cases,
    "decoding": decoding_cases,
}
