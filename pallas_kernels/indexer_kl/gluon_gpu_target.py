"""Gluon kernel that sums the attention weights of all heads over listed keys: the target of the indexer's KL loss.

One program a multiprocessor takes query after query. Its two consumer groups of four warps hold 64 heads' queries each
in registers and multiply them with the same tiles of keys, which a producer group gathers into a ring. The groups take
turns at the tensor cores: one sums its exponentials while the other multiplies.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from pallas_kernels import gluon_hopper as hw

HEADS = gl.constexpr(64)  # of a consumer group: the M of one warpgroup's wgmma
KEYS = gl.constexpr(64)  # of a tile
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
DIM = gl.constexpr(576)
STAGES = gl.constexpr(3)  # tiles in shared memory: 216 of 227 KiB
GROUP_THREADS = gl.constexpr(128)
PAIR_THREADS = gl.constexpr(256)  # of both consumer groups
ALL_THREADS = gl.constexpr(384)
# Named barriers; Triton's own code uses 0 to 3.
FREE = gl.constexpr(4)  # + stage: both groups have done with the tile
TURN = gl.constexpr(7)  # + group: it may start its products
CONSUMER_REGISTERS = gl.constexpr(224)  # 144 of them for 64 heads of 576
PRODUCER_REGISTERS = gl.constexpr(56)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
@no_type_check
def _after(stage, phase):
    """Return the stage and phase of the ring's next item."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
@no_type_check
def _halve(low, high, LANE_BIT: gl.constexpr):
    """Add two lanes: those with LANE_BIT keep `high`, the others `low`, and each adds what its partner holds of it.

    One step of a reduce-scatter over lanes; a butterfly over all elements would take three times the shuffles.
    """
    return gl.inline_asm_elementwise(
        f"""{{
        .reg .pred p;
        .reg .b32 lane, mine, yours;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, {LANE_BIT};
        setp.ne.u32 p, lane, 0;
        selp.b32 mine, $2, $1, p;
        selp.b32 yours, $1, $2, p;
        shfl.sync.bfly.b32 yours, yours, {LANE_BIT}, 31, -1;
        add.f32 $0, mine, yours;
        }}""",
        "=f,f,f",
        [low, high],
        gl.float32,
        False,
        1,
    )


@gluon.jit
@no_type_check
def _column_sums(p):
    """Sum [64 heads, 64 keys] in the accumulator's layout over the 16 heads of each warp: [4 warps, 64 keys].

    Lane 4 g + l holds heads 16 warp + 8 r + g and keys 8 j + 2 l + e; the sum of keys j comes to the lanes with g = j.
    """
    x = p.reshape([4, 2, 8, 2, 2, 2, 4, 2]).permute(
        [0, 2, 3, 4, 5, 6, 7, 1]
    )  # warp g j2 j1 j0 l e r
    upper, lower = gl.split(x)
    x = (upper + lower).permute([0, 1, 3, 4, 5, 6, 2])
    low, high = gl.split(x)
    x = _halve(low, high, 16).permute([0, 1, 3, 4, 5, 2])
    low, high = gl.split(x)
    x = _halve(low, high, 8).permute([0, 1, 3, 4, 2])
    low, high = gl.split(x)
    return _halve(low, high, 4).reshape([4, KEYS])


@gluon.jit
@no_type_check
def _logits(q_latent, q_rope, latent, rope):
    """Start q . k of one tile."""
    acc = gl.zeros(
        [HEADS, KEYS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    )
    acc = hopper.warpgroup_mma(q_latent, latent.permute([1, 0]), acc, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_rope, rope.permute([1, 0]), acc, is_async=True)


@gluon.jit
@no_type_check
def _write_sums(logits, lse2, scale_log2, sums, out_ptr, first, n_slots):
    """Write the sum over this group's heads of exp(logit - lse) of one tile's slots."""
    PARTS: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    p = hw.fast_exp2(logits * scale_log2 - gl.expand_dims(lse2, 1))
    sums.store(_column_sums(p))
    total = gl.sum(sums.load(PARTS), 0)
    slot = first + gl.arange(0, KEYS, total.type.layout)
    gl.store(out_ptr + slot, total, mask=slot < n_slots)


@gluon.jit
@no_type_check
def _consume(
    GROUP: gl.constexpr,
    latent, rope, ready, sums,
    lse_ptr, length_ptr, out_ptr, first_query, n_queries, n_rows, n_heads, n_slots, scale_log2,
):  # fmt: skip
    """Sum exp(logit - lse) over heads 64 GROUP to 64 GROUP + 63."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    stage = 0
    phase = 0
    for i in gl.static_range(STAGES):
        hw.arrive_at(FREE + i, ALL_THREADS)
    if GROUP == 1:
        hw.arrive(TURN, PAIR_THREADS)  # group 0 begins
    head = GROUP * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, ACC))
    for row in range(gl.program_id(0), n_rows, gl.num_programs(0)):
        query = (first_query + row).to(gl.int64)
        there = first_query + row < n_queries
        length = gl.load(length_ptr + query, mask=there, other=0)
        # A head that is not there weighs exp(-inf) = 0.
        here = (head < n_heads) & there
        lse = gl.load(lse_ptr + query * n_heads + head, mask=here, other=float("inf"))
        lse2 = lse * LOG2E
        out = out_ptr + (row.to(gl.int64) * 2 + GROUP) * n_slots
        # The ring's first two items are the queries of the two groups.
        for half in gl.static_range(2):
            mbarrier.wait(ready.index(stage), phase)
            if half == GROUP:
                q_latent = latent.index(stage).load(Q)
                q_rope = rope.index(stage).load(Q)
            hw.arrive_at(FREE + stage, ALL_THREADS)
            stage, phase = _after(stage, phase)
        for tile in range(gl.cdiv(length, KEYS)):
            mbarrier.wait(ready.index(stage), phase)
            # cp.async writes through the generic proxy, wgmma reads through the async proxy.
            hopper.fence_async_shared()
            hw.sync(TURN + GROUP, PAIR_THREADS)
            acc = _logits(q_latent, q_rope, latent.index(stage), rope.index(stage))
            # All products are issued: the other group's come next.
            hw.arrive(TURN + 1 - GROUP, PAIR_THREADS)
            logits, q_latent, q_rope = hopper.warpgroup_mma_wait(0, deps=[acc, q_latent, q_rope])
            hw.arrive_at(FREE + stage, ALL_THREADS)
            stage, phase = _after(stage, phase)
            _write_sums(logits, lse2, scale_log2, sums, out, tile * KEYS, n_slots)
    if GROUP == 0:
        hw.sync(TURN, PAIR_THREADS)  # take group 1's last arrival


@gluon.jit
@no_type_check
def _copy_rows(base, offset, valid, latent, rope):
    """Start copying rows of 576 into one stage; a row that is not valid becomes zeros and is not read."""
    wide = gl.arange(0, LATENT, gl.SliceLayout(0, hw.COPY))
    narrow = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, hw.COPY))
    row = base + gl.expand_dims(offset, 1)
    mask = gl.expand_dims(valid, 1)
    async_copy.async_copy_global_to_shared(latent, row + gl.expand_dims(wide, 0), mask=mask)
    async_copy.async_copy_global_to_shared(rope, row + gl.expand_dims(narrow, 0), mask=mask)


@gluon.jit
@no_type_check
def _slots(idx_ptr, first, n_slots):
    """Load one tile's key indices; a slot past the row's end is -1."""
    slot = first + gl.arange(0, KEYS, gl.SliceLayout(1, hw.COPY))
    return gl.load(idx_ptr + slot, mask=slot < n_slots, other=-1)


@gluon.jit
@no_type_check
def _produce(
    latent, rope, ready,
    q_ptr, kv_ptr, idx_ptr, length_ptr, first_query, n_queries, n_rows, n_keys, n_heads, n_slots,
):  # fmt: skip
    """Fill the ring: of each query the two groups' heads, then the tiles of listed rows."""
    stage = 0
    phase = 0
    head = gl.arange(0, HEADS, gl.SliceLayout(1, hw.COPY))
    for row in range(gl.program_id(0), n_rows, gl.num_programs(0)):
        query = (first_query + row).to(gl.int64)
        there = first_query + row < n_queries
        length = gl.load(length_ptr + query, mask=there, other=0)
        row_idx = idx_ptr + query * n_slots
        n_listed = gl.where(there, n_slots, 0)
        idx = _slots(row_idx, 0, n_listed)
        for half in gl.static_range(2):
            here = (half * HEADS + head < n_heads) & there
            offset = (query * n_heads + half * HEADS + head) * DIM
            hw.sync_at(FREE + stage, ALL_THREADS)
            _copy_rows(q_ptr, offset, here, latent.index(stage), rope.index(stage))
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            stage, phase = _after(stage, phase)
        for tile in range(gl.cdiv(length, KEYS)):
            valid = (idx >= 0) & (idx < n_keys)
            offset = gl.where(valid, idx, 0).to(gl.int64) * DIM
            idx = _slots(row_idx, (tile + 1) * KEYS, n_listed)  # one tile ahead
            hw.sync_at(FREE + stage, ALL_THREADS)
            _copy_rows(kv_ptr, offset, valid, latent.index(stage), rope.index(stage))
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            stage, phase = _after(stage, phase)
    # Take the groups' last arrivals, so that no named barrier is left half full.
    for i in gl.static_range(STAGES):
        hw.sync_at(FREE + i, ALL_THREADS)


@gluon.jit(do_not_specialize=["n_queries", "n_rows", "n_keys", "n_heads", "n_slots", "scale_log2"])
@no_type_check
def target_kernel(
    q_ptr, kv_ptr, lse_ptr, idx_ptr, length_ptr, first_ptr, out_ptr,
    n_queries, n_rows, n_keys, n_heads, n_slots, scale_log2,
):  # fmt: skip
    """Write out[row, g, slot] = sum over heads h of group g of exp(scale q[t, h] . kv[idx[t, slot]] - lse[t, h]).

    t = first + row. Slots from length[t] on, and those that name no key, hold anything. The order of the sums is fixed.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, LATENT], TILE)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, ROPE], TILE)
    sums0 = gl.allocate_shared_memory(gl.float32, [4, KEYS], FLAT)
    sums1 = gl.allocate_shared_memory(gl.float32, [4, KEYS], FLAT)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        # Every producer thread arrives when its own copies have landed.
        mbarrier.init(ready.index(i), count=GROUP_THREADS)
    first = gl.load(first_ptr)
    gl.warp_specialize(
        [
            (_consume, (
                0, latent, rope, ready, sums0,
                lse_ptr, length_ptr, out_ptr, first, n_queries, n_rows, n_heads, n_slots, scale_log2,
            )),
            (_consume, (
                1, latent, rope, ready, sums1,
                lse_ptr, length_ptr, out_ptr, first, n_queries, n_rows, n_heads, n_slots, scale_log2,
            )),
            (_produce, (
                latent, rope, ready, q_ptr, kv_ptr, idx_ptr, length_ptr,
                first, n_queries, n_rows, n_keys, n_heads, n_slots,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
