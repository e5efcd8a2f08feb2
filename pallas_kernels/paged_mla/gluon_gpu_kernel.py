"""Device code of paged sparse MLA on Hopper, in Gluon: 64 heads of one query against a slice of its listed rows.

A program has three warpgroups. Rows come in pairs of 64-row tiles (0 and 1); each consumer group computes the logits
and the weights of its own tile and one half of the value dims of both, so that one group's softmax runs under the
other group's matrix products. The producer group gathers the rows.

    left group : S0 = Q K0^T, P0 = softmax part, O[:, :256] += P0 K0[:, :256] + P1 K1[:, :256]
    right group: S1 = Q K1^T, P1 = softmax part, O[:, 256:] += P1 K1[:, 256:] + P0 K0[:, 256:512]

A tile lies in shared memory as left (256 dims), right (256) and rope (64): 3 x 72 KiB with the queries'. The weights
that the other group needs are handed over in the tile's rope part, which is dead once the tile's logits are known.

Source: the split of the work is FlashMLA's (sm90 sparse kernels); pages, splits and FP8 rows are this file's.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pallas_kernels import gluon_combine
from pallas_kernels import gluon_hopper as hw
from pallas_kernels.paged_mla import gluon_gpu_tiles as tiles
from pallas_kernels.paged_mla.gluon_gpu_fp8 import allocate_stage, produce_fp8
from pallas_kernels.paged_mla.gluon_gpu_tiles import (
    HALF,
    HEADS,
    ROPE,
    ROW_COPY,
    STEP,
    TILE,
    TILE_SHARED,
    TWO_GROUPS,
)

LOWEST = gl.constexpr(-1e30)  # start of the running maximum: finite, so that no inf - inf arises
LN_2 = gl.constexpr(0.6931471805599453)
REGISTERS = gl.constexpr(504)  # a thread of each group, together

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
HEAD_S = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
HEAD_O = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
KEY_S = gl.constexpr(gl.SliceLayout(0, S_LAYOUT.value))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))

# Named barriers between the consumer groups; tiles.FREE_* are those towards the producer.
BAR_SUMS = gl.constexpr(4)
BAR_MAX0, BAR_MAX1 = gl.constexpr(8), gl.constexpr(9)
BAR_P0, BAR_P1 = gl.constexpr(10), gl.constexpr(11)


@gluon.jit
@no_type_check
def _copy_rows(ptr, row, n_rows, smem, PITCH: gl.constexpr):
    """Start copying columns of the rows; invalid rows become zeros and are not read."""
    col = gl.arange(0, smem.shape[1], gl.SliceLayout(0, hw.COPY))
    valid = (row >= 0) & (row < n_rows)
    at = ptr + row.to(gl.int64)[:, None] * PITCH + col[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=valid[:, None])


@gluon.jit
@no_type_check
def _produce(
    q_ptr, latent_ptr, rope_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, q, k0, k1, ready
):  # fmt: skip
    """Gather bfloat16 rows: each half tile as soon as its last reader has freed it.

    There is no proxy fence between cp.async and the wgmma that reads what it wrote, as there is none in FlashMLA or in
    CUTLASS's cp.async main loops for Hopper; with one the kernel takes 3% longer.
    """
    C: gl.constexpr = 2 * HALF
    row0 = tiles.listed(rows_ptr, lo, hi, ROW_COPY)
    row1 = tiles.listed(rows_ptr, lo + TILE, hi, ROW_COPY)
    tiles.copy_queries(q_ptr, first_head, n_heads, q, ready[4])
    for step in range(n_steps):
        if step > 0:
            hw.sync(tiles.FREE_0L, TWO_GROUPS)
        _copy_rows(latent_ptr, row0, n_rows, k0[0].index(0), C)
        async_copy.mbarrier_arrive(ready[0], increment_count=False)
        if step > 0:
            hw.sync(tiles.FREE_1R, TWO_GROUPS)
        _copy_rows(latent_ptr + HALF, row1, n_rows, k1[1].index(0), C)
        async_copy.mbarrier_arrive(ready[3], increment_count=False)
        # Two halves ahead of their use, so that their latency is hidden.
        slot = lo + (step + 1) * STEP
        next0 = tiles.listed(rows_ptr, slot, hi, ROW_COPY)
        next1 = tiles.listed(rows_ptr, slot + TILE, hi, ROW_COPY)
        if step > 0:
            hw.sync(tiles.FREE_0R, TWO_GROUPS)
        _copy_rows(latent_ptr + HALF, row0, n_rows, k0[1].index(0), C)
        _copy_rows(rope_ptr, row0, n_rows, k0[2].index(0), ROPE)
        async_copy.mbarrier_arrive(ready[1], increment_count=False)
        if step > 0:
            hw.sync(tiles.FREE_1L, TWO_GROUPS)
        _copy_rows(latent_ptr, row1, n_rows, k1[0].index(0), C)
        _copy_rows(rope_ptr, row1, n_rows, k1[2].index(0), ROPE)
        async_copy.mbarrier_arrive(ready[2], increment_count=False)
        row0 = next0
        row1 = next1


@gluon.jit
@no_type_check
def _logits(row, n_rows, q, k, ready, phase, z, FIRST: gl.constexpr):
    """Return Q K^T of a tile, -inf for invalid rows. Half FIRST comes first, the rope part with the other half."""
    # The product starts from 0 or -inf, so that no select is needed after; an invalid row's own part is 0.
    bias = gl.where((row >= 0) & (row < n_rows), 0.0, float("-inf"))
    s = gl.convert_layout(gl.expand_dims(bias, 0).broadcast_to([HEADS, TILE]), S_LAYOUT)
    mbarrier.wait(ready[3 * FIRST], phase)
    s = warpgroup_mma(q[FIRST].index(z), k[FIRST].index(z).permute((1, 0)), s, is_async=True)
    mbarrier.wait(ready[1 + FIRST], phase)
    other: gl.constexpr = 1 - FIRST
    s = warpgroup_mma(q[other].index(z), k[other].index(z).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q[2].index(z), k[2].index(z).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
@no_type_check
def _rescale(o, factor):
    return o * gl.expand_dims(gl.convert_layout(factor, HEAD_O), 1)


@gluon.jit
@no_type_check
def _consume_left(
    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2, q, k0, k1, ready, stat,
    QUANTISED: gl.constexpr,
):  # fmt: skip
    """Tile 0's logits and weights, value dims [0, 256) of both tiles."""
    o = gl.zeros([HEADS, HALF], gl.float32, O_LAYOUT)
    top = gl.full([HEADS], LOWEST, gl.float32, HEAD_S)
    total = gl.zeros([HEADS], gl.float32, HEAD_S)
    row = tiles.listed(rows_ptr, lo, hi, KEY_S)
    mbarrier.wait(ready[4], 0)
    for step in range(n_steps):
        z = hw.opaque_zero()
        s = _logits(row, n_rows, q, k0, ready, step & 1, z, 0)
        top0 = gl.maximum(top, gl.max(s, axis=1) * scale_log2)
        stat[0].store(top0)
        hw.arrive(BAR_MAX0, TWO_GROUPS)
        p = hw.fast_exp2(s * scale_log2 - gl.expand_dims(top0, 1))
        shrink = hw.fast_exp2(top - top0)
        o = _rescale(o, shrink)
        p_a = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        acc = warpgroup_mma(p_a, k0[0].index(z), o, is_async=True)
        total = total * shrink + gl.sum(p, axis=1)
        if QUANTISED:
            # The producer fills it while this group waits for the right group's maximum, which FP8 rows delay.
            o, p_a = warpgroup_mma_wait(0, [acc, p_a])
            if step + 1 < n_steps:
                hw.arrive(tiles.FREE_0L, TWO_GROUPS)
        # The right group's maximum is the pair's: bring this tile's weights to it before handing them over.
        hw.sync(BAR_MAX1, TWO_GROUPS)
        top = stat[1].load(HEAD_S)
        shrink = hw.fast_exp2(top0 - top)
        k0[2].index(z).store((p * gl.expand_dims(shrink, 1)).to(gl.bfloat16))
        fence_async_shared()  # the right group's wgmma reads what was stored here
        hw.arrive(BAR_P0, TWO_GROUPS)
        row = tiles.listed(rows_ptr, lo + (step + 1) * STEP, hi, KEY_S)
        total = total * shrink
        if not QUANTISED:
            o, p_a = warpgroup_mma_wait(0, [acc, p_a])
            if step + 1 < n_steps:
                hw.arrive(tiles.FREE_0L, TWO_GROUPS)
        o = _rescale(o, shrink)
        hw.sync(BAR_P1, TWO_GROUPS)  # also says that tile 1 is there
        acc = warpgroup_mma(k1[2].index(z), k1[0].index(z), o, is_async=True)
        o = warpgroup_mma_wait(0, [acc])
        if step + 1 < n_steps:
            hw.arrive(tiles.FREE_1L, TWO_GROUPS)
    _finish(o, top, total, stat[2], stat[3], k1[0], out_ptr, lse_ptr, n_heads, first_head, True)


@gluon.jit
@no_type_check
def _consume_right(
    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2, q, k0, k1, ready, stat,
):  # fmt: skip
    """Tile 1's logits and weights, value dims [256, 512) of both tiles."""
    o = gl.zeros([HEADS, HALF], gl.float32, O_LAYOUT)
    top = gl.full([HEADS], LOWEST, gl.float32, HEAD_S)
    total = gl.zeros([HEADS], gl.float32, HEAD_S)
    row = tiles.listed(rows_ptr, lo + TILE, hi, KEY_S)
    mbarrier.wait(ready[4], 0)
    for step in range(n_steps):
        z = hw.opaque_zero()
        s = _logits(row, n_rows, q, k1, ready, step & 1, z, 1)
        mine = gl.max(s, axis=1) * scale_log2
        hw.sync(BAR_MAX0, TWO_GROUPS)
        top1 = gl.maximum(stat[0].load(HEAD_S), mine)
        stat[1].store(top1)
        hw.arrive(BAR_MAX1, TWO_GROUPS)
        p = hw.fast_exp2(s * scale_log2 - gl.expand_dims(top1, 1))
        low = p.to(gl.bfloat16)
        k1[2].index(z).store(low)
        fence_async_shared()  # the left group's wgmma reads what was stored here
        hw.arrive(BAR_P1, TWO_GROUPS)
        shrink = hw.fast_exp2(top - top1)
        o = _rescale(o, shrink)
        p_a = gl.convert_layout(low, P_LAYOUT)
        acc = warpgroup_mma(p_a, k1[1].index(z), o, is_async=True)
        total = total * shrink + gl.sum(p, axis=1)
        top = top1
        row = tiles.listed(rows_ptr, lo + (step + 1) * STEP + TILE, hi, KEY_S)
        o, p_a = warpgroup_mma_wait(0, [acc, p_a])
        if step + 1 < n_steps:
            hw.arrive(tiles.FREE_1R, TWO_GROUPS)
        hw.sync(BAR_P0, TWO_GROUPS)  # also says that tile 0 is there
        acc = warpgroup_mma(k0[2].index(z), k0[1].index(z), o, is_async=True)
        o = warpgroup_mma_wait(0, [acc])
        if step + 1 < n_steps:
            hw.arrive(tiles.FREE_0R, TWO_GROUPS)
    _finish(o, top, total, stat[3], stat[2], k0[1], out_ptr, lse_ptr, n_heads, first_head, False)


@gluon.jit
@no_type_check
def _finish(
    o, top, total, mine, other, stage, out_ptr, lse_ptr, n_heads, first_head, LEFT: gl.constexpr
):
    """Divide by the sum over both groups' tiles and write this group's half."""
    C: gl.constexpr = 2 * HALF
    mine.store(total)
    hw.sync(BAR_SUMS, TWO_GROUPS)  # both groups wait here
    total += other.load(HEAD_S)
    some = total != 0  # true for NaN too, which then shows
    o = _rescale(o, gl.where(some, 1.0 / total, 0.0))
    if LEFT:
        lse = gl.where(some, (top + hw.fast_log2(total)) * LN_2, float("-inf"))
        head = first_head + gl.arange(0, HEADS, HEAD_S)
        gl.store(lse_ptr + head, lse, mask=head < n_heads)
        first = 0
    else:
        first = HALF
    if out_ptr.dtype.element_ty == gl.bfloat16:
        # Through the tile that this group freed last, for 16-byte stores.
        stage.index(0).store(o.to(gl.bfloat16))
        value = stage.index(0).load(hw.COPY)
        head = first_head + gl.arange(0, HEADS, ROW_COPY)
        col = first + gl.arange(0, HALF, gl.SliceLayout(0, hw.COPY))
    else:
        value = o
        head = first_head + gl.arange(0, HEADS, HEAD_O)
        col = first + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
    at = out_ptr + head[:, None] * C + col[None, :]
    gl.store(at, value, mask=(head < n_heads)[:, None])


@gluon.jit
@no_type_check
def _allocate_tile():
    """Return shared memory of 64 rows: left, right and rope part, each as a stack of one."""
    return (
        gl.allocate_shared_memory(gl.bfloat16, [1, TILE, HALF], TILE_SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [1, TILE, HALF], TILE_SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [1, TILE, ROPE], TILE_SHARED),
    )


@gluon.jit
@no_type_check
def _allocate_barrier(COUNT: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, COUNT)
    return barrier


@gluon.jit
@no_type_check
def attend_kernel(
    q_ptr, latent_ptr, rope_ptr, latent_scale_ptr, rows_ptr, out_ptr, lse_ptr, n_rows, n_queries,
    n_heads: gl.constexpr, n_slots: gl.constexpr, n_splits: gl.constexpr, split_slots: gl.constexpr,
    scale_log2: gl.constexpr, QUANTISED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program (query, split, head tile), head tiles fastest: they read the same rows, the second time from L2.

    With n_splits > 1 the outputs are float32 [split, query, head, 512] and [split, query, head].
    """
    C: gl.constexpr = 2 * HALF
    head_tiles: gl.constexpr = (n_heads + HEADS - 1) // HEADS
    pid = gl.program_id(0)
    first_head = pid % head_tiles * HEADS
    split = pid // head_tiles % n_splits
    query = (pid // (head_tiles * n_splits)).to(gl.int64)
    lo = split * split_slots
    hi = gl.minimum(lo + split_slots, n_slots)
    n_steps = (hi - lo + STEP - 1) // STEP
    q_ptr += query * (n_heads * (C + ROPE))
    rows_ptr += query * n_slots
    place = split.to(gl.int64) * n_queries + query
    out_ptr += place * (n_heads * C)
    lse_ptr += place * n_heads

    q = _allocate_tile()
    k0 = _allocate_tile()
    k1 = _allocate_tile()
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Maxima of the left and the right group, then their sums.
    stat = (
        gl.allocate_shared_memory(gl.float32, [HEADS], vector),
        gl.allocate_shared_memory(gl.float32, [HEADS], vector),
        gl.allocate_shared_memory(gl.float32, [HEADS], vector),
        gl.allocate_shared_memory(gl.float32, [HEADS], vector),
    )
    # Tile 0 left, tile 0 right and rope, tile 1 left and rope, tile 1 right, queries. cp.async: every producer thread
    # arrives by its own copies. FP8: one arrival for a half tile's stores, and each thread's for the rope part.
    ready = (
        _allocate_barrier(1 if QUANTISED else 128),
        _allocate_barrier(129 if QUANTISED else 128),
        _allocate_barrier(129 if QUANTISED else 128),
        _allocate_barrier(1 if QUANTISED else 128),
        _allocate_barrier(128),
    )
    # Argument tuples are written out: a constexpr that passes through a variable becomes a run-time value.
    if QUANTISED:
        stage = allocate_stage()
        gl.warp_specialize(
            [
                (_consume_left, (
                    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2,
                    q, k0, k1, ready, stat, True,
                )),
                (_consume_right, (
                    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2,
                    q, k0, k1, ready, stat,
                )),
                (produce_fp8, (
                    q_ptr, latent_ptr, rope_ptr, latent_scale_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi,
                    n_steps, q, k0, k1, ready, stage,
                )),
            ],
            [4, 4], [CONSUMER_REGISTERS, REGISTERS - 2 * CONSUMER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_left, (
                    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2,
                    q, k0, k1, ready, stat, False,
                )),
                (_consume_right, (
                    out_ptr, lse_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, scale_log2,
                    q, k0, k1, ready, stat,
                )),
                (_produce, (
                    q_ptr, latent_ptr, rope_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps,
                    q, k0, k1, ready,
                )),
            ],
            [4, 4], [CONSUMER_REGISTERS, REGISTERS - 2 * CONSUMER_REGISTERS],
        )  # fmt: skip


@gluon.jit
@no_type_check
def combine_kernel(part_ptr, part_lse_ptr, out_ptr, lse_ptr, n_rows, n_splits: gl.constexpr):
    """Program (query, head): merge its splits, see `gluon_combine.merge_row`."""
    gluon_combine.merge_row(part_ptr, part_lse_ptr, out_ptr, lse_ptr, n_rows, n_splits, 2 * HALF)
