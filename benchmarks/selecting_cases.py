"""Selection, decoding and the experts' products, as `benchmarks/kernels.py` times them."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import (
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    QUERIES,
    ROPE,
    SLOTS,
    Arrays,
    Case,
    distinct_indices,
    float32,
    keys,
    normal,
    relative_error,
)

import pallas_kernels
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_mla.layout import Parts


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
        return pallas_kernels.paged_mla(q, Parts(latent, rope, scales), rows, **options)

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
    "indexer_scores": indexer_scores_cases,
    "topk_select": topk_cases,
    "decoding": decoding_cases,
    "grouped_matmul": grouped_matmul_cases,
}
