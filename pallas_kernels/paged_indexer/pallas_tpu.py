"""Exact top-k selection over keys in pages on TPU: the kernel copies pages by itself and no score leaves VMEM.

While a tile of keys is scored, the pages of the next one arrive. The keys are read once, where they lie.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu
from pallas_kernels.indexer_scores import pallas_tpu as scoring
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.topk_select import pallas_tpu as topk

MAX_TOKENS = 32  # new ones of a sequence, whose rows of ordered scores are held in VMEM at once
TILE_ROWS = 16  # of bfloat16; a page is whole tiles


def check(q_BTJX: Any, k_NX: Any, n_keys: int, *, k: int, page_size: int) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    scoring.check(q_BTJX, k_NX)
    topk.check(n_keys, k)
    if k_NX.shape[1] != LANES:
        raise NotImplementedError(f"pages are copied of {LANES} index dims, got {k_NX.shape[1]}")
    if page_size % TILE_ROWS or scoring.MAX_BLOCK_K % page_size:
        raise NotImplementedError(
            f"page_size={page_size} must be a multiple of {TILE_ROWS} that divides {scoring.MAX_BLOCK_K}"
        )
    if q_BTJX.shape[1] > MAX_TOKENS:
        raise NotImplementedError(f"takes up to {MAX_TOKENS} tokens, got {q_BTJX.shape[1]}")


def _kernel(
    last: Ref,
    table: Ref,
    start: Ref,
    end: Ref,
    q: Ref,
    w: Ref,
    cache: Ref,
    out: Ref,
    keys: Ref,
    tiles: Ref,
    arrived: Ref,
    *,
    k: int,
    page_size: int,
) -> None:
    """Step (sequence, j): order the scores of the j-th tile of keys; after the last one select."""
    b, j = pl.program_id(0), pl.program_id(1)
    here, block = j % 2, tiles.shape[1]

    def start_copies(tile: Any, half: Any) -> None:
        @pl.loop(0, block // page_size)
        def copy_page(p: Any) -> None:
            first = pl.multiple_of(
                table[0, 0, tile * (block // page_size) + p] * page_size, page_size
            )
            to = pl.ds(pl.multiple_of(p * page_size, page_size), page_size)
            pltpu.make_async_copy(
                cache.at[pl.ds(first, page_size)], tiles.at[half, to], arrived.at[half]
            ).start()

    pl.when((j == 0) & (last[b] > 0))(lambda: start_copies(0, 0))
    pl.when(j + 1 < last[b])(lambda: start_copies(j + 1, 1 - here))

    @pl.when(j < last[b])
    def order() -> None:
        # The semaphore counts bytes: one wait of the whole tile stands for all of its pages.
        pltpu.make_async_copy(tiles.at[here], tiles.at[here], arrived.at[here]).wait()
        column = pl.multiple_of(j * block, LANES)
        inputs = [q.at[0], tiles.at[here], w.at[0]]
        topk.score_tile(keys, (start.at[0], end.at[0]), inputs, column)

    @pl.when(j == pl.num_programs(1) - 1)
    def select() -> None:
        topk.write_list(out.at[0], keys, (0, last[b]), block, k)


def paged_indexer_topk(
    q_BTJX: Float[Array, "B T J X"],
    k_NX: Float[Array, "N X"],
    w_BTJ: Float[Array, "B T J"],
    table_BP: Int[Array, "B P"],
    *,
    k: int,
    page_size: int,
    end: Int[Array, "B T"],
) -> Int[Array, "B T K"]:
    """Select as `op.paged_indexer_topk` does, exactly by the scores of `indexer_scores.pallas_tpu`.

    Args:
        q_BTJX: Index queries, bfloat16 or float32.
        k_NX: Index keys of every cache row, of the same dtype.
        w_BTJ: Head weights with the scales folded in.
        table_BP: int32, each sequence's pages in order, all of them in the cache.
        k: Slots of each query.
        page_size: Rows of a page.
        end: int32, one past the last visible position.

    Returns:
        int32 positions in ascending order, then -1.

    Raises:
        NotImplementedError: As `check`.
    """
    (n_batch, n_tokens), n_keys = q_BTJX.shape[:2], table_BP.shape[1] * page_size
    check(q_BTJX, k_NX, n_keys, k=k, page_size=page_size)
    block = max(page_size, min(scoring.MAX_BLOCK_K, scoring.keys_per_block(n_keys)))
    padded = mosaic_tpu.round_up(n_keys, block)
    rows = mosaic_tpu.round_up(n_tokens, topk.TILE_ROWS["list"])
    heads, more = -q_BTJX.shape[2] % scoring.HEAD_MULTIPLE, rows - n_tokens
    q = jnp.pad(q_BTJX, ((0, 0), (0, more), (0, heads), (0, 0)))
    w = jnp.pad(w_BTJ.astype(jnp.float32), ((0, 0), (0, more), (0, heads)))
    bound = jnp.pad(jnp.clip(end, 0, n_keys).astype(jnp.int32), ((0, 0), (0, more)))[..., None]
    last = jnp.max(-(-bound // block), axis=(1, 2))
    table = jnp.pad(table_BP.astype(jnp.int32), ((0, 0), (0, (padded - n_keys) // page_size)))[
        :, None
    ]

    def of_sequence(b: Any, j: Any, last: Ref) -> tuple[Any, int, int]:
        return b, 0, 0

    n_heads, dim = q.shape[2:]
    slots = mosaic_tpu.round_up(k, LANES)
    bounds = pl.BlockSpec((1, rows, 1), of_sequence)
    out = pl.pallas_call(
        functools.partial(_kernel, k=k, page_size=page_size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n_batch, padded // block),
            in_specs=[
                pl.BlockSpec((1, 1, table.shape[2]), of_sequence, memory_space=pltpu.SMEM),
                bounds,
                bounds,
                pl.BlockSpec((1, rows, n_heads, dim), lambda b, j, last: (b, 0, 0, 0)),
                pl.BlockSpec((1, rows, n_heads), of_sequence),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, rows, slots), of_sequence),
            scratch_shapes=[
                pltpu.VMEM((rows, padded + LANES), jnp.int32),
                pltpu.VMEM((2, block, dim), k_NX.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n_batch, rows, slots), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * q.size * padded,
            transcendentals=0,
            bytes_accessed=n_batch * padded * dim * k_NX.dtype.itemsize
            + mosaic_tpu.total_bytes(q, w, table)
            + 4 * n_batch * rows * slots,
        ),
        name="paged_topk",
    )(last, table, jnp.zeros_like(bound), bound, q, w, k_NX)
    return out[:, :n_tokens, :k]
