"""The indexer's target on Hopper: attention weights summed over heads, in Pallas Mosaic GPU.

A block makes 128 queries x 256 keys of the sum and goes through the heads. Two consumers hold 64 x 256 sums in
registers and take turns: while one multiplies, the other exponentiates. Each head's queries and keys are used once, so
the tile is as large as the registers allow: reading them out of L2 is the limit.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels import padding
from pallas_kernels.dense_mla import tiles
from pallas_kernels.mosaic_hopper import Ref

LOG2E = math.log2(math.e)
ROWS, COLUMNS = 64, 128  # of a score product
TILE_Q, TILE_K = 2 * ROWS, 2 * COLUMNS  # of a block
THREADS = asm.GROUP
FIRST_FREE = asm.first_free_barrier(4)  # one to spare
TURN, Q_FREE, K_FREE = (FIRST_FREE + 2 * i for i in range(3))
BY_ROW, FULL = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA


class _Inputs(NamedTuple):
    q: Ref
    k: Ref
    bias: Ref  # -log-sum-exp in base 2, -inf for a query without keys
    start: Ref
    end: Ref
    span: Ref  # first and last + 1 key of each 128 queries


class _Shared(NamedTuple):
    q: Ref
    k: Ref
    bias: Ref
    q_full: Ref
    k_full: Ref


def _produce(refs: _Inputs, smem: _Shared, query: Array, key: Array, n_heads: Array) -> None:
    """Load the queries and keys of head after head."""

    @pl.loop(0, n_heads)
    def _load(head: Array) -> None:
        slot = lax.rem(head, jnp.int32(2))
        full = smem.q_full.at[slot]

        @pl.when(head >= 2)
        def _wait_q() -> None:  # both consumers have done the head before the last
            asm.sync(Q_FREE + slot, 3 * THREADS)

        for w in range(2):
            rows = pl.ds(query + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(refs.q.at[rows, head], smem.q.at[slot, w], full)
        rows = pl.ds(query, TILE_Q)
        plgpu.copy_gmem_to_smem(refs.bias.at[head, rows], smem.bias.at[slot], full)
        for j in range(2):

            @pl.when(head >= 1)
            def _wait_k(j: int = j) -> None:  # both consumers have done the last head
                asm.sync(K_FREE + j, 3 * THREADS)

            keys = pl.ds(key + j * COLUMNS, COLUMNS)
            plgpu.copy_gmem_to_smem(refs.k.at[keys, head], smem.k.at[j], smem.k_full.at[j])


def _consume(
    refs: _Inputs,
    smem: _Shared,
    out_ref: Ref,
    query: Array,
    key: Array,
    n_heads: Array,
    wg: Array,
    scale: float,
) -> None:
    """Sum the weights of 64 queries and 256 keys over the heads."""
    shape = (ROWS, COLUMNS)
    mine, other = TURN + wg, TURN + 1 - wg

    @pl.when(wg == 1)
    def _first_turn() -> None:  # the second consumer gives the first turn to the first
        asm.arrive(TURN, 2 * THREADS)

    def add_head(head: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        slot = lax.rem(head, jnp.int32(2))
        plgpu.barrier_wait(smem.q_full.at[slot])
        bias = plgpu.load(smem.bias.at[slot, pl.ds(wg * ROWS, ROWS)], layout=BY_ROW)
        added = []
        for j in range(2):
            plgpu.barrier_wait(smem.k_full.at[j])
            asm.sync(mine, 2 * THREADS)
            s = asm.fresh_product([(smem.q.at[slot, wg], smem.k.at[j])], swizzle=128)
            asm.arrive(other, 2 * THREADS)
            plgpu.wgmma_wait(0)
            s = lax.optimization_barrier(s)  # no use of it may move in front of the wait
            asm.arrive(K_FREE + j, 3 * THREADS)
            if j == 1:
                asm.arrive(Q_FREE + slot, 3 * THREADS)
            added.append(sums[j] + jnp.exp2(s * (scale * LOG2E) + asm.spread_rows(bias, shape)))
        return added[0], added[1]

    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), FULL)
    sums = lax.fori_loop(0, n_heads, add_head, (zero, zero))
    rows = pl.ds(query + wg * ROWS, ROWS)
    start = plgpu.load(refs.start.at[rows], layout=BY_ROW, optimized=False)
    end = plgpu.load(refs.end.at[rows], layout=BY_ROW, optimized=False)
    for j in range(2):
        first = key + j * COLUMNS
        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=FULL) + first
        allowed = (index >= asm.spread_rows(start, shape)) & (index < asm.spread_rows(end, shape))
        # Masked once, after the sum: a forbidden key's weight, even an infinite one, is dropped here.
        total = jnp.where(allowed, sums[j], 0.0)
        asm.store_tile(out_ref.at[rows, pl.ds(first, COLUMNS)], total)


def check(attn_q_THD: Array, attn_k_SHD: Array, scale: float) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    if not attn_q_THD.dtype == attn_k_SHD.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {attn_q_THD.dtype}, {attn_k_SHD.dtype}")
    padding.least(attn_q_THD.shape[-1], tiles.DIMS, "dims")
    if 0 in (*attn_q_THD.shape, *attn_k_SHD.shape):
        raise NotImplementedError("an axis of length 0")
    if not scale > 0:
        raise NotImplementedError(f"scale={scale} must be positive")


@functools.partial(jax.jit, static_argnames=("scale",))
def attention_target(
    attn_q_THD: Float[Array, "T H D"],
    attn_k_SHD: Float[Array, "S H D"],
    lse_TH: Float[Array, "T H"],
    start_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    *,
    scale: float,
) -> Float[Array, "T S"]:
    """Sum attention weights over heads: `p[t, s] = sum_h exp(scale * q[t, h] . k[s, h] - lse[t, h])`.

    Call it with some of the queries at a time: the result is the only array of T x S, and none has a head axis.

    Args:
        attn_q_THD: bfloat16 queries.
        attn_k_SHD: bfloat16 keys.
        lse_TH: float32 log-sum-exp of the attention over [start, end); -inf for a query without keys.
        start_T: int32, first valid key of each query.
        end_T: int32, one past the last valid key.
        scale: The attention's factor on the logits.

    Returns:
        float32, 0 outside [start, end). A row adds up to H, or to 0 without keys. Heads are added in order, so the
        result is the same from run to run.

    Raises:
        NotImplementedError: As `check`.
    """
    check(attn_q_THD, attn_k_SHD, scale)
    dim = padding.least(attn_q_THD.shape[-1], tiles.DIMS, "dims")
    attn_q_THD, attn_k_SHD = (padding.pad_columns(x, dim) for x in (attn_q_THD, attn_k_SHD))
    n_queries, n_keys = attn_q_THD.shape[0], attn_k_SHD.shape[0]
    pad = ((0, 0), (0, -n_queries % TILE_Q))
    bias = jnp.where(jnp.isfinite(lse_TH), -LOG2E * lse_TH, -jnp.inf).T
    bias = jnp.pad(bias, pad, constant_values=-jnp.inf)
    start, end = tiles.clip_ranges(start_T, end_T, n_keys, TILE_Q)
    some = end > start
    first = jnp.min(jnp.where(some, start, n_keys).reshape(-1, TILE_Q), axis=1)
    last = jnp.max(jnp.where(some, end, 0).reshape(-1, TILE_Q), axis=1)
    span = jnp.stack([first, last], axis=1).astype(jnp.int32)
    n_tiles_q, n_tiles_k = span.shape[0], -(-n_keys // TILE_K)

    def body(*refs: Ref, **scratch: Any) -> None:
        inputs, smem = _Inputs._make(refs[:-1]), _Shared(**scratch)
        tile_q, wg = lax.axis_index("tile_q"), lax.axis_index("wg")
        query, key = tile_q * TILE_Q, lax.axis_index("tile_k") * TILE_K
        used = (key < inputs.span[tile_q, 1]) & (key + TILE_K > inputs.span[tile_q, 0])
        n_heads = jnp.where(used, inputs.q.shape[1], 0)

        @pl.when(wg == 2)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _produce(inputs, smem, query, key, n_heads)

        @pl.when(wg < 2)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            _consume(inputs, smem, refs[-1], query, key, n_heads, wg, scale)

    def tiled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=asm.operand(128))

    target = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n_tiles_q * TILE_Q, n_tiles_k * TILE_K), jnp.float32),
        scratch_types=_Shared(
            q=tiled(2, 2, ROWS, dim),
            k=tiled(2, COLUMNS, dim),
            bias=plgpu.SMEM((2, TILE_Q), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=3, num_barriers=2),
            k_full=plgpu.Barrier(num_barriers=2),
        )._asdict(),
        grid=(n_tiles_k, n_tiles_q),
        grid_names=("tile_k", "tile_q"),
        num_threads=3,
        thread_name="wg",
        compiler_params=asm.PARAMS,
        kernel_name="indexer_target",
    )(tiles.pad_rows(attn_q_THD, 8), tiles.pad_rows(attn_k_SHD, 8), bias, start, end, span)
    return target[:n_queries, :n_keys]
