"""Attention to listed keys on TPU: each query's rows are gathered by asynchronous copies. Forward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.sparse_mla import pallas_tpu_rows as gathered


def check(q_THD: Any, kv_SD: Any, topk_idx_TK: Any, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take; any widths and heads are taken."""
    del value_dim
    gathered.check(q_THD, kv_SD, topk_idx_TK, scale, 1)


def attend(
    tiles: list[Array],
    q: Ref,
    out: Ref,
    lse: Ref,
    scale: float,
    valid: Bool[Array, "1 K"] | None = None,
) -> None:
    """Attend a query, heads on sublanes, to rows that are given in tiles of 128 columns.

    Rows that are not valid have their logits masked; without `valid` their own columns see to that.
    """
    logits = functools.reduce(
        lambda a, b: a + b,
        (
            mosaic_tpu.dot(q[0, :, c * LANES : (c + 1) * LANES], tile, mosaic_tpu.LAST_TO_LAST)
            for c, tile in enumerate(tiles)
        ),
    )
    logits *= scale
    if valid is not None:
        logits = jnp.where(valid, logits, mosaic_tpu.MASKED)
    # An invalid slot's logit is far below the floor: its weight is 0 even in a row without any key.
    peak = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), gathered.FLOOR)
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=1, keepdims=True)
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    for c in range(out.shape[2] // LANES):
        weighted = mosaic_tpu.dot(
            weights.astype(tiles[c].dtype), tiles[c], mosaic_tpu.ROWS_BY_COLUMNS
        )
        out[0, :, c * LANES : (c + 1) * LANES] = (weighted / divisor).astype(out.dtype)
    column = jnp.where(some, peak + jnp.log(divisor), -jnp.inf)
    lse[0] = jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _kernel(
    slots: Ref,
    next_slots: Ref,
    table: Ref,
    q: Ref,
    out: Ref,
    lse: Ref,
    rows: Ref,
    arrived: Ref,
    *,
    scale: float,
) -> None:
    """Step t: attend query t to its rows."""
    half = gathered.fetch(slots, next_slots, table, rows, arrived)
    attend([rows[half, :, c, :] for c in range(rows.shape[2])], q, out, lse, scale)


def forward(
    q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    topk_idx_TK: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "T H U"], Float[Array, "T H"]]:
    """Attend each query to its listed keys.

    Weights are rounded to the dtype of the rows before they multiply the values; logits, sums and output accumulate in
    float32. Rows of K slots are held in VMEM twice: while one query is worked on, the next one's rows arrive.

    Args:
        q_THD: Queries, bfloat16 or float32.
        kv_SD: Keys of the same dtype; the values are the first `value_dim` columns.
        topk_idx_TK: int32, slots outside [0, S) are ignored.
        scale: Factor on the logits.
        value_dim: Columns of the values.

    Returns:
        (out in the dtype of `kv`, lse float32, natural log); a row without valid slots gives 0 and -inf.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, kv_SD, topk_idx_TK, scale=scale, value_dim=value_dim)
    n_queries, n_heads = q_THD.shape[:2]
    q, table = gathered.queries_of(q_THD), gathered.table_of(kv_SD)
    slots = gathered.slots_of(topk_idx_TK, kv_SD.shape[0])
    n_slots, heads, width = slots.shape[2], q.shape[1], q.shape[2]
    value_width = mosaic_tpu.round_up(value_dim, LANES)

    pairs = n_queries * heads * n_slots
    results = (
        jax.ShapeDtypeStruct((n_queries, heads, value_width), kv_SD.dtype),
        jax.ShapeDtypeStruct((n_queries, 1, heads), jnp.float32),
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=gathered.grid_of(n_queries),
        in_specs=[
            *gathered.slot_specs(n_queries, n_slots),
            pl.BlockSpec(memory_space=pl.ANY),
            gathered.query_spec((heads, width), n_queries),
        ],
        out_specs=[
            gathered.query_spec((heads, value_width), n_queries),
            gathered.query_spec((1, heads), n_queries),
        ],
        out_shape=results,
        scratch_shapes=gathered.scratch(n_slots, table.shape[1], kv_SD.dtype),
        compiler_params=gathered.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (width + value_width),
            transcendentals=pairs,
            bytes_accessed=n_queries * n_slots * width * kv_SD.dtype.itemsize
            + mosaic_tpu.total_bytes(slots, q, *results),
        ),
        name="sparse_mla_forward",
    )(slots, slots, table, q)
    return out[:, :n_heads, :value_dim], lse[:, 0, :n_heads]
