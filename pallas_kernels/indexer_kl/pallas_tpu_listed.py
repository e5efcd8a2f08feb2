"""The indexer's KL loss over listed keys on TPU, as two kernels: loss of each row, gradients.

A key's row of attention and its index key lie side by side in one table, so that one copy a slot brings both.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.sparse_mla import pallas_tpu_rows as gathered

NO_HEAD = 1e30  # log-sum-exp of a head of padding: it has no weight


class Residuals(NamedTuple):
    """What `gradients` needs of the forward pass."""

    q: Float[Array, "T J X"]
    k: Float[Array, "S X"]
    w: Float[Array, "T J"]
    slots: Int[Array, "T 1 P"]
    grad: Float[Array, "T 1 P"]  # softmax(I) - p


def check(
    q_TJX: Any, k_SX: Any, attn_q_THD: Any, kv_SD: Any, topk_idx_TK: Any, *, scale: float
) -> None:
    """Raise NotImplementedError, saying why, for what these kernels do not take."""
    mosaic_tpu.check_floats(q_TJX, k_SX, attn_q_THD, kv_SD)
    if 0 in topk_idx_TK.shape:
        raise NotImplementedError("an axis of length 0")
    width = kv_SD.shape[-1] + mosaic_tpu.round_up(k_SX.shape[-1], LANES)
    row = jax.ShapeDtypeStruct((1, width), kv_SD.dtype)
    gathered.check(row, row, topk_idx_TK, scale, 1)


def _index_table(k_SX: Float[Array, "S X"]) -> Float[Array, "R C L"]:
    """Lay index keys out for copies of single rows, with the spare rows behind."""
    k = jnp.pad(k_SX, ((0, gathered.SPARE_ROWS), (0, -k_SX.shape[1] % LANES)))
    return k.reshape(k.shape[0], -1, LANES)


def _index_queries(q_TJX: Array, w_TJ: Array) -> tuple[Array, Array]:
    """Append heads of weight 0 and columns of zeros: q [T, P, W] and float32 w [T, 1, P]."""
    heads = -q_TJX.shape[1] % gathered.HEAD_MULTIPLE
    q = jnp.pad(q_TJX, ((0, 0), (0, heads), (0, -q_TJX.shape[2] % LANES)))
    return q, jnp.pad(w_TJ.astype(jnp.float32), ((0, 0), (0, heads)))[:, None]


def _column(row: Float[Array, "1 N"]) -> Float[Array, "N 1"]:
    """Turn a row of heads: heads on sublanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _products(q: Ref, tiles: list[Array]) -> Float[Array, "H K"]:
    """Multiply a query's heads by its rows, given in tiles of 128 columns."""
    parts = (
        mosaic_tpu.dot(q[0, :, c * LANES : (c + 1) * LANES], tile, mosaic_tpu.LAST_TO_LAST)
        for c, tile in enumerate(tiles)
    )
    return functools.reduce(lambda a, b: a + b, parts)


def _loss_kernel(
    slots: Ref,
    next_slots: Ref,
    table: Ref,
    listed: Ref,
    q: Ref,
    w: Ref,
    attn_q: Ref,
    lse: Ref,
    kl: Ref,
    grad: Ref,
    rows: Ref,
    arrived: Ref,
    *,
    scale: float,
    n_keys: int,
) -> None:
    """Step t: query t's KL, on all lanes, and its derivative by the scores."""
    half = gathered.fetch(slots, next_slots, table, rows, arrived)
    tiles = [rows[half, :, c, :] for c in range(rows.shape[2])]
    n_attention = attn_q.shape[2] // LANES
    # An invalid slot's logit is scale * -1e30, so its weight is 0.
    weights = jnp.exp(_products(attn_q, tiles[:n_attention]) * scale - _column(lse[0]))
    summed = jnp.sum(weights, axis=0, keepdims=True)
    total = jnp.sum(summed, axis=1, keepdims=True)
    target = summed / jnp.where(total > 0, total, 1.0)

    valid = listed[0] < n_keys
    heads = jnp.maximum(_products(q, tiles[n_attention:]), 0.0) * _column(w[0])
    scores = jnp.where(valid, jnp.sum(heads, axis=0, keepdims=True), mosaic_tpu.MASKED)
    peak = jnp.max(scores, axis=1, keepdims=True)
    powers = jnp.where(valid, jnp.exp(scores - peak), 0.0)
    divisor = jnp.sum(powers, axis=1, keepdims=True)
    divisor = jnp.where(divisor > 0, divisor, 1.0)
    log_softmax = scores - peak - jnp.log(divisor)

    some = target > 0
    terms = jnp.where(some, target * (jnp.log(jnp.where(some, target, 1.0)) - log_softmax), 0.0)
    kl[0] = jnp.broadcast_to(jnp.sum(terms, axis=1, keepdims=True), (1, LANES))
    grad[0] = powers / divisor - target


def kl_rows(
    q_TJX: Float[Array, "T J X"],
    k_SX: Float[Array, "S X"],
    w_TJ: Float[Array, "T J"],
    attn_q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    lse_TH: Float[Array, "T H"],
    topk_idx_TK: Int[Array, "T K"],
    *,
    scale: float,
) -> tuple[Float[Array, " T"], Residuals]:
    """Return the KL of each row, and what `gradients` needs; see `op.sparse_indexer_kl`.

    Products of bfloat16 accumulate in float32; all else is float32.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_TJX, k_SX, attn_q_THD, kv_SD, topk_idx_TK, scale=scale)
    n_queries, n_keys = q_TJX.shape[0], k_SX.shape[0]
    table = jnp.concatenate([gathered.table_of(kv_SD), _index_table(k_SX)], axis=1)
    slots = gathered.slots_of(topk_idx_TK, n_keys)
    q, w = _index_queries(q_TJX, w_TJ)
    attn_q = gathered.queries_of(attn_q_THD)
    n_slots, heads = slots.shape[2], attn_q.shape[1]
    lse = jnp.where(jnp.isfinite(lse_TH), lse_TH, 0.0)
    extra = heads - lse.shape[1]
    lse = jnp.pad(lse, ((0, 0), (0, extra)), constant_values=NO_HEAD)[:, None]

    row = gathered.query_spec((1, n_slots), n_queries)
    pairs = n_queries * n_slots
    kl, grad = pl.pallas_call(
        functools.partial(_loss_kernel, scale=scale, n_keys=n_keys),
        grid=gathered.grid_of(n_queries),
        in_specs=[
            *gathered.slot_specs(n_queries, n_slots),
            pl.BlockSpec(memory_space=pl.ANY),
            row,
            *(gathered.query_spec(x.shape[1:], n_queries) for x in (q, w, attn_q, lse)),
        ],
        out_specs=[gathered.query_spec((1, LANES), n_queries), row],
        out_shape=[
            jax.ShapeDtypeStruct((n_queries, 1, LANES), jnp.float32),
            jax.ShapeDtypeStruct((n_queries, 1, n_slots), jnp.float32),
        ],
        scratch_shapes=gathered.scratch(n_slots, table.shape[1], table.dtype),
        compiler_params=gathered.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_slots * (math.prod(q.shape) + math.prod(attn_q.shape)),
            transcendentals=pairs * (heads + 2),
            bytes_accessed=pairs * (table.shape[1] * LANES * table.dtype.itemsize + 4)
            + mosaic_tpu.total_bytes(slots, slots, q, w, attn_q, lse),
        ),
        name="listed_kl",
    )(slots, slots, table, slots, q, w, attn_q, lse)
    return kl[:, 0, 0], Residuals(q_TJX, k_SX, w_TJ, slots, grad)


def _gradient_kernel(
    slots: Ref,
    next_slots: Ref,
    table: Ref,
    q: Ref,
    w: Ref,
    d_scores: Ref,
    d_q: Ref,
    d_w: Ref,
    d_rows: Ref,
    rows: Ref,
    arrived: Ref,
) -> None:
    """Step t: the gradients of query t and, slot by slot, of the index keys that it read."""
    half = gathered.fetch(slots, next_slots, table, rows, arrived)
    tiles = [rows[half, :, c, :] for c in range(rows.shape[2])]
    dots = _products(q, tiles)
    slopes = jnp.where(dots > 0, d_scores[0], 0.0)
    by_head = jnp.sum(slopes * dots, axis=1, keepdims=True)
    d_w[0] = jnp.broadcast_to(by_head, (by_head.shape[0], LANES)).T[:1]
    weighted = (slopes * _column(w[0])).astype(rows.dtype)
    for c, tile in enumerate(tiles):
        piece = slice(c * LANES, (c + 1) * LANES)
        d_q[0, :, piece] = mosaic_tpu.dot(weighted, tile, mosaic_tpu.ROWS_BY_COLUMNS)
        d_rows[0, :, piece] = mosaic_tpu.dot(weighted, q[0, :, piece], mosaic_tpu.FIRST_TO_FIRST)


def gradients(
    residuals: Residuals, d_kl_T: Float[Array, " T"], *, deterministic: bool = False
) -> tuple[Float[Array, "T J X"], Float[Array, "S X"], Float[Array, "T J"]]:
    """Return the gradients of sum_t d_kl[t] KL[t] by the indexer's q, k and w.

    Cotangents are rounded to the dtype of `k` before they are multiplied; sums are float32.

    Args:
        residuals: Of `kl_rows`.
        d_kl_T: float32 cotangent of each row's KL.
        deterministic: Add the rows of a key in an order that never changes; slower.

    Returns:
        Gradients of q and k in their dtype, and of w in float32.
    """
    (n_heads, dim), k = residuals.q.shape[1:], residuals.k
    table = _index_table(k)
    q, w = _index_queries(residuals.q, residuals.w)
    d_scores = residuals.grad * d_kl_T.astype(jnp.float32)[:, None, None]

    def call(slots: Array, arrays: Any) -> tuple[tuple[Array, Array], Array]:
        q = arrays[0]
        (n_queries, _, width), n_slots = q.shape, slots.shape[2]
        shapes = q.shape, (n_queries, 1, q.shape[1]), (n_queries, n_slots, width)
        d_q, d_w, d_rows = pl.pallas_call(
            _gradient_kernel,
            grid=gathered.grid_of(n_queries),
            in_specs=[
                *gathered.slot_specs(n_queries, n_slots),
                pl.BlockSpec(memory_space=pl.ANY),
                *(gathered.query_spec(x.shape[1:], n_queries) for x in arrays),
            ],
            out_specs=[gathered.query_spec(shape[1:], n_queries) for shape in shapes],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            scratch_shapes=gathered.scratch(n_slots, table.shape[1], table.dtype),
            compiler_params=gathered.compiler_params(),
            cost_estimate=pl.CostEstimate(
                flops=6 * n_slots * math.prod(q.shape),
                transcendentals=0,
                bytes_accessed=n_queries * n_slots * width * (4 + table.dtype.itemsize)
                + mosaic_tpu.total_bytes(slots, *arrays)
                + 4 * math.prod(q.shape),
            ),
            name="listed_kl_gradient",
        )(slots, slots, table, *arrays)
        return (d_q, d_w), d_rows

    shape = k.shape[0], table.shape[1] * LANES
    arrays = (q, w, d_scores)
    (d_q, d_w), d_k = gathered.add_by_chunks(call, residuals.slots, arrays, shape, deterministic)
    d_q, d_k = d_q[:, :n_heads, :dim], d_k[:, :dim]
    return d_q.astype(residuals.q.dtype), d_k.astype(k.dtype), d_w[:, 0, :n_heads]
