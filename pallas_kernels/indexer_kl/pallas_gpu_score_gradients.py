"""Backward pass of the indexer's scores on Hopper, in Pallas Mosaic GPU.

With `x[t, j, s] = q[t, j] . k[s]` and a cotangent `d[t, s]` of the scores, the masked sum
`U[t, j] = sum_s d[t, s] 1[x > 0] k[s]` gives both `dq[t, j] = w[t, j] U[t, j]` and `dw[t, j] = q[t, j] . U[t, j]`; the
key side is `dk[s] = sum_tj d[t, s] w[t, j] 1[x > 0] q[t, j]`. Each is one attention-like kernel: a product, a mask in
registers, a second product with the masked tile as its register operand.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.indexer_scores import pallas_gpu as scores_gpu

HEADS = 64  # rows of one wgmma instruction: a query's heads; fewer are padded with zeros
MATH_GROUPS = 2
KEYS = 128  # a stage of the dq kernel, a block of the dk kernel: 64 a warpgroup
STAGE_QUERIES = 2  # of the dk kernel; a block of the dq kernel has as many, one a warpgroup
STAGES = 3  # in flight
WAVES = 6  # blocks a multiprocessor runs of the dk kernel
MATH_REGISTERS, LOAD_REGISTERS = 232, 40
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


def _tiles(dtype: jax.typing.DTypeLike, dim: int) -> Callable[[tuple[int, ...]], Any]:
    """Return the type of swizzled tiles in shared memory, given their shape."""
    swizzle = min(128, jnp.dtype(dtype).itemsize * dim)
    transforms = asm.operand(swizzle, dtype)
    return functools.partial(plgpu.SMEM, dtype=dtype, transforms=transforms)


def _zeros(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def _product(a: Any, b: Any, shape: tuple[int, int]) -> Array:
    """Return a @ b^T of two shared-memory tiles."""

    def body(acc_ref: Any) -> Array:
        plgpu.wgmma(acc_ref, a, b.transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def _accumulate(acc: Array, a: Array, b: Any) -> Array:
    """Return acc + a @ b, `a` in registers, `b` in shared memory."""

    def body(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b)

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _masked(x: Array, d: Array, axis: int) -> Array:
    """Return d where x > 0, else 0, in bfloat16; d varies along `axis`."""
    d = lax.broadcast_in_dim(d, x.shape, [axis])
    return jnp.where(x > 0, d, 0.0).astype(jnp.bfloat16)


def _query_body(*refs: Any) -> None:
    """Compute dq and dw of MATH_GROUPS queries, one a warpgroup, over the keys of their span.

    Barriers: `q_ready`, the queries have come; `ready[slot]`, a stage of keys and cotangents has come; `free[slot]`,
    both math warpgroups are done with it.
    """
    q, k, w, d, span, dq, dw, q_smem, k_smem, d_smem, dq_smem, dw_smem, *barriers = refs
    q_ready, ready, free = barriers
    b, block, wg = lax.axis_index("batch"), lax.axis_index("block"), lax.axis_index("wg")
    block = lax.axis_size("block") - 1 - block  # rows that see more keys start first
    begin, end = span[b, block, 0], span[b, block, 1]
    t0 = block * MATH_GROUPS

    @pl.when(wg < MATH_GROUPS)
    def _math() -> None:
        plgpu.set_max_registers(MATH_REGISTERS, action="increase")
        t = t0 + wg
        rows = pl.ds(t * HEADS, HEADS)
        dim = q_smem.shape[-1]
        plgpu.barrier_wait(q_ready)

        def stage(i: Array, acc: Array) -> Array:
            slot = lax.rem(i - begin, STAGES)
            plgpu.barrier_wait(ready.at[slot])
            d_col = plgpu.load(d_smem.at[slot, wg], layout=BY_COLUMN, optimized=False)
            x = _product(q_smem.at[wg], k_smem.at[slot], (HEADS, KEYS))
            acc = _accumulate(acc, _masked(x, d_col, 1), k_smem.at[slot])
            plgpu.barrier_arrive(free.at[slot])
            return acc

        acc = lax.fori_loop(begin, end, stage, _zeros((HEADS, dim)))
        q_rows = plgpu.load(q_smem.at[wg], layout=WGMMA, optimized=False).astype(jnp.float32)
        w_row = plgpu.load(w.at[b, rows], layout=BY_ROW, optimized=False)
        dw_smem[wg] = jnp.sum(acc * q_rows, axis=1)
        dq_smem[wg] = (acc * lax.broadcast_in_dim(w_row, acc.shape, [0])).astype(dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dw_smem.at[wg], dw.at[b, rows])
        plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq.at[b, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == MATH_GROUPS)
    def _load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        for g in range(MATH_GROUPS):
            plgpu.copy_gmem_to_smem(q.at[b, pl.ds((t0 + g) * HEADS, HEADS)], q_smem.at[g], q_ready)

        @pl.loop(begin, end)
        def _stage(i: Array) -> None:
            slot = lax.rem(i - begin, STAGES)

            @pl.when(i - begin >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            keys = pl.ds(i * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(k.at[b, keys], k_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(
                d.at[b, pl.ds(t0, MATH_GROUPS), keys], d_smem.at[slot], ready.at[slot]
            )


def _key_body(*refs: Any, split_stages: int) -> None:
    """Compute one split's share of dk of 128 keys, 64 a warpgroup, over the queries of their span.

    Barriers: `k_ready`, the keys have come; `ready[slot]`, a stage of queries, weights and cotangents has come;
    `free[slot]`, both math warpgroups are done with it.
    """
    q, k, w, d, span, dk, k_smem, q_smem, w_smem, d_smem, dk_smem, k_ready, ready, free = refs
    b, block, wg = lax.axis_index("batch"), lax.axis_index("block"), lax.axis_index("wg")
    split = lax.axis_index("split")
    lo = split * split_stages
    begin = jnp.clip(span[b, block, 0], lo, lo + split_stages)
    end = jnp.clip(span[b, block, 1], begin, lo + split_stages)
    columns = STAGE_QUERIES * HEADS
    key0 = block * KEYS

    @pl.when(wg < MATH_GROUPS)
    def _math() -> None:
        plgpu.set_max_registers(MATH_REGISTERS, action="increase")
        dim = q_smem.shape[-1]
        plgpu.barrier_wait(k_ready)

        def stage(i: Array, acc: Array) -> Array:
            slot = lax.rem(i - begin, STAGES)
            plgpu.barrier_wait(ready.at[slot])
            x = _product(k_smem.at[wg], q_smem.at[slot], (HEADS, columns))
            w_col = plgpu.load(w_smem.at[slot], layout=BY_COLUMN, optimized=False)
            for query in range(STAGE_QUERIES):
                part = slice(query * HEADS, (query + 1) * HEADS)
                d_row = plgpu.load(
                    d_smem.at[slot, query, pl.ds(wg * HEADS, HEADS)], layout=BY_ROW, optimized=False
                )
                d_row = lax.broadcast_in_dim(d_row, (HEADS, HEADS), [0])
                w_part = lax.broadcast_in_dim(w_col[part], (HEADS, HEADS), [1])
                g = jnp.where(x[:, part] > 0, w_part * d_row, 0.0).astype(jnp.bfloat16)
                acc = _accumulate(acc, g, q_smem.at[slot, part])
            plgpu.barrier_arrive(free.at[slot])
            return acc

        acc = lax.fori_loop(begin, end, stage, _zeros((HEADS, dim)))
        dk_smem[wg] = acc
        plgpu.commit_smem()
        own_keys = pl.ds(key0 + wg * HEADS, HEADS)
        plgpu.copy_smem_to_gmem(dk_smem.at[wg], dk.at[split, b, own_keys])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == MATH_GROUPS)
    def _load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        for g in range(MATH_GROUPS):
            plgpu.copy_gmem_to_smem(k.at[b, pl.ds(key0 + g * HEADS, HEADS)], k_smem.at[g], k_ready)

        @pl.loop(begin, end)
        def _stage(i: Array) -> None:
            slot = lax.rem(i - begin, STAGES)

            @pl.when(i - begin >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            rows = pl.ds(i * columns, columns)
            plgpu.copy_gmem_to_smem(q.at[b, rows], q_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(w.at[b, rows], w_smem.at[slot], ready.at[slot])
            queries = pl.ds(i * STAGE_QUERIES, STAGE_QUERIES)
            keys = pl.ds(key0, KEYS)
            plgpu.copy_gmem_to_smem(d.at[b, queries, keys], d_smem.at[slot], ready.at[slot])


@jax.jit
def score_gradients(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    d_scores_TS: Float[Array, "*B T S"],
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
) -> tuple[Float[Array, "*B T J X"], Float[Array, "*B S X"], Float[Array, "*B T J"]]:
    """Pull a cotangent of the indexer's scores back to q, k and w.

    Args:
        q_TJX: bfloat16 index queries, J in 1..64, X 64 or 128.
        k_SX: bfloat16 index keys.
        w_TJ: Head weights.
        d_scores_TS: float32 cotangent; 0 outside [start, end).
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.

    Returns:
        (dq in bfloat16, dk in float32, dw in float32). `d` and `d * w` are rounded to bfloat16 before they multiply;
        sums are float32, in a fixed order. A NaN key gives NaN to every query that reads its stage, seen or not.

    Raises:
        NotImplementedError: As `indexer_scores.pallas_gpu.check`.
    """
    scores_gpu.check(q_TJX, k_SX)
    *batch, n_queries, n_heads, dim = q_TJX.shape
    n_keys = k_SX.shape[-2]
    pad_t, pad_s, pad_j = -n_queries % MATH_GROUPS, -n_keys % KEYS, HEADS - n_heads

    def padded(x: Array, *tail: tuple[int, int]) -> Array:
        x = x.reshape(-1, *x.shape[len(batch) :])
        return jnp.pad(x, ((0, 0), *tail)) if any(p for _, p in tail) else x

    rows, keys, heads = (0, pad_t), (0, pad_s), (0, pad_j)
    q = padded(q_TJX, rows, heads, (0, 0))
    k = padded(k_SX, keys, (0, 0))
    w = padded(w_TJ.astype(jnp.float32), rows, heads)
    d = padded(d_scores_TS.astype(jnp.float32), rows, keys)
    first, last = (padded(x.astype(jnp.int32), rows) for x in (start, end))
    spans = scores_gpu.stage_spans(first, last, MATH_GROUPS, KEYS, n_keys)
    q = q.reshape(q.shape[0], -1, dim)
    w = w.reshape(w.shape[0], -1)
    dq, dw = _query_gradients(q, k, w, d, spans)
    dk = _key_gradients(q, k, w, d, key_spans(spans, k.shape[1] // KEYS))
    dq = dq.reshape(-1, n_queries + pad_t, HEADS, dim)[:, :n_queries, :n_heads]
    dw = dw.reshape(-1, n_queries + pad_t, HEADS)[:, :n_queries, :n_heads]
    return (
        dq.reshape(q_TJX.shape),
        dk[:, :n_keys].reshape(k_SX.shape),
        dw.reshape(w_TJ.shape),
    )


def key_spans(query_spans: Int[Array, "B N 2"], n_key_blocks: int) -> Int[Array, "B M 2"]:
    """Return the query stages [begin, end) that see any key of a block, from the key stages each sees."""
    n = query_spans.shape[1]
    block = jnp.arange(n_key_blocks)[:, None]
    sees = (query_spans[:, None, :, 0] <= block) & (block < query_spans[:, None, :, 1])
    index = jnp.arange(n, dtype=jnp.int32)
    begin = jnp.min(jnp.where(sees, index, n), axis=-1)
    end = jnp.max(jnp.where(sees, index + 1, 0), axis=-1)
    return jnp.stack([jnp.minimum(begin, end), end], axis=-1).astype(jnp.int32)


def _query_gradients(q: Array, k: Array, w: Array, d: Array, spans: Array) -> tuple:
    batch, n_rows, dim = q.shape
    operand = _tiles(jnp.bfloat16, dim)
    run = plgpu.kernel(
        _query_body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, n_rows), jnp.float32),
        ),
        grid=(spans.shape[1], batch),
        grid_names=("block", "batch"),
        kernel_name="indexer_query_gradients",
        num_threads=MATH_GROUPS + 1,
        thread_name="wg",
        scratch_types=(
            operand((MATH_GROUPS, HEADS, dim)),
            operand((STAGES, KEYS, dim)),
            plgpu.SMEM((STAGES, MATH_GROUPS, KEYS), jnp.float32),
            operand((MATH_GROUPS, HEADS, dim)),
            plgpu.SMEM((MATH_GROUPS, HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=MATH_GROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # keys and cotangents
            plgpu.Barrier(num_arrivals=MATH_GROUPS, num_barriers=STAGES),
        ),
        compiler_params=scores_gpu.PARAMS,
    )
    return run(q, k, w, d, spans)


def _key_gradients(q: Array, k: Array, w: Array, d: Array, spans: Array) -> Array:
    batch, n_keys, dim = k.shape
    n_stages = q.shape[1] // (HEADS * STAGE_QUERIES)
    n_blocks = n_keys // KEYS
    # Under a causal mask the blocks' work differs: enough parts that the chip evens it out.
    wanted = WAVES * dispatch.multiprocessors() // (batch * n_blocks)
    splits = min(max(1, wanted), n_stages)
    columns = STAGE_QUERIES * HEADS
    operand = _tiles(jnp.bfloat16, dim)
    run = plgpu.kernel(
        functools.partial(_key_body, split_stages=pl.cdiv(n_stages, splits)),
        out_type=jax.ShapeDtypeStruct((splits, *k.shape), jnp.float32),
        grid=(n_blocks, splits, batch),
        grid_names=("block", "split", "batch"),
        kernel_name="indexer_key_gradients",
        num_threads=MATH_GROUPS + 1,
        thread_name="wg",
        scratch_types=(
            operand((MATH_GROUPS, HEADS, dim)),
            operand((STAGES, columns, dim)),
            plgpu.SMEM((STAGES, columns), jnp.float32),
            plgpu.SMEM((STAGES, STAGE_QUERIES, KEYS), jnp.float32),
            _tiles(jnp.float32, dim)((MATH_GROUPS, HEADS, dim)),
            plgpu.Barrier(num_arrivals=MATH_GROUPS),
            plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),  # queries, weights, cotangents
            plgpu.Barrier(num_arrivals=MATH_GROUPS, num_barriers=STAGES),
        ),
        compiler_params=scores_gpu.PARAMS,
    )
    return jnp.sum(run(q, k, w, d, spans), axis=0)
