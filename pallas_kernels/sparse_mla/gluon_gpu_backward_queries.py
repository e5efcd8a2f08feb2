"""Query gradients of the Gluon backward: dQ = dS K over gathered key rows."""

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
from pallas_kernels.sparse_mla.gluon_gpu_backward_slots import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROPE,
    ROW,
    SHARED,
    load_indices,
    row_offsets,
)

HALF = gl.constexpr(
    256
)  # columns of a part: [0, 256), and [256, 512) with the rope columns [512, 576)
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
@no_type_check
def store_rows(ptr, acc):
    """Write 64 rows of dQ from column 0 of ptr on, in bf16."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    gl.store(ptr + rows[:, None] * ROW + cols[None, :], acc.to(gl.bfloat16))


@gluon.jit
@no_type_check
def sum_tiles(
    buffers, dq_ptr, part, GROUP: gl.constexpr, GROUPS: gl.constexpr, SIDE: gl.constexpr,
    SIDES: gl.constexpr, N_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dQ [64 heads, 256 columns, or 320 with the rope's] over all key tiles."""
    full, empty, k, k_rope, ds = buffers
    acc = gl.zeros([64, HALF], gl.float32, WIDE)
    if part == 1:
        rope = gl.zeros([64, ROPE], gl.float32, NARROW)
        for i in range(N_TILES):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            ds_tile = ds.index(stage * GROUPS + GROUP)
            acc = warpgroup_mma(ds_tile, k.index(stage * SIDES + SIDE), acc, is_async=True)
            rope = warpgroup_mma(ds_tile, k_rope.index(stage), rope, is_async=True)
            acc, rope = warpgroup_mma_wait(0, deps=[acc, rope])
            mbarrier.arrive(empty.index(stage), count=1)
        store_rows(dq_ptr + HALF, acc)
        store_rows(dq_ptr + 2 * HALF, rope)
    else:
        for i in range(N_TILES):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            ds_tile = ds.index(stage * GROUPS + GROUP)
            acc = warpgroup_mma(ds_tile, k.index(stage * SIDES + SIDE), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
        store_rows(dq_ptr, acc)


@gluon.jit
@no_type_check
def copy_tiles(
    buffers, kv_ptr, ds_ptr, idx_ptr, part, n_keys, N_SLOTS: gl.constexpr,
    GROUPS: gl.constexpr, SIDES: gl.constexpr, N_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warpgroup: key rows (zeros for an invalid slot) and dS of each tile."""
    full, empty, k, k_rope, ds = buffers
    rows = gl.arange(0, 64, gl.SliceLayout(1, hw.COPY))
    cols = gl.arange(0, HALF, gl.SliceLayout(0, hw.COPY))[None, :]
    rope_cols = gl.arange(0, ROPE, gl.SliceLayout(0, hw.COPY))[None, :]
    ds_src = ds_ptr + rows[:, None] * (N_TILES * 64) + rope_cols
    idx = load_indices(idx_ptr, rows, N_SLOTS)
    for i in range(N_TILES):
        stage = i % STAGES
        offset, ok = row_offsets(idx, n_keys)
        src = kv_ptr + offset
        idx = load_indices(idx_ptr, (i + 1) * 64 + rows, N_SLOTS)  # a tile ahead
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        if SIDES == 2:
            async_copy.async_copy_global_to_shared(k.index(stage * 2), src + cols, mask=ok)
            async_copy.async_copy_global_to_shared(
                k.index(stage * 2 + 1), src + (HALF + cols), mask=ok
            )
        else:
            async_copy.async_copy_global_to_shared(
                k.index(stage), src + (part * HALF + cols), mask=ok
            )
        if part == 1 or SIDES == 2:
            async_copy.async_copy_global_to_shared(
                k_rope.index(stage), src + (2 * HALF + rope_cols), mask=ok
            )
        for g in gl.static_range(GROUPS):
            async_copy.async_copy_global_to_shared(
                ds.index(stage * GROUPS + g), ds_src + (g * 64 * N_TILES * 64 + i * 64)
            )
        # Arrives when this thread's copies have landed.
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
@no_type_check
def query_gradients(
    kv_ptr, ds_ptr, idx_ptr, first_ptr, dq_in_ptr, dq_ptr, n_keys,
    N_HEADS: gl.constexpr, N_SLOTS: gl.constexpr, N_TILES: gl.constexpr,
):  # fmt: skip
    """dQ[t] = dS[t - first] K of the queries from first_ptr[0] on, into dq_ptr (dq_in_ptr is the same memory).

    128 heads: two programs a query, one a part of the columns; each warpgroup takes 64 heads. 64 heads: one program
    a query; each warpgroup takes a part.
    """
    GROUPS: gl.constexpr = N_HEADS // 64
    SIDES: gl.constexpr = 2 // GROUPS  # parts a program
    STAGES: gl.constexpr = 2 * GROUPS
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES * SIDES, 64, HALF], SHARED)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, ROPE], SHARED)
    ds = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, 64, 64], SHARED)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=128)  # every producer thread arrives by its copies
        mbarrier.init(empty.index(b), count=2)  # one arrival a consumer warpgroup
    here = gl.program_id(0) // GROUPS
    part = gl.program_id(0) % GROUPS
    t = gl.load(first_ptr) + here
    out = dq_ptr + t.to(gl.int64) * (N_HEADS * ROW)
    ds_here = ds_ptr + here.to(gl.int64) * (N_HEADS * N_TILES * 64)
    idx_here = idx_ptr + t.to(gl.int64) * N_SLOTS
    buffers = (full, empty, k, k_rope, ds)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (sum_tiles, (buffers, out, part, 0, 2, 0, 1, N_TILES, STAGES)),
                (sum_tiles, (buffers, out + 64 * ROW, part, 1, 2, 0, 1, N_TILES, STAGES)),
                (
                    copy_tiles,
                    (
                        buffers,
                        kv_ptr,
                        ds_here,
                        idx_here,
                        part,
                        n_keys,
                        N_SLOTS,
                        2,
                        1,
                        N_TILES,
                        STAGES,
                    ),
                ),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (sum_tiles, (buffers, out, 0, 0, 1, 0, 2, N_TILES, STAGES)),
                (sum_tiles, (buffers, out, 1, 0, 1, 1, 2, N_TILES, STAGES)),
                (
                    copy_tiles,
                    (buffers, kv_ptr, ds_here, idx_here, 0, n_keys, N_SLOTS, 1, 2, N_TILES, STAGES),
                ),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
