"""Attention to listed rows of a paged cache on TPU, in absorbed MQA form.

The listed rows are gathered by XLA, a block of queries at a time; then a kernel attends without logits leaving VMEM. A
copy of one row is not possible from the cache as it lies: two rows share each word of a bfloat16 tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.paged_mla import reference
from pallas_kernels.sparse_mla import pallas_tpu as sparse
from pallas_kernels.sparse_mla import pallas_tpu_rows as gathered

MAX_BLOCK_BYTES = 2**29  # of gathered rows


def check(
    q_THD: Any,
    latent_NC: Any,
    rope_NR: Any,
    rows_TK: Any,
    *,
    scale: float,
    latent_scale_NG: Any,
) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    mosaic_tpu.check_floats(q_THD, rope_NR, *(() if latent_scale_NG is not None else (latent_NC,)))
    if 0 in rows_TK.shape:
        raise NotImplementedError("an axis of length 0")
    width = jax.ShapeDtypeStruct((1, q_THD.shape[-1]), rope_NR.dtype)
    gathered.check(width, width, rows_TK, scale, 1)


def _kernel(rows: Ref, q: Ref, out: Ref, lse: Ref, *, scale: float) -> None:
    """Step t: attend query t to its rows."""
    tiles = [rows[0, :, c * LANES : (c + 1) * LANES] for c in range(rows.shape[2] // LANES)]
    sparse.attend(tiles, q, out, lse, scale)


def _attend(q: Array, rows_TKW: Array, value_dim: int, scale: float) -> tuple[Array, Array]:
    """Attend a block of queries to rows that lie in order."""
    n_queries, heads, width = q.shape
    n_slots, value_width = rows_TKW.shape[1], mosaic_tpu.round_up(value_dim, LANES)

    def of_query(t: Any) -> tuple[Any, int, int]:
        return t, 0, 0

    pairs = n_queries * heads * n_slots
    results = (
        jax.ShapeDtypeStruct((n_queries, heads, value_width), rows_TKW.dtype),
        jax.ShapeDtypeStruct((n_queries, 1, heads), jnp.float32),
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=(n_queries,),
        in_specs=[
            pl.BlockSpec((1, n_slots, width), of_query),
            pl.BlockSpec((1, heads, width), of_query),
        ],
        out_specs=[
            pl.BlockSpec((1, heads, value_width), of_query),
            pl.BlockSpec((1, 1, heads), of_query),
        ],
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (width + value_width),
            transcendentals=pairs,
            bytes_accessed=mosaic_tpu.total_bytes(rows_TKW, q, *results),
        ),
        name="paged_mla",
    )(rows_TKW, q)
    return out[:, :, :value_dim], lse[:, 0]


def paged_mla(
    q_THD: Float[Array, "T H D"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    latent_scale_NG: Float[Array, "N G"] | None,
    rows_TK: Int[Array, "T K"],
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attend as `op.paged_mla` does.

    Args:
        q_THD: Absorbed queries, bfloat16 or float32.
        latent_NC: Latents of the cache, of the same dtype, or float8_e4m3fn with scales.
        rope_NR: Rope keys of the cache, of the queries' dtype.
        latent_scale_NG: float32 scales of the latents, or None.
        rows_TK: int32 cache rows; slots outside [0, N) are ignored.
        scale: Factor on the logits.

    Returns:
        (attended latents in the dtype of `rope_NR`, lse float32); a row without valid slots gives 0 and -inf.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, latent_NC, rope_NR, rows_TK, scale=scale, latent_scale_NG=latent_scale_NG)
    (n_queries, n_heads, dim), n_rows = q_THD.shape, latent_NC.shape[0]
    q = gathered.queries_of(q_THD)
    extra = -rows_TK.shape[1] % gathered.SLOT_MULTIPLE
    slots = jnp.pad(rows_TK.astype(jnp.int32), ((0, 0), (0, extra)), constant_values=-1)

    def attend_block(block: tuple[Array, Array]) -> tuple[Array, Array]:
        q, slots = block
        rows = reference.read_rows(latent_NC, rope_NR, latent_scale_NG, slots)
        valid = (slots >= 0) & (slots < n_rows)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, q.shape[2] - dim)))
        # The column of validity, see `pallas_tpu_rows`.
        rows = rows.at[:, :, dim].set(jnp.where(valid, 0.0, mosaic_tpu.MASKED).astype(rows.dtype))
        return _attend(q, rows, latent_NC.shape[1], scale)

    row_bytes = slots.shape[1] * q.shape[2] * q.dtype.itemsize
    block = max(1, min(n_queries, MAX_BLOCK_BYTES // row_bytes))
    n_blocks = -(-n_queries // block)
    size = n_blocks * block
    padded = (
        mosaic_tpu.pad_rows(q, size),
        jnp.pad(slots, ((0, size - n_queries), (0, 0)), constant_values=-1),
    )
    blocks = tuple(x.reshape(n_blocks, block, *x.shape[1:]) for x in padded)
    out, lse = jax.lax.map(attend_block, blocks)
    out, lse = (x.reshape(size, *x.shape[2:])[:n_queries, :n_heads] for x in (out, lse))
    return out, lse
