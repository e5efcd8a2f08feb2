"""Gathered rows on TPU: the table that the kernels copy from, and the copies.

A row lies in tiles of its own, [columns / 128, 128], so that one asynchronous copy brings it wherever it is. An invalid
slot points at one of a few rows of zeros behind the keys. One more column tells them apart: it makes their logit
`scale * -1e30`, so that the kernels mask nothing and no row of another key, which could be NaN, is read for them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.sparse_mla import pallas_tpu_ordered as ordered

SPARE_ROWS = 64  # invalid slots are spread over them: reads of one row would wait for each other
FLOOR = -1e25  # above the logit of an invalid slot for any scale over 1e-4, below any other
MIN_SCALE = 1e-4
HEAD_MULTIPLE = (
    32  # whole tiles; with 16 the compiler for tpu7x in libtpu 0.0.48 crashes on the backward
)
SLOT_MULTIPLE = 32  # rows of slots fill whole tiles of any dtype
ISSUE_UNROLL = 8
# Of the rows' gradients that wait to be added. Each chunk is a pass over the keys' sums: with half of it sparse
# attention's backward would move a third more at 131,072 keys.
CHUNK_BYTES = 2**29
CORES = 2  # of a v5p, which share a parallel axis; a single core takes both halves in turn


def n_tiles(dim: int) -> int:
    """Return how many tiles of 128 columns hold a row and the column of validity."""
    return dim // LANES + 1


def table_of(kv_SD: Float[Array, "S D"]) -> Float[Array, "R C L"]:
    """Lay keys out for copies of single rows, with the spare rows behind."""
    dim = kv_SD.shape[1]
    width = n_tiles(dim) * LANES
    table = jnp.pad(kv_SD, ((0, SPARE_ROWS), (0, width - dim)))
    return table.at[kv_SD.shape[0] :, dim].set(mosaic_tpu.MASKED).reshape(-1, width // LANES, LANES)


def queries_of(q_THD: Float[Array, "T H D"]) -> Float[Array, "T P W"]:
    """Append heads of zeros and the column that multiplies the rows' validity."""
    heads = -q_THD.shape[1] % HEAD_MULTIPLE
    dim = q_THD.shape[2]
    padded = jnp.pad(q_THD, ((0, 0), (0, heads), (0, n_tiles(dim) * LANES - dim)))
    return padded.at[:, :, dim].set(1)


def slots_of(topk_idx_TK: Int[Array, "T K"], n_keys: int) -> Int[Array, "T 1 P"]:
    """Point invalid slots at spare rows and append such slots up to whole tiles."""
    extra = -topk_idx_TK.shape[1] % SLOT_MULTIPLE
    idx = jnp.pad(topk_idx_TK.astype(jnp.int32), ((0, 0), (0, extra)), constant_values=-1)
    spare = n_keys + jnp.arange(idx.shape[1], dtype=jnp.int32) % SPARE_ROWS
    return jnp.where((idx >= 0) & (idx < n_keys), idx, spare)[:, None]


def grid_of(n_queries: int) -> tuple[int, int]:
    """Return how many cores' shares of queries there are, and the queries of a share; the last may be short."""
    share = -(-n_queries // CORES)
    return -(-n_queries // share), share


def query_spec(
    shape: tuple[int, ...], n_queries: int, ahead: int = 0, **memory: Any
) -> pl.BlockSpec:
    """Bring what a query of `grid_of`, or one ahead of it, needs; past the last query the last one again."""
    share = grid_of(n_queries)[1]

    def of_query(core: Any, t: Any) -> tuple[Any, int, int]:
        return jnp.minimum(core * share + t + ahead, n_queries - 1), 0, 0

    return pl.BlockSpec((1, *shape), of_query, **memory)


def slot_specs(n_queries: int, n_slots: int) -> list[pl.BlockSpec]:
    """Bring a query's slots, and the next query's, to scalar memory."""
    return [query_spec((1, n_slots), n_queries, ahead, memory_space=pltpu.SMEM) for ahead in (0, 1)]


def compiler_params() -> pltpu.CompilerParams:
    """Return how the kernels are compiled: shares of queries, each in order, as a step starts the next one's copies.

    `slots_of` has bounded every copy; the compiler's checks would take three quarters of the time of starting one.
    """
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        disable_bounds_checks=True,
    )


def scratch(n_slots: int, tiles: int, dtype: Any) -> list[Any]:
    """Return the rows of two queries and their semaphores."""
    return [pltpu.VMEM((2, n_slots, tiles, LANES), dtype), pltpu.SemaphoreType.DMA((2,))]


def fetch(slots: Ref, next_slots: Ref, table: Ref, rows: Ref, arrived: Ref) -> Any:
    """Start copying the next query's rows and wait for this one's; return which half of `rows` holds them.

    All of a query's copies are in flight at once, one query ahead of the products.
    """
    t = pl.program_id(1)
    here = t % 2

    def start(slots: Ref, half: Any) -> None:
        @pl.loop(0, rows.shape[1], unroll=ISSUE_UNROLL)
        def issue(i: Any) -> None:
            pltpu.make_async_copy(
                table.at[slots[0, 0, i]], rows.at[half, i], arrived.at[half]
            ).start()

    pl.when(t == 0)(lambda: start(slots, 0))
    pl.when(t + 1 < pl.num_programs(1))(lambda: start(next_slots, 1 - here))

    # The semaphore counts bytes: one wait of the whole half stands for all of its copies.
    pltpu.make_async_copy(rows.at[here], rows.at[here], arrived.at[here]).wait()
    return here


def add_by_chunks(
    call: Callable[[Array, Any], tuple[Any, Array]],
    slots_T1K: Int[Array, "T 1 K"],
    arrays: Any,
    shape: tuple[int, int],
    deterministic: bool,
) -> tuple[Any, Float[Array, "S W"]]:
    """Add what queries give to the rows that they list, a chunk of queries at a time and in their order.

    Args:
        call: Maps a chunk's (slots, arrays) to what each query keeps and float32 [chunk, K, W], a row for each slot.
        slots_T1K: int32 rows of the table, spare ones at S and behind it.
        arrays: Tree of what each query brings; the first axis is the query.
        shape: S and W.
        deterministic: Whether a chunk's rows are added in an order that never changes, or in XLA's.

    Returns:
        (what the queries keep, float32 sums of the keys' rows).
    """
    n_queries, _, n_slots = slots_T1K.shape
    n_keys, width = shape
    chunk = max(1, min(n_queries, CHUNK_BYTES // (4 * n_slots * width)))
    n_chunks = -(-n_queries // chunk)

    def split(x: Array) -> Array:
        return mosaic_tpu.pad_rows(x, n_chunks * chunk).reshape(n_chunks, chunk, *x.shape[1:])

    # Queries of padding read spare rows only.
    extra = n_chunks * chunk - n_queries
    slots = jnp.pad(slots_T1K, ((0, extra), (0, 0), (0, 0)), constant_values=n_keys)

    def add_chunk(sums: Array, piece: tuple[Array, Any]) -> tuple[Array, Any]:
        listed, queries = piece
        kept, rows = call(listed, queries)
        if deterministic:
            sums = ordered.add_rows(sums, listed.reshape(-1), rows.reshape(-1, width))
            return sums, kept
        return sums.at[listed[:, 0]].add(rows), kept

    n_sums = mosaic_tpu.round_up(n_keys + SPARE_ROWS, ordered.KEYS if deterministic else 1)
    zero = jnp.zeros((n_sums, width), jnp.float32)
    sums, kept = lax.scan(add_chunk, zero, (split(slots), jax.tree.map(split, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n_queries], kept), sums[:n_keys]


def check(q_THD: Any, kv_SD: Any, topk_idx_TK: Any, scale: float, vmem_rows: int) -> None:
    """Raise NotImplementedError, saying why, for what the kernels do not take.

    Args:
        q_THD: Queries.
        kv_SD: Keys.
        topk_idx_TK: Listed keys.
        scale: Factor on the logits.
        vmem_rows: Float32 rows of [K, D] that a kernel holds besides the gathered ones.
    """
    mosaic_tpu.check_floats(q_THD, kv_SD)
    if scale < MIN_SCALE:
        raise NotImplementedError(f"scale={scale} must be at least {MIN_SCALE}")
    tiles = n_tiles(kv_SD.shape[-1])
    n_slots = mosaic_tpu.round_up(topk_idx_TK.shape[-1], SLOT_MULTIPLE)
    itemsize = jnp.dtype(kv_SD.dtype).itemsize
    gathered = 2 * mosaic_tpu.round_up(tiles, 8) * LANES * itemsize
    used = n_slots * (gathered + vmem_rows * tiles * LANES * 4)
    if used > 0.75 * mosaic_tpu.VMEM_LIMIT:
        raise NotImplementedError(
            f"rows of {topk_idx_TK.shape[-1]} slots take {used} bytes of VMEM"
        )
