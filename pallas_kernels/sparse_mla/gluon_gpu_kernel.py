"""Attention to listed keys on Hopper, in Gluon: tensor cores, with the listed rows gathered by cp.async.

A program takes items, one after the other: tiles of one query and 64 heads, or parts of such tiles along their slots
(gluon_gpu_items). Three groups of four warps share its work on an item, 128 slots a step, as two blocks of 64:

- The producer gathers the rows of block 0 and block 1 into shared memory.
- Consumer group g computes the logits and weights of block g, and the columns of half g of the output, for which it
  needs the weights of both blocks: its own from registers, the other's through shared memory (over the rope columns of
  that block's keys, which are spent by then). So an output tile of 64 x 512 fits the registers of two groups.

"Near" is the half of block g's columns that group g multiplies as values, "far" the half that the other group does.
The softmax subtracts a reference, not the peak: it moves up to the peak only where that exceeds it by a factor 2**8,
which is rare, so the accumulator is seldom rescaled; weights up to 2**8 lose no accuracy. The reference passes from
block to block in the order of slots, block 0, block 1, block 0 of the next step: a group takes over the other's before
it computes its weights, so weights that meet in one sum have the same reference. The logits of the next block, or of
the next item's first, start before an item is written, and run meanwhile.

Source: the split of the work is FlashMLA's (sm90/prefill/sparse); the reference and the order are this file's.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from pallas_kernels import gluon_hopper as hw
from pallas_kernels.sparse_mla import gluon_gpu_items as items
from pallas_kernels.sparse_mla import gluon_gpu_output as output

MAX_ROPE_DIM = 64

HEADS = gl.constexpr(items.HEADS_PER_TILE)
KEYS = gl.constexpr(items.SLOTS_PER_STEP // 2)  # of one block
ROPE_TILE = gl.constexpr(MAX_ROPE_DIM)
GROUP_THREADS = gl.constexpr(128)
# 2 x 216 + 72 = 504 of the 512 registers that one thread of each group may have together.
CONSUMER_REGISTERS = gl.constexpr(216)
PRODUCER_REGISTERS = gl.constexpr(72)
NO_REFERENCE = gl.constexpr(-1.0e30)  # finite: -inf - -inf would be NaN
SLACK = gl.constexpr(8.0)  # log2 of how far a weight may exceed 1

# Named barriers: one side arrives, the other waits. All but the last are pairs, + g for group or block g. No side can
# arrive twice before the other has waited: between two arrivals it needs rows that the producer gathers only after, or
# weights that the other group writes only after.
WEIGHTS_READY = gl.constexpr(4)  # group g to the other: weights and reference of block g are there
NEAR_FREE = gl.constexpr(6)  # group g to the producer
FAR_FREE = gl.constexpr(8)  # the group other than g to the producer
MASK_READY = gl.constexpr(10)  # producer to group g
SUM_READY = gl.constexpr(12)  # group g to the other: its share of the sum of weights is there
Q_FREE = gl.constexpr(14)  # both groups to the producer
TWO_GROUPS = gl.constexpr(256)
THREE_GROUPS = gl.constexpr(384)


@gluon.jit
@no_type_check
def _start_logits(mask, q, k, ready, phase, GROUP: gl.constexpr):
    """Start q k^T for the keys of one block; the mask adds 0, or -inf for an empty slot."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    near_q, far_q, rope_q = q
    near_k, far_k, rope_k = k
    near_ready, far_ready, _ = ready
    zero = hw.opaque_zero()
    hw.sync(MASK_READY + GROUP, TWO_GROUPS)
    s = gl.expand_dims(mask.load(gl.SliceLayout(0, S_LAYOUT)), 0).broadcast_to([HEADS, KEYS])
    # The order in which the producer brings them: block 0 near first, block 1 far first.
    if GROUP == 0:
        mbarrier.wait(near_ready, phase)
        s = hopper.warpgroup_mma(
            near_q.index(zero), near_k.index(zero).permute([1, 0]), s, is_async=True
        )
    mbarrier.wait(far_ready, phase)
    s = hopper.warpgroup_mma(far_q.index(zero), far_k.index(zero).permute([1, 0]), s, is_async=True)
    s = hopper.warpgroup_mma(
        rope_q.index(zero), rope_k.index(zero).permute([1, 0]), s, is_async=True
    )
    if GROUP == 1:
        mbarrier.wait(near_ready, phase)
        s = hopper.warpgroup_mma(
            near_q.index(zero), near_k.index(zero).permute([1, 0]), s, is_async=True
        )
    return s


@gluon.jit
@no_type_check
def _rescale(o, old, new, live, GROUP: gl.constexpr):
    """Move the output from one reference to another; a warp none of whose rows moved skips it, as does a live of 0."""
    if (hw.any_positive(new - old, GROUP) & live) != 0:
        O_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        o = o * gl.expand_dims(gl.convert_layout(hw.fast_exp2(old - new), O_ROW), 1)
    return o


@gluon.jit
@no_type_check
def _consume(
    q, k, far_v, other_p, ready, rows, out, work, scale_log2, GROUP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Work of consumer group GROUP: see the head of this file."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OTHER: gl.constexpr = 1 - GROUP
    _, _, q_ready = ready
    mask, own_ref, other_ref, own_sum, other_sum = rows
    near_k, _, rope_k = k
    hw.declare_vote(GROUP)
    # All tiles begin free.
    hw.arrive(NEAR_FREE + GROUP, TWO_GROUPS)
    hw.arrive(FAR_FREE + OTHER, TWO_GROUPS)
    hw.arrive(Q_FREE, THREE_GROUPS)
    next_steps = items.load_steps(gl.program_id(0), work)
    mbarrier.wait(q_ready, 0)
    q_phase = 1
    next_s = _start_logits(mask, q, k, ready, 0, GROUP)
    phase = 1
    for item in range(gl.program_id(0), items.n_items(work), gl.num_programs(0)):
        first, end = items.span(item, next_steps, work)
        n_steps = gl.maximum(end - first, 1)
        o = gl.full([HEADS, HALF], 0.0, gl.float32, O_LAYOUT)
        ref = gl.full([HEADS], NO_REFERENCE, gl.float32, S_ROW)
        total = gl.full([HEADS], 0.0, gl.float32, S_ROW)
        for step in range(n_steps):
            zero = hw.opaque_zero()
            s = hopper.warpgroup_mma_wait(0, deps=[next_s])
            if step == n_steps - 1:
                hw.arrive(Q_FREE, THREE_GROUPS)
            live = (step > 0).to(gl.int32)  # before that the output is 0
            if GROUP == 1:
                # Block 0 comes first. Its product runs while this group computes its weights.
                hw.sync(WEIGHTS_READY + OTHER, TWO_GROUPS)
                taken_ref = other_ref.load(S_ROW)
                o = _rescale(o, ref, taken_ref, live, GROUP)
                total = total * hw.fast_exp2(ref - taken_ref)
                ref = taken_ref
                o = hopper.warpgroup_mma(other_p.index(zero), far_v.index(zero), o, is_async=True)
            peak = gl.max(s, 1) * scale_log2
            new_ref = gl.where(peak > ref + SLACK, peak, ref)
            p = hw.fast_exp2(s * scale_log2 - gl.expand_dims(new_ref, 1))
            p16 = p.to(gl.bfloat16)
            block_sum = gl.sum(p, 1)
            rope_k.index(zero).store(p16)
            own_ref.store(new_ref)
            hopper.fence_async_shared()  # the other group's wgmma reads the weights
            hw.arrive(WEIGHTS_READY + GROUP, TWO_GROUPS)
            if GROUP == 1:
                o = hopper.warpgroup_mma_wait(0, deps=[o])
                hw.arrive(FAR_FREE + OTHER, TWO_GROUPS)
                live = 1
            o = _rescale(o, ref, new_ref, live, GROUP)
            p_regs = gl.convert_layout(p16, gl.DotOperandLayout(0, O_LAYOUT, 2))
            o = hopper.warpgroup_mma(p_regs, near_k.index(zero), o, is_async=True)
            total = total * hw.fast_exp2(ref - new_ref) + block_sum
            ref = new_ref
            if GROUP == 1 and step == n_steps - 1:
                own_sum.store(total)
                hw.arrive(SUM_READY + GROUP, TWO_GROUPS)
            o, p_regs = hopper.warpgroup_mma_wait(0, deps=[o, p_regs])
            hw.arrive(NEAR_FREE + GROUP, TWO_GROUPS)
            if GROUP == 0:
                hw.sync(WEIGHTS_READY + OTHER, TWO_GROUPS)
                taken_ref = other_ref.load(S_ROW)
                o = _rescale(o, ref, taken_ref, 1, GROUP)
                o = hopper.warpgroup_mma(other_p.index(zero), far_v.index(zero), o, is_async=True)
                total = total * hw.fast_exp2(ref - taken_ref)
                ref = taken_ref
                if step == n_steps - 1:
                    own_sum.store(total)
                    hw.arrive(SUM_READY + GROUP, TWO_GROUPS)
                o = hopper.warpgroup_mma_wait(0, deps=[o])
                hw.arrive(FAR_FREE + OTHER, TWO_GROUPS)
            # The next block's logits, or those of the next item's first block, which run while this one is written.
            if step == n_steps - 1:
                mbarrier.wait(q_ready, q_phase)
                q_phase ^= 1
            next_s = _start_logits(mask, q, k, ready, phase, GROUP)
            phase ^= 1
        # Arrives while this item is written; loaded at its start, it would hold up the first softmax.
        next_steps = items.load_steps(item + gl.num_programs(0), work)
        # Both sums refer to the last block's reference: group 1 set it, group 0 took it over.
        hw.sync(SUM_READY + OTHER, TWO_GROUPS)
        total = total + other_sum.load(S_ROW)
        output.write_item(o, total, ref, out, work, item, GROUP, HALF)
    hopper.warpgroup_mma_wait(0, deps=[next_s])  # of the empty item past the last


@gluon.jit
@no_type_check
def _copy_rows(base, offsets, valid, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, tile):
    """Start copying columns of rows into a tile; rows not valid and columns past COLUMNS, n x 8, become zeros."""
    cols = gl.arange(0, tile.shape[1], gl.SliceLayout(0, hw.COPY))
    pointers = base + gl.expand_dims(offsets, 1) + gl.expand_dims(COLUMN + cols, 0)
    mask = gl.expand_dims(valid, 1)
    if tile.shape[1] > COLUMNS:
        mask = mask & gl.expand_dims(cols < COLUMNS, 0)
    async_copy.async_copy_global_to_shared(tile, pointers, mask=mask)


@gluon.jit
@no_type_check
def _load_indices(idx_ptr, query, first_slot, n_slots, end):
    """Return the key indices of one block; slots from `end` on, which are another part's or none, are -1."""
    slots = first_slot + gl.arange(0, KEYS, gl.SliceLayout(1, hw.COPY))
    pointers = idx_ptr + query.to(gl.int64) * n_slots + slots
    return gl.load(pointers, mask=slots < gl.minimum(end, n_slots), other=-1)


@gluon.jit
@no_type_check
def _produce(
    q, k0, k1, q_ready, ready0, ready1, mask0, mask1, q_ptr, kv_ptr, idx_ptr, work, n_keys, n_slots,
    HALF: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Work of the producer: gather queries and rows, in the order in which the consumers free the tiles.

    There is no proxy fence between cp.async and the wgmma that reads what it wrote, as there is none in FlashMLA or in
    CUTLASS's cp.async main loop for Hopper; with one in the consumers, all took 1% longer.
    """
    D: gl.constexpr = 2 * HALF + ROPE
    q_left, q_right, q_rope = q
    k0_left, k0_right, k0_rope = k0
    k1_right, k1_left, k1_rope = k1
    near0_ready, far0_ready = ready0
    near1_ready, far1_ready = ready1
    _, n_heads, _, _, _ = work
    tiles_per_query = gl.cdiv(n_heads, HEADS)
    stride = gl.num_programs(0)
    next_tile, _ = items.tile_and_part(gl.program_id(0), work)
    first_steps = items.load_steps(gl.program_id(0), work)
    next_step, next_end = items.span(gl.program_id(0), first_steps, work)
    next_steps = items.load_steps(gl.program_id(0) + stride, work)
    next_query = next_tile // tiles_per_query
    next_slot = next_step * (2 * KEYS)
    idx0 = _load_indices(idx_ptr, next_query, next_slot, n_slots, next_end * (2 * KEYS))
    idx1 = _load_indices(idx_ptr, next_query, next_slot + KEYS, n_slots, next_end * (2 * KEYS))
    # One more item than there are, of one step and without rows: the consumers start logits one item ahead.
    for item in range(gl.program_id(0), items.n_items(work) + stride, stride):
        tile, step0, end = next_tile, next_step, next_end
        n_steps = gl.maximum(end - step0, 1)
        next_tile, _ = items.tile_and_part(item + stride, work)
        next_step, next_end = items.span(item + stride, next_steps, work)
        rows = (tile % tiles_per_query) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, hw.COPY))
        q_offset = ((tile // tiles_per_query).to(gl.int64) * n_heads + rows) * D
        here = (rows < n_heads) & (item < items.n_items(work))
        hw.sync(Q_FREE, THREE_GROUPS)
        zero = hw.opaque_zero()
        _copy_rows(q_ptr, q_offset, here, 0, HALF, q_left.index(zero))
        _copy_rows(q_ptr, q_offset, here, HALF, HALF, q_right.index(zero))
        _copy_rows(q_ptr, q_offset, here, 2 * HALF, ROPE, q_rope.index(zero))
        async_copy.mbarrier_arrive(q_ready, increment_count=False)
        for step in range(n_steps):
            zero = hw.opaque_zero()
            valid0 = (idx0 >= 0) & (idx0 < n_keys)
            valid1 = (idx1 >= 0) & (idx1 < n_keys)
            row0 = gl.where(valid0, idx0, 0).to(gl.int64) * D
            row1 = gl.where(valid1, idx1, 0).to(gl.int64) * D
            # The next step's indices, so that they are here when its tiles become free.
            last = step == n_steps - 1
            query = gl.where(last, next_tile, tile) // tiles_per_query
            slot = gl.where(last, next_step, step0 + step + 1) * (2 * KEYS)
            end_slot = gl.where(last, next_end, end) * (2 * KEYS)
            idx0 = _load_indices(idx_ptr, query, slot, n_slots, end_slot)
            idx1 = _load_indices(idx_ptr, query, slot + KEYS, n_slots, end_slot)

            hw.sync(NEAR_FREE, TWO_GROUPS)
            mask0.store(gl.where(valid0, 0.0, float("-inf")))
            hw.arrive(MASK_READY, TWO_GROUPS)
            _copy_rows(kv_ptr, row0, valid0, 0, HALF, k0_left.index(zero))
            async_copy.mbarrier_arrive(near0_ready, increment_count=False)

            hw.sync(FAR_FREE, TWO_GROUPS)
            _copy_rows(kv_ptr, row0, valid0, HALF, HALF, k0_right.index(zero))
            _copy_rows(kv_ptr, row0, valid0, 2 * HALF, ROPE, k0_rope.index(zero))
            async_copy.mbarrier_arrive(far0_ready, increment_count=False)

            hw.sync(FAR_FREE + 1, TWO_GROUPS)
            mask1.store(gl.where(valid1, 0.0, float("-inf")))
            hw.arrive(MASK_READY + 1, TWO_GROUPS)
            _copy_rows(kv_ptr, row1, valid1, 0, HALF, k1_left.index(zero))
            _copy_rows(kv_ptr, row1, valid1, 2 * HALF, ROPE, k1_rope.index(zero))
            async_copy.mbarrier_arrive(far1_ready, increment_count=False)

            hw.sync(NEAR_FREE + 1, TWO_GROUPS)
            _copy_rows(kv_ptr, row1, valid1, HALF, HALF, k1_right.index(zero))
            async_copy.mbarrier_arrive(near1_ready, increment_count=False)
        # Here, so that its latency falls into the wait for the queries' memory, not between them and the first rows.
        next_steps = items.load_steps(item + 2 * stride, work)


@gluon.jit
@no_type_check
def _allocate_rows(HALF: gl.constexpr, ROWS: gl.constexpr):
    """Allocate left half, right half and rope columns of 64 rows: powers of two, as tensors must be."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    left = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HALF], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HALF], TILE)
    rope = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, ROPE_TILE], TILE)
    return left, right, rope


@gluon.jit
@no_type_check
def _allocate_ready():
    """Allocate and initialise a barrier on which each of the producer's threads arrives once a phase."""
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=GROUP_THREADS)
    return barrier


@gluon.jit(
    do_not_specialize=[
        "n_queries",
        "n_heads",
        "n_keys",
        "n_slots",
        "n_whole",
        "n_parts",
        "scale_log2",
    ]
)
@no_type_check
def sparse_mla_kernel(
    q_ptr, kv_ptr, idx_ptr, steps_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, n_queries, n_heads, n_keys,
    n_slots, n_whole, n_parts, scale_log2, HALF: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Attend to listed keys; arrays as in `forward`, row-major; the grid has no more programs than there are items.

    A query has ceil(n_heads / 64) tiles. The first n_whole tiles, those of the first queries, are written to the
    output; the others are computed in n_parts parts each, which `merge_kernel` merges.

    steps_ptr: int32 [n_queries], at least 1: how many blocks of 128 slots to read, the rest holding no valid one.
    part_ptr, part_lse_ptr: float32 [n_parts, queries, n_heads, 2 * HALF] and [n_parts, queries, n_heads].
    HALF: half of value_dim. ROPE: the columns after the values, a multiple of 8, at most 64.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    out = out_ptr, lse_ptr, part_ptr, part_lse_ptr
    work = steps_ptr, n_heads, n_queries * gl.cdiv(n_heads, HEADS), n_whole, n_parts
    q_left, q_right, q_rope = _allocate_rows(HALF, HEADS)
    k0_left, k0_right, k0_rope = _allocate_rows(HALF, KEYS)
    k1_left, k1_right, k1_rope = _allocate_rows(HALF, KEYS)
    mask0 = gl.allocate_shared_memory(gl.float32, [KEYS], FLAT)
    mask1 = gl.allocate_shared_memory(gl.float32, [KEYS], FLAT)
    ref0 = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    ref1 = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sum0 = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sum1 = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    q_ready = _allocate_ready()
    near0_ready, far0_ready = _allocate_ready(), _allocate_ready()
    near1_ready, far1_ready = _allocate_ready(), _allocate_ready()
    gl.warp_specialize(
        [
            (_consume, (
                (q_left, q_right, q_rope), (k0_left, k0_right, k0_rope), k1_left, k1_rope,
                (near0_ready, far0_ready, q_ready), (mask0, ref0, ref1, sum0, sum1),
                out, work, scale_log2, 0, HALF,
            )),
            (_consume, (
                (q_right, q_left, q_rope), (k1_right, k1_left, k1_rope), k0_right, k0_rope,
                (near1_ready, far1_ready, q_ready), (mask1, ref1, ref0, sum1, sum0),
                out, work, scale_log2, 1, HALF,
            )),
            (_produce, (
                (q_left, q_right, q_rope), (k0_left, k0_right, k0_rope), (k1_right, k1_left, k1_rope),
                q_ready, (near0_ready, far0_ready), (near1_ready, far1_ready), mask0, mask1,
                q_ptr, kv_ptr, idx_ptr, work, n_keys, n_slots, HALF, ROPE,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
