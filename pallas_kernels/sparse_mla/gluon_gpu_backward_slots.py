"""First step of the Gluon backward: the softmax weight P and its gradient dS of every slot, in bf16."""

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

LATENT = gl.constexpr(512)  # value dims: the first columns of a key row
ROPE = gl.constexpr(64)
ROW = gl.constexpr(576)
BLOCK = gl.constexpr(128)  # columns a shared-memory block of a key tile
# 2^64 bounds P of an invalid slot, whose row is zeros: a finite P times a zero row stays 0 in dQ, and the key
# gradient of an invalid slot is dropped, so slots need no mask here.
MAX_LOG2_WEIGHT = gl.constexpr(64.0)
# Without 224 registers ptxas serialises every wgmma of the three-warpgroup kernels (its warning C7510).
CONSUMER_REGISTERS = gl.constexpr(224)
PRODUCER_REGISTERS = gl.constexpr(56)

# Accumulator of 64 heads x 64 keys, its form as the left operand, and the form that leaves for memory: 16
# consecutive columns a thread, so that each thread writes whole 32-byte sectors.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
)
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))


@gluon.jit
@no_type_check
def slot_of_row(row):
    """Slot within its tile of each shared-memory row.

    A thread's accumulator columns 8 j + 2 c + e (its lane gives c) become the consecutive slots 16 c + 2 j + e.
    """
    return ((row >> 1) & 3) * 16 + (row >> 3) * 2 + (row & 1)


@gluon.jit
@no_type_check
def store_tile(ptr, tile_HN):
    """Write 64 heads x 64 slots in slot order; see slot_of_row."""
    ordered_HN = tile_HN.reshape([64, 8, 4, 2]).permute((0, 2, 1, 3)).reshape([64, 64])
    gl.store(ptr, gl.convert_layout(ordered_HN, STORED))


@gluon.jit
@no_type_check
def tile_pointer(ptr, row, n_slots: gl.constexpr):
    """Pointers of 64 heads x the first 64 slots, in the layout of store_tile."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, STORED))
    cols = gl.arange(0, 64, gl.SliceLayout(0, STORED))
    return ptr + (row + rows).to(gl.int64)[:, None] * n_slots + cols[None, :]


@gluon.jit
@no_type_check
def load_indices(idx_ptr, slot, n_slots):
    """Key indices of slots; -1 beyond the list."""
    return gl.load(idx_ptr + slot, mask=slot < n_slots, other=-1)


@gluon.jit
@no_type_check
def row_offsets(idx, n_keys):
    """Element offsets of key rows [64, 1] and which are valid; an invalid one reads as zeros."""
    ok = (idx >= 0) & (idx < n_keys)
    return gl.where(ok, idx, 0).to(gl.int64)[:, None] * ROW, ok[:, None]


@gluon.jit
@no_type_check
def weigh_heads(
    buffers, heads, row, scratch_row, scale_log2, scale,
    GROUP: gl.constexpr, N_TILES: gl.constexpr,
):  # fmt: skip
    """One warpgroup, 64 of 128 heads: S = Q K^T and dP = dO V^T block by block, then P and dS.

    Q (latent part) stays in registers. dO and Q's rope part are in shared memory.
    """
    ready, full, empty, k, k_rope, do, q_rope = buffers
    lse2_ptr, delta_ptr, p_ptr, ds_ptr = heads
    rows = GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    lse2_H = gl.load(lse2_ptr + row + rows)
    delta_H = gl.load(delta_ptr + row + rows) * scale
    p_out = tile_pointer(p_ptr, scratch_row + GROUP * 64, N_TILES * 64)
    ds_out = tile_pointer(ds_ptr, scratch_row + GROUP * 64, N_TILES * 64)
    # The ring's first two tiles are the queries of group 0 and of group 1; both groups release both.
    if GROUP == 1:
        for b in gl.static_range(4):
            mbarrier.wait(full.index(b), 0)
            mbarrier.arrive(empty.index(b), count=1)
    mbarrier.wait(full.index(0), GROUP)
    q0 = k.index(0).load(LEFT)
    mbarrier.wait(full.index(1), GROUP)
    q1 = k.index(1).load(LEFT)
    mbarrier.wait(full.index(2), GROUP)
    q2 = k.index(2).load(LEFT)
    mbarrier.wait(full.index(3), GROUP)
    q3 = k.index(3).load(LEFT)
    for b in gl.static_range(4):
        mbarrier.arrive(empty.index(b), count=1)
    if GROUP == 0:
        for b in gl.static_range(4):
            mbarrier.wait(full.index(b), 1)
            mbarrier.arrive(empty.index(b), count=1)
    mbarrier.wait(ready, 0)
    for i in range(N_TILES):
        z = hw.opaque_zero()
        phase = i & 1
        s = gl.zeros([64, 64], gl.float32, SCORES)
        dp = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier.wait(full.index(0), phase)
        kt = k.index(z).permute((1, 0))
        s = warpgroup_mma(q0, kt, s, use_acc=False, is_async=True)
        dp = warpgroup_mma(do.index(z + GROUP * 4), kt, dp, use_acc=False, is_async=True)
        mbarrier.wait(full.index(1), phase)
        kt = k.index(z + 1).permute((1, 0))
        s = warpgroup_mma(q1, kt, s, is_async=True)
        dp = warpgroup_mma(do.index(z + GROUP * 4 + 1), kt, dp, is_async=True)
        # Two younger wgmma groups may run on; block 0's two are done, so the producer may refill it.
        s, dp = warpgroup_mma_wait(2, deps=[s, dp])
        mbarrier.arrive(empty.index(0), count=1)
        mbarrier.wait(full.index(2), phase)
        kt = k.index(z + 2).permute((1, 0))
        s = warpgroup_mma(q2, kt, s, is_async=True)
        dp = warpgroup_mma(do.index(z + GROUP * 4 + 2), kt, dp, is_async=True)
        s, dp = warpgroup_mma_wait(2, deps=[s, dp])
        mbarrier.arrive(empty.index(1), count=1)
        mbarrier.wait(full.index(3), phase)
        kt = k.index(z + 3).permute((1, 0))
        s = warpgroup_mma(q3, kt, s, is_async=True)
        dp = warpgroup_mma(do.index(z + GROUP * 4 + 3), kt, dp, is_async=True)
        s, dp = warpgroup_mma_wait(2, deps=[s, dp])
        mbarrier.arrive(empty.index(2), count=1)
        mbarrier.wait(full.index(4), phase)
        kt = k_rope.index(z).permute((1, 0))
        s = warpgroup_mma(q_rope.index(z + GROUP), kt, s, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        mbarrier.arrive(empty.index(3), count=1)
        mbarrier.arrive(empty.index(4), count=1)
        p = hw.fast_exp2(gl.minimum(s * scale_log2 - lse2_H[:, None], MAX_LOG2_WEIGHT))
        ds = p * (dp * scale - delta_H[:, None])
        store_tile(p_out + i * 64, p.to(gl.bfloat16))
        store_tile(ds_out + i * 64, ds.to(gl.bfloat16))


@gluon.jit
@no_type_check
def copy_blocks(buffers, sources, row, n_keys, N_SLOTS: gl.constexpr, N_TILES: gl.constexpr):
    """The producer warpgroup: Q of both groups through the ring, dO beside it, then the key tiles."""
    ready, full, empty, k, k_rope, do, q_rope = buffers
    q_ptr, do_ptr, kv_ptr, idx_ptr = sources
    rows = gl.arange(0, 64, gl.SliceLayout(1, hw.COPY))
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, hw.COPY))[None, :]
    rope_cols = gl.arange(0, ROPE, gl.SliceLayout(0, hw.COPY))[None, :]
    head = (row + rows).to(gl.int64)[:, None]
    for g in gl.static_range(2):
        q_src = q_ptr + (head + g * 64) * ROW
        do_src = do_ptr + (head + g * 64) * LATENT
        for b in gl.static_range(4):
            if g == 1:
                mbarrier.wait(empty.index(b), 0)
            async_copy.async_copy_global_to_shared(k.index(b), q_src + (b * BLOCK + cols))
            # Arrives when this thread's copies have landed.
            async_copy.mbarrier_arrive(full.index(b), increment_count=False)
        async_copy.async_copy_global_to_shared(q_rope.index(g), q_src + (LATENT + rope_cols))
        for b in gl.static_range(4):
            async_copy.async_copy_global_to_shared(do.index(g * 4 + b), do_src + (b * BLOCK + cols))
    async_copy.mbarrier_arrive(ready, increment_count=False)
    slot = slot_of_row(rows)
    idx = load_indices(idx_ptr, slot, N_SLOTS)
    for i in range(N_TILES):
        offset, ok = row_offsets(idx, n_keys)
        src = kv_ptr + offset
        idx = load_indices(idx_ptr, (i + 1) * 64 + slot, N_SLOTS)  # a tile ahead
        for b in gl.static_range(4):
            mbarrier.wait(empty.index(b), (i & 1) ^ 1)
            async_copy.async_copy_global_to_shared(k.index(b), src + (b * BLOCK + cols), mask=ok)
            async_copy.mbarrier_arrive(full.index(b), increment_count=False)
        mbarrier.wait(empty.index(4), (i & 1) ^ 1)
        async_copy.async_copy_global_to_shared(k_rope.index(0), src + (LATENT + rope_cols), mask=ok)
        async_copy.mbarrier_arrive(full.index(4), increment_count=False)


@gluon.jit
@no_type_check
def slots_of_128_heads(
    q_ptr, do_ptr, kv_ptr, idx_ptr, lse2_ptr, delta_ptr, first_ptr, p_ptr, ds_ptr,
    n_keys, scale_log2, scale, N_SLOTS: gl.constexpr, N_TILES: gl.constexpr,
):  # fmt: skip
    """P and dS [queries, 128, 64 N_TILES] of the queries from first_ptr[0] on; a program a query.

    P = exp2(scale_log2 q.k - lse2), dS = P (dO.V - delta) scale. Each key row is read once for all 128 heads: two
    warpgroups share the tile. Shared memory 216 KiB: dO 128, Q's rope part 16, one key tile 72, refilled block by
    block.
    """
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, BLOCK], SHARED)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, ROPE], SHARED)
    do = gl.allocate_shared_memory(gl.bfloat16, [8, 64, BLOCK], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, ROPE], SHARED)
    ready = mbarrier.allocate_mbarrier()
    full = mbarrier.allocate_mbarrier(batch=5)
    empty = mbarrier.allocate_mbarrier(batch=5)
    mbarrier.init(ready, count=128)  # every producer thread arrives by its copies
    for b in gl.static_range(5):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(empty.index(b), count=2)  # one arrival a consumer warpgroup
    here = gl.program_id(0)
    t = gl.load(first_ptr) + here
    row = t * 128
    buffers = (ready, full, empty, k, k_rope, do, q_rope)
    sources = (q_ptr, do_ptr, kv_ptr, idx_ptr + t.to(gl.int64) * N_SLOTS)
    heads = (lse2_ptr, delta_ptr, p_ptr, ds_ptr)
    gl.warp_specialize(
        [
            (weigh_heads, (buffers, heads, row, here * 128, scale_log2, scale, 0, N_TILES)),
            (weigh_heads, (buffers, heads, row, here * 128, scale_log2, scale, 1, N_TILES)),
            (copy_blocks, (buffers, sources, row, n_keys, N_SLOTS, N_TILES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
