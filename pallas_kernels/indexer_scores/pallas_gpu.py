"""Lightning indexer scores on Hopper, in Pallas Mosaic GPU.

A block owns a few queries, whose heads stay in shared memory, and streams the keys that any of them may see. One
warpgroup loads by TMA; four multiply, each its own two queries (of 64 heads) with every key tile, so that some are in
their epilogue while others keep the tensor cores busy.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.fp8 import op as fp8_op
from pallas_kernels.indexer_scores import pallas_gpu_head_sum as mma

MAX_HEADS = 64
HEAD_DIMS = (64, 128)
REGISTERS = 2**16  # of a multiprocessor
TMA_ROWS = 8  # the tiled TMA view counts rows in eights
MAX_COLUMNS = 128  # queries x heads of a warpgroup: its accumulator and weights fit 112 registers
MAX_OWN_QUERIES = 4  # the queries' bounds and addresses take registers too
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
# Lane bit 0 picks the query of each pair, as after mma.reduce_quads.
BY_QUERY = plgpu.Layout.TILED(
    plgpu.Tiling(((2,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(16), -2),
    vector_dim=-1,
)
SCALAR = plgpu.Layout.WG_SPLAT(())
PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes.

    Attributes:
        stage_keys: Keys of a pipeline stage, a multiple of 64.
        stages: Key stages in flight.
        math_groups: Warpgroups that multiply.
        math_registers: Registers of a thread of theirs.
        load_registers: Registers of a thread of the loading warpgroup.
    """

    stage_keys: int
    stages: int
    math_groups: int = 4
    math_registers: int = 112
    load_registers: int = 32

    def __post_init__(self) -> None:
        """Refuse a split of registers that would wait for ever: only those of the launch can move."""
        groups = self.math_groups + 1
        launched = REGISTERS // (groups * asm.GROUP) // 8 * 8 * groups
        wanted = self.math_groups * self.math_registers + self.load_registers
        if wanted > launched:
            raise ValueError(
                f"math_registers={self.math_registers} and load_registers={self.load_registers} "
                f"take {wanted} a thread of each warpgroup, the launch has {launched}"
            )


def default_config(*, fp8: bool) -> Config:
    """Choose tile sizes: the fastest of those measured on an H200 at 4096 x 8192, 64 x 128."""
    return Config(stage_keys=128, stages=6 if fp8 else 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Static sizes of a launch.

    Attributes:
        batch: Sequences.
        queries: Queries of a sequence.
        keys: Keys of a sequence.
        n_blocks: Query blocks of a sequence.
        splits: Parts that the keys are cut into.
        split_stages: Key stages of a part.
    """

    batch: int
    queries: int
    keys: int
    n_blocks: int
    splits: int
    split_stages: int


def _score_stage(
    refs: tuple, arrays: tuple, scalars: tuple, *, cfg: Config, shape: mma.TileShape
) -> None:
    """Multiply a stage's keys by a warpgroup's queries, sum the heads and store the scores."""
    keys, queries, out, *key_scale = refs
    weights, first, last = (asm.elements(x) for x in arrays)
    row0, n_rows, key0 = (asm.scalar(x) for x in scalars)
    element_type = ir.MemRefType(keys.type).element_type
    n_keys = mma.i32(ir.MemRefType(out.type).shape[-1])
    key_descs, query_descs, tile_step = mma.descriptors(keys, queries, shape)
    lane, row = mma.lane_and_row()
    odd = arith.andi(lane, mma.i32(1))
    for tile in range(cfg.stage_keys // mma.WGMMA_ROWS):
        key_tile = mma.add_steps(key_descs, tile * tile_step)
        registers = mma.multiply(key_tile, query_descs, element_type, shape.columns)
        key = arith.addi(key0, arith.addi(row, mma.i32(tile * mma.WGMMA_ROWS)))
        key_exists = mma.less(key, n_keys)
        scale = [
            mma.load_if(key_exists, mma.element_pointer(s, mma.i32(0), key)) for s in key_scale
        ]
        sums = mma.weighted_sums(mma.wait(registers), weights, shape)
        for pair, score in enumerate(mma.reduce_quads(sums, lane)):
            query = arith.addi(odd, mma.i32(2 * pair))
            score = arith.mulf(score, scale[0]) if scale else score
            allowed = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, key, first[pair]), mma.less(key, last[pair])
            )
            score = arith.select(allowed, score, mma.f32(-math.inf))
            # The last block may lack queries and the last stage keys: those have no place in `out`.
            exists = arith.andi(mma.less(query, n_rows), key_exists)
            mma.store_if(exists, mma.element_pointer(out, arith.addi(row0, query), key), score)


def _fill(refs: tuple, scalars: tuple, *, n_queries: int) -> None:
    """Write -inf to the keys [begin, end) of a warpgroup's queries."""
    (out,) = refs
    row0, n_rows, begin, end = (asm.scalar(x) for x in scalars)
    always = utils.c(1, ir.IntegerType.get_signless(1))
    for query in range(n_queries):
        stop = arith.select(mma.less(mma.i32(query), n_rows), end, begin)  # no row, no keys
        start = arith.addi(begin, mma.thread_in_group())
        with mma.for_range(start, stop, asm.GROUP) as key:
            pointer = mma.element_pointer(out, arith.addi(row0, mma.i32(query)), key)
            mma.store_if(always, pointer, mma.f32(-math.inf))


def _body(*refs: Any, cfg: Config, problem: Problem, shape: mma.TileShape) -> None:
    """Score one block of queries against one part of the keys.

    Barriers: `q_ready[g]`, warpgroup g's queries have come; `k_ready[slot]`, a stage of keys has come;
    `k_free[slot]`, every math warpgroup is done with it.
    """
    q, k, w, first, last, span, *scale, out, q_smem, k_smem, q_ready, k_ready, k_free = refs
    wg = lax.axis_index("wg")
    # Later queries see more keys under a causal mask: they start first, for a short tail.
    work = problem.batch * problem.n_blocks * problem.splits - 1 - lax.axis_index("work")
    split, block = lax.rem(work, problem.splits), lax.div(work, problem.splits)
    b, block = lax.div(block, problem.n_blocks), lax.rem(block, problem.n_blocks)
    split_begin = split * problem.split_stages
    split_end = split_begin + problem.split_stages
    begin = jnp.clip(span[b, block, 0], split_begin, split_end)
    end = jnp.clip(span[b, block, 1], begin, split_end)
    n_own = shape.columns // shape.heads
    t0 = block * cfg.math_groups * n_own
    operand = plgpu.RefType(asm.operand(shape.swizzle, k.dtype))

    def math_group() -> None:
        t = t0 + wg * n_own
        row0, n_rows = b * problem.queries + t, problem.queries - t
        fill = plgpu.inline_mgpu(arg_types=((plgpu.RefType(),), (SCALAR,) * 4))(
            lambda _, *args: _fill(*args, n_queries=n_own)
        )
        score = plgpu.inline_mgpu(
            arg_types=(
                (operand, operand, *[plgpu.RefType()] * (1 + len(scale))),
                (BY_COLUMN, BY_QUERY, BY_QUERY),
                (SCALAR,) * 3,
            )
        )(lambda _, *args: _score_stage(*args, cfg=cfg, shape=shape))
        bounds = (split_begin, begin, end, split_end)
        lo, mid_lo, mid_hi, hi = (jnp.minimum(x * cfg.stage_keys, problem.keys) for x in bounds)
        fill((out,), (row0, n_rows, lo, mid_lo))
        fill((out,), (row0, n_rows, mid_hi, hi))

        @pl.when(begin < end)
        def _scores() -> None:
            def load(ref: Any, layout: Any) -> Array:
                return plgpu.load(ref, layout=layout, optimized=False)

            own = pl.ds(t, n_own)
            weights = load(w.at[b, pl.ds(t * shape.heads, shape.columns)], BY_COLUMN)
            arrays = (weights, load(first.at[b, own], BY_QUERY), load(last.at[b, own], BY_QUERY))
            plgpu.barrier_wait(q_ready.at[wg])

            @pl.loop(begin, end)
            def _stage(i: Array) -> None:
                slot = lax.rem(i - begin, cfg.stages)
                plgpu.barrier_wait(k_ready.at[slot])
                tiles = (k_smem.at[slot], q_smem.at[wg], out, *[s.at[b] for s in scale])
                score(tiles, arrays, (row0, n_rows, i * cfg.stage_keys))
                plgpu.barrier_arrive(k_free.at[slot])

    def load_group() -> None:
        for g in range(cfg.math_groups):
            rows = pl.ds((t0 + g * n_own) * shape.heads, shape.columns)
            plgpu.copy_gmem_to_smem(q.at[b, rows], q_smem.at[g], q_ready.at[g])

        @pl.loop(begin, end)
        def _stage(i: Array) -> None:
            slot = lax.rem(i - begin, cfg.stages)

            @pl.when(i - begin >= cfg.stages)  # the slot was used: every reader must be done
            def _reused() -> None:
                plgpu.barrier_wait(k_free.at[slot])

            keys = pl.ds(i * cfg.stage_keys, cfg.stage_keys)
            plgpu.copy_gmem_to_smem(k.at[b, keys], k_smem.at[slot], k_ready.at[slot])

    @pl.when(wg < cfg.math_groups)
    def _math() -> None:
        plgpu.set_max_registers(cfg.math_registers, action="increase")
        math_group()

    @pl.when(wg == cfg.math_groups)
    def _load() -> None:
        # In blocks with nothing to load too: the others wait for the registers given up here.
        plgpu.set_max_registers(cfg.load_registers, action="decrease")
        pl.when(begin < end)(load_group)


def check(q_TJX: Array, k_SX: Array, *, fp8: bool = False) -> None:
    """Raise NotImplementedError, saying why, if the kernel cannot take the operands."""
    n_heads, dim = q_TJX.shape[-2:]
    if n_heads > MAX_HEADS or dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"{n_heads} heads x {dim}: takes at most {MAX_HEADS} x {HEAD_DIMS}"
        )
    if 0 in (*q_TJX.shape, *k_SX.shape):
        raise NotImplementedError("an axis of length 0")
    if not fp8 and not q_TJX.dtype == k_SX.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q_TJX.dtype} and {k_SX.dtype}")


@functools.partial(jax.jit, static_argnames=("fp8", "config"))
def scores(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    *,
    fp8: bool = False,
    config: Config | None = None,
) -> Float[Array, "*B T S"]:
    """Score each key in [start, end) for each query; the rest is -inf.

    Args:
        q_TJX: bfloat16 index queries, at most 64 heads of 64 or 128; any float with `fp8`.
        k_SX: Index keys, as `q_TJX`.
        w_TJ: Head weights.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        fp8: Multiply e4m3 operands, quantised as by `fp8.quantize` with one scale a row, which is exact for rows that
            `fp8.simulate` rounded. Hopper's tensor cores keep fewer bits of sums of e4m3 products than of bfloat16
            ones, so scores differ from the bfloat16 kernel's in their fourth or fifth digit.
        config: Tile sizes; None chooses.

    Returns:
        float32 scores, accumulated in float32 in a fixed order. NaN in a key, a query or a weight gives NaN where it is
        used.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_TJX, k_SX, fp8=fp8)
    *batch, n_queries, n_heads, dim = q_TJX.shape
    heads = max(mma.COLUMN_GROUP, 1 << (n_heads - 1).bit_length())
    more = (0, heads - n_heads)  # heads of zeros with weight 0
    q = jnp.pad(q_TJX.reshape(-1, n_queries, n_heads, dim), ((0, 0), (0, 0), more, (0, 0)))
    w = w_TJ.astype(jnp.float32).reshape(-1, n_queries, n_heads)
    w = jnp.pad(w, ((0, 0), (0, 0), more))
    k = k_SX.reshape(-1, *k_SX.shape[-2:])
    key_scale = None
    if fp8:
        q, query_scale = quantize_rows(q)
        k, key_scale = quantize_rows(k)
        w = w * query_scale * 2.0**mma.SATURATION_BITS
    first, last = (x.astype(jnp.int32).reshape(-1, n_queries) for x in (start, end))
    out = launch(q, k, w, first, last, key_scale, config or default_config(fp8=fp8))
    return out.reshape(*batch, n_queries, k.shape[1])


def quantize_rows(x: Float[Array, "*B X"]) -> tuple[Float[Array, "*B X"], Float[Array, "*B"]]:
    """Quantise to e4m3 with a power-of-two scale a row; a row with NaN gets the scale NaN.

    The kernel's saturating ReLU makes NaN to 0, so NaN has to travel in the scales.
    """
    x8, scale = fp8_op.quantize(x, block=x.shape[-1])
    return x8, jnp.where(scale > 0, scale, jnp.nan)[..., 0]


def launch(
    q: Array, k: Array, w: Array, first: Array, last: Array, key_scale: Array | None, cfg: Config
) -> Array:
    """Score [B, T, J, X] queries against [B, S, X] keys, J a power of two in 8..64.

    Args:
        q: bfloat16, or e4m3 with `key_scale`.
        k: Likewise.
        w: float32 [B, T, J]; with `key_scale`, times the queries' scales and 2^26.
        first: int32 [B, T].
        last: int32 [B, T].
        key_scale: float32 [B, S], or None.
        cfg: Tile sizes.
    """
    batch, n_queries, heads, dim = q.shape
    n_keys = k.shape[1]
    shape = mma.TileShape(
        columns=min(MAX_COLUMNS, MAX_OWN_QUERIES * heads),
        heads=heads,
        swizzle=min(128, dim * q.dtype.itemsize),
        saturate=key_scale is not None,
    )
    block_queries = cfg.math_groups * shape.columns // heads
    n_blocks = pl.cdiv(n_queries, block_queries)
    n_stages = pl.cdiv(n_keys, cfg.stage_keys)
    splits = choose_splits(batch * n_blocks, n_stages, dispatch.multiprocessors())
    problem = Problem(
        batch=batch,
        queries=n_queries,
        keys=n_keys,
        n_blocks=n_blocks,
        splits=splits,
        split_stages=pl.cdiv(n_stages, splits),
    )
    pad = n_blocks * block_queries - n_queries  # rows [0, 0) see no key
    w = jnp.pad(w, ((0, 0), (0, pad), (0, 0))).reshape(batch, -1)
    first, last = (jnp.pad(x, ((0, 0), (0, pad))) for x in (first, last))
    span = stage_spans(first, last, block_queries, cfg.stage_keys, n_keys)
    k = jnp.pad(k, ((0, 0), (0, -n_keys % TMA_ROWS), (0, 0)))
    q = q.reshape(batch, n_queries * heads, dim)
    operand = functools.partial(
        plgpu.SMEM, dtype=q.dtype, transforms=asm.operand(shape.swizzle, q.dtype)
    )
    run = plgpu.kernel(
        functools.partial(_body, cfg=cfg, problem=problem, shape=shape),
        out_type=jax.ShapeDtypeStruct((batch, n_queries, n_keys), jnp.float32),
        grid=(batch * n_blocks * splits,),
        grid_names=("work",),
        kernel_name="indexer_scores",
        num_threads=cfg.math_groups + 1,
        thread_name="wg",
        scratch_types=(
            operand((cfg.math_groups, shape.columns, dim)),
            operand((cfg.stages, cfg.stage_keys, dim)),
            plgpu.Barrier(num_barriers=cfg.math_groups),
            plgpu.Barrier(num_barriers=cfg.stages),
            plgpu.Barrier(num_arrivals=cfg.math_groups, num_barriers=cfg.stages),
        ),
        compiler_params=PARAMS,
    )
    return run(q, k, w, first, last, span, *([] if key_scale is None else [key_scale]))


def choose_splits(n_blocks: int, n_stages: int, sms: int) -> int:
    """Choose how many parts to cut the stages of a block into, so that the blocks fill the chip evenly."""
    startup = 8  # stages' worth of time before a block's first product

    def time(splits: int) -> int:
        return -(-n_blocks * splits // sms) * (-(-n_stages // splits) + startup)

    return min(range(1, min(n_stages, sms) + 1), key=time)


def stage_spans(
    first: Int[Array, "B T"], last: Int[Array, "B T"], block: int, stage_keys: int, n_keys: int
) -> Int[Array, "B N 2"]:
    """Return the key stages [begin, end) that any row of each block of rows needs; empty is begin == end."""
    first, last = jnp.maximum(first, 0), jnp.minimum(last, n_keys)
    empty = first >= last
    rows = (first.shape[0], -1, block)
    lo = jnp.min(jnp.where(empty, n_keys, first).reshape(rows), axis=-1) // stage_keys
    hi = -(-jnp.max(jnp.where(empty, 0, last).reshape(rows), axis=-1) // stage_keys)
    return jnp.stack([jnp.minimum(lo, hi), hi], axis=-1).astype(jnp.int32)
