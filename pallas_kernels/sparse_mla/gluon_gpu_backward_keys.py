"""Key gradients of the Gluon backward: dKV rows += dS^T Q and P^T dO, added to memory row by row."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pallas_kernels import gluon_hopper as hw
from pallas_kernels.sparse_mla.gluon_gpu_backward_queries import HALF, NARROW, WIDE
from pallas_kernels.sparse_mla.gluon_gpu_backward_slots import (
    CONSUMER_REGISTERS,
    LATENT,
    PRODUCER_REGISTERS,
    ROPE,
    ROW,
    SHARED,
    load_indices,
)

STAGES = gl.constexpr(2)  # P and dS tiles in flight, one a consumer warpgroup


@gluon.constexpr_function
@no_type_check
def added_layout(width, fixed):
    """Layout [64, width] in which a row leaves: 128 bytes, 8 lanes of 4 columns or 16 lanes of an int64 column.

    From the accumulator itself a quad would add 32 bytes of each of 8 rows: measured 1.45 times slower.
    """
    high = [[0, 1 << b] for b in range(5, width.bit_length() - 1)]
    if fixed:
        lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]]
        registers = [[1, 0], [2, 0], [8, 0], [0, 16], *high]
    else:
        lanes = [[0, 4], [0, 8], [0, 16], [2, 0], [4, 0]]
        registers = [[0, 1], [0, 2], [1, 0], [8, 0], *high]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
@no_type_check
def add_rows(dkv_ptr, acc, idx_ptr, tile, n_keys, unit, N_SLOTS: gl.constexpr, FIXED: gl.constexpr):
    """dkv[idx[i]] += acc[i] for the valid slots of a tile; dkv_ptr points at the first column of acc."""
    width: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = added_layout(width, FIXED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, width, gl.SliceLayout(0, layout))
    idx = load_indices(idx_ptr, tile * 64 + rows, N_SLOTS)
    ok = (idx >= 0) & (idx < n_keys)
    ptr = dkv_ptr + gl.where(ok, idx, 0).to(gl.int64)[:, None] * ROW + cols[None, :]
    value = gl.convert_layout(acc, layout)
    if FIXED:
        value = (value * unit).to(gl.int64)  # integer sums do not depend on their order
    # Invalid slots are masked: their P is arbitrary.
    gl.atomic_add(ptr, value, mask=ok[:, None], sem="relaxed", scope="gpu")


@gluon.jit
@no_type_check
def sum_heads(buffers, target, GROUP: gl.constexpr, N_SLOTS: gl.constexpr, FIXED: gl.constexpr):
    """One warpgroup, every second tile: dKV [64 keys, 256 or 320 columns], summed over all heads, added once."""
    ready, full, empty, wide, rope, tiles = buffers
    dkv_ptr, idx_ptr, part, first, n_tiles, n_keys, unit = target
    mbarrier.wait(ready, 0)
    for j in range((n_tiles + 1 - GROUP) // 2):
        stage = GROUP + hw.opaque_zero()
        z = stage - GROUP
        tile = first + 2 * j + GROUP
        mbarrier.wait(full.index(stage), j & 1)
        p_T = tiles.index(stage).permute((1, 0))
        ds_T = tiles.index(STAGES + stage).permute((1, 0))
        acc = gl.zeros([64, HALF], gl.float32, WIDE)
        acc = warpgroup_mma(p_T, wide.index(z), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(ds_T, wide.index(z + 1), acc, is_async=True)
        if part == 1:
            acc_rope = gl.zeros([64, ROPE], gl.float32, NARROW)
            acc_rope = warpgroup_mma(ds_T, rope.index(z), acc_rope, use_acc=False, is_async=True)
            acc_rope = warpgroup_mma_wait(0, deps=[acc_rope])
            add_rows(dkv_ptr + LATENT, acc_rope, idx_ptr, tile, n_keys, unit, N_SLOTS, FIXED)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        add_rows(dkv_ptr + part * HALF, acc, idx_ptr, tile, n_keys, unit, N_SLOTS, FIXED)


@gluon.jit
@no_type_check
def copy_heads(buffers, sources, part, n_tiles, N_HEADS: gl.constexpr, N_TILES: gl.constexpr):
    """The producer warpgroup: Q and dO of all heads (a part of the columns), then P and dS tiles."""
    ready, full, empty, wide, rope, tiles = buffers
    q_ptr, do_ptr, p_ptr, ds_ptr = sources
    head = gl.arange(0, N_HEADS, gl.SliceLayout(1, hw.COPY))[:, None]
    cols = gl.arange(0, HALF, gl.SliceLayout(0, hw.COPY))[None, :]
    slots = gl.arange(0, 64, gl.SliceLayout(0, hw.COPY))[None, :]
    async_copy.async_copy_global_to_shared(
        wide.index(0), do_ptr + head * LATENT + (part * HALF + cols)
    )
    async_copy.async_copy_global_to_shared(wide.index(1), q_ptr + head * ROW + (part * HALF + cols))
    if part == 1:
        async_copy.async_copy_global_to_shared(rope.index(0), q_ptr + head * ROW + (LATENT + slots))
    # Arrives when this thread's copies have landed.
    async_copy.mbarrier_arrive(ready, increment_count=False)
    offset = head * (N_TILES * 64) + slots
    for i in range(n_tiles):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(tiles.index(stage), p_ptr + offset + i * 64)
        async_copy.async_copy_global_to_shared(
            tiles.index(STAGES + stage), ds_ptr + offset + i * 64
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
@no_type_check
def key_gradients(
    q_ptr, do_ptr, p_ptr, ds_ptr, idx_ptr, first_ptr, unit_ptr, dkv_in_ptr, dkv_ptr,
    n_queries, n_keys, N_HEADS: gl.constexpr, N_SLOTS: gl.constexpr, N_TILES: gl.constexpr,
    SPAN: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Add the key gradients of n_queries queries from first_ptr[0] on to dkv_ptr (dkv_in_ptr is the same memory).

    Programs: span of SPAN tiles (slowest), query, part of the columns. float32 sums, or with FIXED int64 counts of
    1 / unit_ptr[0]. All heads are summed before a row is added, so memory sees each row once a query.
    """
    wide = gl.allocate_shared_memory(gl.bfloat16, [2, N_HEADS, HALF], SHARED)  # dO, Q
    rope = gl.allocate_shared_memory(gl.bfloat16, [1, N_HEADS, ROPE], SHARED)  # Q's
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, N_HEADS, 64], SHARED)  # P, dS
    ready = mbarrier.allocate_mbarrier()
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    mbarrier.init(ready, count=128)  # every producer thread arrives by its copies
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(empty.index(b), count=1)  # a stage has one consumer warpgroup
    part = gl.program_id(0) % 2
    here = (gl.program_id(0) // 2) % n_queries
    first = (gl.program_id(0) // 2) // n_queries * SPAN
    n_tiles = gl.minimum(SPAN, N_TILES - first)
    t = gl.load(first_ptr) + here
    if FIXED:
        dkv_ptr = dkv_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    unit = gl.load(unit_ptr)
    head = t.to(gl.int64) * N_HEADS
    scratch = here.to(gl.int64) * (N_HEADS * N_TILES * 64) + first * 64
    idx_here = idx_ptr + t.to(gl.int64) * N_SLOTS
    buffers = (ready, full, empty, wide, rope, tiles)
    target = (dkv_ptr, idx_here, part, first, n_tiles, n_keys, unit)
    sources = (q_ptr + head * ROW, do_ptr + head * LATENT, p_ptr + scratch, ds_ptr + scratch)
    gl.warp_specialize(
        [
            (sum_heads, (buffers, target, 0, N_SLOTS, FIXED)),
            (sum_heads, (buffers, target, 1, N_SLOTS, FIXED)),
            (copy_heads, (buffers, sources, part, n_tiles, N_HEADS, N_TILES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
