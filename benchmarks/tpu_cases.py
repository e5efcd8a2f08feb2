"""Every TPU kernel at the released widths, op by op: what is run, with which shapes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from tpu_counts import LANES

from pallas_kernels.dense_mla import pallas_tpu as dense
from pallas_kernels.grouped_matmul import pallas_tpu as grouped
from pallas_kernels.indexer_kl import pallas_tpu_listed as listed_kl
from pallas_kernels.indexer_kl import pallas_tpu_score_gradients as score_gradients
from pallas_kernels.indexer_kl import pallas_tpu_target as target
from pallas_kernels.indexer_scores import pallas_tpu as scores
from pallas_kernels.paged_indexer import pallas_tpu as paged_indexer
from pallas_kernels.paged_mla import layout
from pallas_kernels.paged_mla import pallas_tpu as paged_mla
from pallas_kernels.sparse_mla import pallas_tpu as sparse
from pallas_kernels.sparse_mla import pallas_tpu_backward as sparse_backward
from pallas_kernels.topk_select import pallas_tpu as topk

HEADS, INDEX_HEADS, INDEX_DIM, SLOTS, SCALE = 128, 64, 128, 2048, 576**-0.5
DECODING, PAGE = 128, 64  # queries, one of each sequence; tokens of a page
EXPERTS = (256, 8)  # of which each token takes 8; a device holds 16
LOCAL_EXPERTS, HIDDEN, INNER = 16, 7168, 2048
LOSS_ROWS = 4096  # queries that the kernels of the indexer's loss take at a time


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


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return an argument's shape and dtype."""
    return jax.ShapeDtypeStruct(sizes, dtype)


f32, i32 = (functools.partial(shape, dtype=dtype) for dtype in (jnp.float32, jnp.int32))


def cases(n: int) -> Iterator[Case]:
    """Yield every kernel: a prompt of n tokens, and decoding with n tokens in the cache."""
    for of_op in (
        dense_mla,
        indexer_topk,
        sparse_mla,
        indexer_scores,
        indexer_kl,
        grouped_matmul,
        paged,
    ):
        yield from of_op(n)


def dense_mla(n: int) -> Iterator[Case]:
    """Yield dense attention, of all keys in a range and of those that a mask selects."""

    def attend(q: Any, k: Any, v: Any, start: Any, end: Any, mask: Any = None) -> Any:
        return dense.dense_mla(q, k, v, scale=SCALE, start=start, end=end, selected=mask)

    def attend_backward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *rest), q, k, v)
        return pull(out)

    heads = shape(n, HEADS, 192), shape(n, HEADS, 192), shape(n, HEADS, 128)
    mask = shape(n, n, dtype=jnp.bool_)
    gradients = ("dense_mla_query_gradient", "dense_mla_key_gradient")
    for name, more in (("dense_mla", ()), ("dense_mla masked", (mask,))):
        shapes = (*heads, i32(n), i32(n), *more)
        yield Case(
            name=f"{name} forward", run=attend, shapes=shapes, kernels=("dense_mla_forward",)
        )
        yield Case(name=f"{name} backward", run=attend_backward, shapes=shapes, kernels=gradients)


def indexer_topk(n: int) -> Iterator[Case]:
    """Yield the selection, as a mask and as a list."""
    for form, select in (("mask", topk.indexer_topk_mask), ("list", topk.indexer_topk)):

        def run(q: Any, k: Any, w: Any, start: Any, end: Any, select: Any = select) -> Any:
            return select(q, k, w, k=SLOTS, start=start, end=end)

        shapes = (*index_arguments(n), i32(n), i32(n))
        yield Case(name=f"indexer_topk {form}", run=run, shapes=shapes, kernels=(f"topk_{form}",))


def index_arguments(n: int) -> tuple[Any, Any, Any]:
    """Return the indexer's queries, keys and weights."""
    return shape(n, INDEX_HEADS, INDEX_DIM), shape(n, INDEX_DIM), f32(n, INDEX_HEADS)


def gathered_arguments(n: int) -> tuple[Any, Any, Any]:
    """Return the absorbed queries and keys, and the selected rows."""
    return shape(n, HEADS, 576), shape(n, 576), i32(n, SLOTS)


def gradient_bytes(n: int, width: int) -> int:
    """Return what summing gradients by key moves: float32 rows are read, added to sums that are read and written."""
    return 3 * 4 * n * SLOTS * width


def sparse_mla(n: int) -> Iterator[Case]:
    """Yield attention to gathered rows."""
    options = {"scale": SCALE, "value_dim": 512}
    out, lse = shape(n, HEADS, 512), f32(n, HEADS)
    yield Case(
        name="sparse_mla forward",
        run=functools.partial(sparse.forward, **options),
        shapes=gathered_arguments(n),
        kernels=("sparse_mla_forward",),
    )
    yield Case(
        name="sparse_mla backward",
        run=functools.partial(sparse_backward.backward, **options),
        shapes=(*gathered_arguments(n), out, lse, out, lse),
        kernels=("sparse_mla_backward",),
        xla_bytes=gradient_bytes(n, 640),
    )


def loss_block(n: int) -> tuple[int, bool]:
    """Return how many queries the loss takes at a time, and whether their range is causal.

    The mask or the scores of a long prompt are for blocks of queries; the last block of one reads nearly all keys.
    """
    rows = min(n, LOSS_ROWS)
    return rows, rows == n


def indexer_scores(n: int) -> Iterator[Case]:
    """Yield a block of the indexer's scores."""
    rows, causal = loss_block(n)
    (q, _, w), (_, k, _) = index_arguments(rows), index_arguments(n)
    bounds = i32(rows), i32(rows)
    yield Case(
        name="indexer_scores",
        run=scores.scores,
        shapes=(q, k, w, *bounds),
        kernels=("indexer_scores",),
        causal=causal,
    )
    yield Case(
        name="indexer_scores gradients",
        run=score_gradients.score_gradients,
        shapes=(q, k, w, f32(rows, n), *bounds),
        kernels=("indexer_query_gradient", "indexer_key_gradient"),
        causal=causal,
    )


def indexer_kl(n: int) -> Iterator[Case]:
    """Yield a block of the loss' target over all keys, and the loss over selected ones."""
    rows, causal = loss_block(n)
    yield Case(
        name="indexer_kl target",
        run=functools.partial(target.attention_target, scale=SCALE),
        shapes=(
            shape(rows, HEADS, 192),
            shape(n, HEADS, 192),
            f32(rows, HEADS),
            i32(rows),
            i32(rows),
        ),
        kernels=("attention_target",),
        causal=causal,
    )

    def listed_gradients(*arguments: Any) -> Any:
        kl, residuals = listed_kl.kl_rows(*arguments, scale=SCALE)
        return listed_kl.gradients(residuals, kl)

    q, k, idx = gathered_arguments(n)
    shapes = (*index_arguments(n), q, k, f32(n, HEADS), idx)
    yield Case(
        name="sparse_indexer_kl",
        run=functools.partial(listed_kl.kl_rows, scale=SCALE),
        shapes=shapes,
        kernels=("listed_kl",),
    )
    yield Case(
        name="sparse_indexer_kl gradients",
        run=listed_gradients,
        shapes=shapes,
        kernels=("listed_kl_gradient",),
        xla_bytes=gradient_bytes(n, INDEX_DIM),
    )


def grouped_matmul(n: int) -> Iterator[Case]:
    """Yield the experts' products, of the rows that reach a device."""
    sent = n * EXPERTS[1] * LOCAL_EXPERTS // EXPERTS[0]
    # A tile that two experts share is worked on twice.
    tiles = -(-sent // grouped.MAX_TILE_ROWS) + LOCAL_EXPERTS - 1
    rows, sizes = shape(sent, HIDDEN), i32(LOCAL_EXPERTS)
    both = {"kernels": ("kernel",), "causal": False, "dynamic": tiles}
    yield Case(
        name="grouped_matmul forward",
        run=grouped.multiply_rows,
        shapes=(rows, shape(LOCAL_EXPERTS, HIDDEN, INNER), sizes),
        **both,
    )
    yield Case(
        name="grouped_matmul dw",
        run=grouped.weight_gradient,
        shapes=(rows, shape(sent, INNER), sizes),
        **both,
    )


def paged(n: int) -> Iterator[Case]:
    """Yield decoding from paged caches."""

    def select(q: Any, keys: Any, w: Any, table: Any, end: Any) -> Any:
        return paged_indexer.paged_indexer_topk(q, keys, w, table, k=SLOTS, page_size=PAGE, end=end)

    cached, one = DECODING * n, (DECODING, 1)
    yield Case(
        name=f"paged_indexer_topk, {DECODING} queries",
        run=select,
        shapes=(
            shape(*one, INDEX_HEADS, INDEX_DIM),
            shape(cached, INDEX_DIM),
            f32(*one, INDEX_HEADS),
            i32(DECODING, n // PAGE),
            i32(*one),
        ),
        kernels=("paged_topk",),
        causal=False,
        copied_rows=PAGE,
    )
    for name, quantised in (("paged_mla", False), ("paged_mla FP8", True)):
        row = layout.Format(512, 64, "bfloat16", quantised)
        yield Case(
            name=f"{name}, {DECODING} queries",
            run=functools.partial(paged_mla.paged_mla, scale=SCALE),
            shapes=(
                shape(DECODING, HEADS, 576),
                layout.Records(i32(cached * row.lines, LANES), row),
                i32(DECODING, SLOTS),
            ),
            kernels=("paged_mla",),
            causal=False,
            copied_rows=row.lines,
        )
