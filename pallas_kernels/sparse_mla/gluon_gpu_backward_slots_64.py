"""First step of the Gluon backward for up to 64 heads: one warpgroup makes P, the other dS."""

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
    LATENT,
    LEFT,
    MAX_LOG2_WEIGHT,
    PRODUCER_REGISTERS,
    ROPE,
    ROW,
    SCORES,
    SHARED,
    load_indices,
    row_offsets,
    slot_of_row,
    store_tile,
    tile_pointer,
)

STAGES = gl.constexpr(3)  # tiles of 64 rows x 576 columns in shared memory


@gluon.jit
@no_type_check
def weigh_slots(buffers, lse2_ptr, p_ptr, row, scratch_row, scale_log2, N_TILES: gl.constexpr):
    """P = hw.fast_exp2(scale_log2 Q K^T - lse2), to memory and through shared memory to the other warpgroup."""
    full, empty, latent, rope, p_shared, p_full, p_empty = buffers
    lse2_H = gl.load(lse2_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))
    p_out = tile_pointer(p_ptr, scratch_row, N_TILES * 64)
    mbarrier.wait(full.index(0), 0)  # ring item 0: Q
    q = latent.index(0).load(LEFT)
    q_rope = rope.index(0).load(LEFT)
    mbarrier.arrive(empty.index(0), count=2)  # its only reader arrives for both
    for i in range(N_TILES):
        stage = (i + 2) % STAGES
        mbarrier.wait(full.index(stage), ((i + 2) // STAGES) & 1)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        latent_T = latent.index(stage).permute((1, 0))
        s = warpgroup_mma(q, latent_T, s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage), count=1)
        p = hw.fast_exp2(gl.minimum(s * scale_log2 - lse2_H[:, None], MAX_LOG2_WEIGHT)).to(
            gl.bfloat16
        )
        mbarrier.wait(p_empty, (i & 1) ^ 1)  # the other warpgroup has read the last P
        p_shared.store(p)
        mbarrier.arrive(p_full, count=1)
        store_tile(p_out + i * 64, p)


@gluon.jit
@no_type_check
def differentiate_slots(buffers, delta_ptr, ds_ptr, row, scratch_row, scale, N_TILES: gl.constexpr):
    """Compute dS = P (dO V^T - delta) scale, to memory."""
    full, empty, latent, _rope, p_shared, p_full, p_empty = buffers
    delta_H = gl.load(delta_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) * scale
    ds_out = tile_pointer(ds_ptr, scratch_row, N_TILES * 64)
    mbarrier.wait(full.index(1), 0)  # ring item 1: dO
    do = latent.index(1).load(LEFT)
    mbarrier.arrive(empty.index(1), count=2)  # its only reader arrives for both
    for i in range(N_TILES):
        stage = (i + 2) % STAGES
        mbarrier.wait(full.index(stage), ((i + 2) // STAGES) & 1)
        dp = gl.zeros([64, 64], gl.float32, SCORES)
        latent_T = latent.index(stage).permute((1, 0))
        dp = warpgroup_mma(do, latent_T, dp, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.wait(p_full, i & 1)
        p = p_shared.load(SCORES)
        mbarrier.arrive(p_empty, count=1)
        ds = p.to(gl.float32) * (dp * scale - delta_H[:, None])
        store_tile(ds_out + i * 64, ds.to(gl.bfloat16))


@gluon.jit
@no_type_check
def copy_rows(
    buffers, q_ptr, do_ptr, kv_ptr, idx_ptr, row, n_keys, N_SLOTS: gl.constexpr,
    N_TILES: gl.constexpr,
):  # fmt: skip
    """The producer warpgroup: Q, dO, then the key tiles, all through one ring."""
    full, empty, latent, rope, _p_shared, _p_full, _p_empty = buffers
    rows = gl.arange(0, 64, gl.SliceLayout(1, hw.COPY))
    cols = gl.arange(0, LATENT, gl.SliceLayout(0, hw.COPY))[None, :]
    rope_cols = gl.arange(0, ROPE, gl.SliceLayout(0, hw.COPY))[None, :]
    head = (row + rows).to(gl.int64)[:, None]
    async_copy.async_copy_global_to_shared(latent.index(0), q_ptr + head * ROW + cols)
    async_copy.async_copy_global_to_shared(rope.index(0), q_ptr + head * ROW + (LATENT + rope_cols))
    # Arrives when this thread's copies have landed.
    async_copy.mbarrier_arrive(full.index(0), increment_count=False)
    async_copy.async_copy_global_to_shared(latent.index(1), do_ptr + head * LATENT + cols)
    async_copy.mbarrier_arrive(full.index(1), increment_count=False)
    slot = slot_of_row(rows)
    idx = load_indices(idx_ptr, slot, N_SLOTS)
    for i in range(N_TILES):
        stage = (i + 2) % STAGES
        offset, ok = row_offsets(idx, n_keys)
        src = kv_ptr + offset
        idx = load_indices(idx_ptr, (i + 1) * 64 + slot, N_SLOTS)  # a tile ahead
        mbarrier.wait(empty.index(stage), (((i + 2) // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(latent.index(stage), src + cols, mask=ok)
        async_copy.async_copy_global_to_shared(
            rope.index(stage), src + (LATENT + rope_cols), mask=ok
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
@no_type_check
def slots_of_64_heads(
    q_ptr, do_ptr, kv_ptr, idx_ptr, lse2_ptr, delta_ptr, first_ptr, p_ptr, ds_ptr,
    n_keys, scale_log2, scale, N_SLOTS: gl.constexpr, N_TILES: gl.constexpr,
):  # fmt: skip
    """P and dS [queries, 64, 64 N_TILES] of the queries from first_ptr[0] on; a program a query.

    As slots_of_128_heads, but Q and dO both live in registers, of one warpgroup each.
    """
    latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, LATENT], SHARED)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, ROPE], SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    p_full = mbarrier.allocate_mbarrier()
    p_empty = mbarrier.allocate_mbarrier()
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=128)  # every producer thread arrives by its copies
        mbarrier.init(empty.index(b), count=2)  # one arrival a consumer warpgroup
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    here = gl.program_id(0)
    t = gl.load(first_ptr) + here
    row = t * 64
    scratch = here * 64
    idx_here = idx_ptr + t.to(gl.int64) * N_SLOTS
    buffers = (full, empty, latent, rope, p_shared, p_full, p_empty)
    gl.warp_specialize(
        [
            (weigh_slots, (buffers, lse2_ptr, p_ptr, row, scratch, scale_log2, N_TILES)),
            (differentiate_slots, (buffers, delta_ptr, ds_ptr, row, scratch, scale, N_TILES)),
            (copy_rows, (buffers, q_ptr, do_ptr, kv_ptr, idx_here, row, n_keys, N_SLOTS, N_TILES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
