"""Attention to listed keys on TPU: gradients.

A kernel gathers each query's rows again and writes what the query adds to each of them; XLA, or where the order of the
sum matters a kernel, adds those to the keys' gradient, a chunk of queries at a time. Weights and slopes are kept
transposed, slots on sublanes and heads on lanes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.sparse_mla import pallas_tpu_rows as gathered

ROWS_OF_OUTPUT = 3  # float32 [K, D]: a block of the output twice, and sums on their way to it


def check(q_THD: Any, kv_SD: Any, topk_idx_TK: Any, *, scale: float, value_dim: int) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take; any widths and heads are taken."""
    del value_dim
    gathered.check(q_THD, kv_SD, topk_idx_TK, scale, ROWS_OF_OUTPUT)


def _kernel(
    slots: Ref,
    next_slots: Ref,
    table: Ref,
    q: Ref,
    d_out: Ref,
    lse: Ref,
    delta: Ref,
    d_q: Ref,
    d_rows: Ref,
    rows: Ref,
    arrived: Ref,
    *,
    scale: float,
) -> None:
    """Step t: the gradients of query t and, slot by slot, of the rows it read."""
    half = gathered.fetch(slots, next_slots, table, rows, arrived)
    pieces = [slice(c * LANES, (c + 1) * LANES) for c in range(rows.shape[2])]
    value_pieces = pieces[: d_out.shape[2] // LANES]
    tiles = [rows[half, :, c, :] for c in range(rows.shape[2])]
    logits, d_weights = (
        functools.reduce(
            lambda a, b: a + b,
            (
                mosaic_tpu.dot(tiles[c], x[0, :, piece], mosaic_tpu.LAST_TO_LAST)
                for c, piece in enumerate(chosen)
            ),
        )
        for x, chosen in ((q, pieces), (d_out, value_pieces))
    )
    weights = jnp.exp(logits * scale - lse[0])
    slopes = (weights * (d_weights - delta[0]) * scale).astype(rows.dtype)
    weights = weights.astype(rows.dtype)
    for c, piece in enumerate(pieces):
        d_q[0, :, piece] = mosaic_tpu.dot(slopes, tiles[c], mosaic_tpu.FIRST_TO_FIRST)
        d_tile = mosaic_tpu.dot(slopes, q[0, :, piece], mosaic_tpu.ROWS_BY_COLUMNS)
        if c < len(value_pieces):
            d_tile += mosaic_tpu.dot(weights, d_out[0, :, piece], mosaic_tpu.ROWS_BY_COLUMNS)
        d_rows[0, :, piece] = d_tile


def _call(
    table: Array, slots: Array, arrays: tuple[Array, Array, Array, Array], scale: float
) -> tuple[Array, Array]:
    """Return the gradients of a chunk of queries and of the rows that they read, float32."""
    q, d_out, *_ = arrays
    n_queries, heads, width = q.shape
    n_slots, value_width = slots.shape[2], d_out.shape[2]

    row = gathered.query_spec((1, heads), n_queries)
    pairs = n_queries * heads * n_slots
    results = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=gathered.grid_of(n_queries),
        in_specs=[
            *gathered.slot_specs(n_queries, n_slots),
            pl.BlockSpec(memory_space=pl.ANY),
            gathered.query_spec((heads, width), n_queries),
            gathered.query_spec((heads, value_width), n_queries),
            row,
            row,
        ],
        out_specs=[
            gathered.query_spec((heads, width), n_queries),
            gathered.query_spec((n_slots, width), n_queries),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((n_queries, heads, width), jnp.float32),
            jax.ShapeDtypeStruct((n_queries, n_slots, width), jnp.float32),
        ],
        scratch_shapes=gathered.scratch(n_slots, table.shape[1], table.dtype),
        compiler_params=gathered.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (3 * width + 2 * value_width),
            transcendentals=pairs,
            bytes_accessed=n_queries * n_slots * width * (4 + table.dtype.itemsize)
            + mosaic_tpu.total_bytes(slots, *arrays)
            + 4 * math.prod(q.shape),
        ),
        name="sparse_mla_backward",
    )(slots, slots, table, *arrays)
    return results[0], results[1]


def backward(
    q_THD: Float[Array, "T H D"],
    kv_SD: Float[Array, "S D"],
    topk_idx_TK: Int[Array, "T K"],
    out_THU: Float[Array, "T H U"],
    lse_TH: Float[Array, "T H"],
    d_out_THU: Float[Array, "T H U"],
    d_lse_TH: Float[Array, "T H"],
    *,
    scale: float,
    value_dim: int,
    deterministic: bool = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "S D"]]:
    """Return the gradients of queries and keys; a row without valid slots has none.

    Args:
        q_THD: Queries, bfloat16 or float32.
        kv_SD: Keys of the same dtype.
        topk_idx_TK: int32, slots outside [0, S) are ignored; a duplicate counts once a slot.
        out_THU: Output of the forward; ignored where lse is -inf.
        lse_TH: float32 log-sum-exp of the forward.
        d_out_THU: Cotangent of the output.
        d_lse_TH: Cotangent of the log-sum-exp; ignored where it is -inf.
        scale: Factor on the logits.
        value_dim: Columns of the values.
        deterministic: Add the rows of a key in an order that never changes; slower.

    Returns:
        (dq, dkv) in the dtypes of q and kv; sums are float32.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, kv_SD, topk_idx_TK, scale=scale, value_dim=value_dim)
    n_heads, dim = q_THD.shape[1:]
    n_keys = kv_SD.shape[0]
    table, slots = gathered.table_of(kv_SD), gathered.slots_of(topk_idx_TK, n_keys)
    some = jnp.isfinite(lse_TH)
    delta = jnp.sum(out_THU.astype(jnp.float32) * d_out_THU.astype(jnp.float32), axis=-1)
    q = gathered.queries_of(q_THD)
    heads, width = q.shape[1] - n_heads, q.shape[2]
    d_out = jnp.where(some[..., None], d_out_THU, 0).astype(kv_SD.dtype)
    columns = mosaic_tpu.round_up(value_dim, LANES) - value_dim
    numbers = (jnp.where(some, x, 0.0) for x in (lse_TH, delta - d_lse_TH))
    arrays = (
        q,
        jnp.pad(d_out, ((0, 0), (0, heads), (0, columns))),
        *(jnp.pad(x, ((0, 0), (0, heads)))[:, None] for x in numbers),
    )

    def call(slots: Array, arrays: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        return _call(table, slots, arrays, scale)

    shape = (n_keys, width)
    d_q, d_table = gathered.add_by_chunks(call, slots, arrays, shape, deterministic)
    d_q = d_q[:, :n_heads, :dim]
    return d_q.astype(q_THD.dtype), d_table[:, :dim].astype(kv_SD.dtype)
