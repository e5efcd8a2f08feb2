"""Gluon kernels of the indexer's side of the listed KL loss: each query's loss, and the gradients of q, k and w.

One program a query, four warps, several programs a multiprocessor; the listed keys stream through a ring of tiles.
"""

from typing import no_type_check

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

KEYS = gl.constexpr(64)  # of a tile: the M of one warpgroup's wgmma
HEADS = gl.constexpr(64)  # of the indexer; fewer are padded with zeros
STAGES = gl.constexpr(3)  # tiles in shared memory
PART = gl.constexpr(64)  # columns of dk that are multiplied, then added, at once
FAR_BELOW = gl.constexpr(-1.0e30)
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
KEY = gl.constexpr(gl.SliceLayout(1, ACC))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_SLOTS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.constexpr_function
def _copy_layout(dim):  # type: ignore[no-untyped-def]
    """16 bytes a thread, rows of `dim` bf16 by neighbouring threads."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.jit
@no_type_check
def _whole(slots_smem):
    """View a row's slots, kept in tiles, as one vector."""
    SLOTS: gl.constexpr = slots_smem.shape[0] * slots_smem.shape[1]
    return slots_smem._reinterpret(slots_smem.dtype, [SLOTS], FLAT)


@gluon.jit
@no_type_check
def _load_heads(q_smem, q_ptr, query, n_heads, X: gl.constexpr):
    """Start copying a query's heads; heads that are not there become zeros."""
    COPY: gl.constexpr = _copy_layout(X)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, COPY))
    col = gl.arange(0, X, gl.SliceLayout(0, COPY))
    pointers = q_ptr + gl.expand_dims((query * n_heads + head) * X, 1) + gl.expand_dims(col, 0)
    mask = gl.expand_dims(head < n_heads, 1)
    async_copy.async_copy_global_to_shared(q_smem, pointers, mask=mask)


@gluon.jit
@no_type_check
def _gather(k_smem, k_ptr, idx_smem, tile, n_tiles, n_keys, X: gl.constexpr):
    """Start copying a tile's listed keys as one group; a slot that names no key becomes zeros and reads nothing."""
    COPY: gl.constexpr = _copy_layout(X)
    if tile < n_tiles:
        idx = idx_smem.index(tile).load(gl.SliceLayout(1, COPY))
        valid = (idx >= 0) & (idx < n_keys)
        offset = gl.where(valid, idx, 0).to(gl.int64) * X
        col = gl.arange(0, X, gl.SliceLayout(0, COPY))
        pointers = k_ptr + gl.expand_dims(offset, 1) + gl.expand_dims(col, 0)
        async_copy.async_copy_global_to_shared(k_smem, pointers, mask=gl.expand_dims(valid, 1))
    # An empty group past the last tile keeps the count of groups in flight.
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _dots(k_smem, q_smem):
    """Start k . q of one tile."""
    zero = gl.zeros([KEYS, HEADS], gl.float32, ACC)
    return hopper.warpgroup_mma(k_smem, q_smem.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
@no_type_check
def _relu(dots):
    return gl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
@no_type_check
def _await_tile(AHEAD: gl.constexpr):
    """Wait until all but the AHEAD youngest groups of copies have landed, everyone's, where wgmma sees them."""
    async_copy.wait_group(AHEAD)
    # cp.async and ordinary stores write through the generic proxy, wgmma reads through the async proxy.
    hopper.fence_async_shared()
    gl.barrier()


@gluon.jit
@no_type_check
def _compare(
    score_smem, idx_ptr, target_ptr, kl_ptr, grad_ptr, there, n_keys, n_slots, SLOTS: gl.constexpr
):
    """Write one row's KL(p || softmax(score)) and softmax(score) - p over its valid slots."""
    slot = gl.arange(0, SLOTS, FLAT_SLOTS)
    idx = gl.load(idx_ptr + slot, mask=(slot < n_slots) & there, other=-1)
    valid = (idx >= 0) & (idx < n_keys)
    target = gl.load(target_ptr + slot, mask=valid, other=0.0)
    target += gl.load(target_ptr + n_slots + slot, mask=valid, other=0.0)
    score = gl.where(valid, _whole(score_smem).load(FLAT_SLOTS), FAR_BELOW)
    norm = gl.sum(target, 0)
    score -= gl.max(score, 0)
    weight = gl.where(valid, gl.exp(score), 0.0)
    total = gl.sum(weight, 0)
    # A row without keys has no target and no weights: its loss and gradient are 0. NaN of a listed key stays.
    total = gl.where(total == 0, 1.0, total)
    p = target * (1.0 / gl.where(norm == 0, 1.0, norm))
    log_ratio = gl.log(gl.where(p == 0, 1.0, p)) - (score - gl.log(total))
    gl.store(kl_ptr, gl.sum(gl.where(p == 0, 0.0, p * log_ratio), 0))
    gl.store(grad_ptr + slot, weight * (1.0 / total) - p, mask=slot < n_slots)


@gluon.jit(do_not_specialize=["n_queries", "n_heads", "n_keys", "n_slots"])
@no_type_check
def loss_kernel(
    q_ptr, k_ptr, w_ptr, idx_ptr, length_ptr, first_ptr, target_ptr, kl_ptr, grad_ptr,
    n_queries, n_heads, n_keys, n_slots,
    X: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Score one query's listed keys and compare their softmax with the target.

    I[slot] = sum_j w[t, j] relu(q[t, j] . k[idx[t, slot]]); p = target / sum target, target[row, 0] + target[row, 1];
    kl[row] = sum p (log p - log softmax(I)); grad[row, slot] = softmax(I) - p. t = first + row; SLOTS >= n_slots.
    """
    row = gl.program_id(0).to(gl.int64)
    query = gl.load(first_ptr) + row
    there = query < n_queries
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, X], TILE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, X], TILE)
    idx_smem = gl.allocate_shared_memory(gl.int32, [SLOTS // KEYS, KEYS], FLAT)
    # A tile's scores take the place of its indices, which are read STAGES tiles before.
    score_smem = idx_smem._reinterpret(gl.float32, [SLOTS // KEYS, KEYS], FLAT)

    slot = gl.arange(0, SLOTS, FLAT_SLOTS)
    row_idx = idx_ptr + query * n_slots
    idx = gl.load(row_idx + slot, mask=(slot < n_slots) & there, other=-1)
    _whole(idx_smem).store(idx)
    n_tiles = gl.cdiv(gl.load(length_ptr + query, mask=there, other=0), KEYS)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, ACC))
    # A head that is not there adds nothing.
    w = gl.load(w_ptr + query * n_heads + head, mask=(head < n_heads) & there, other=0.0)
    gl.barrier()
    # The queries belong to the first tile's group, so that the first wait covers them.
    if there:
        _load_heads(q_smem, q_ptr, query, n_heads, X)
    for i in gl.static_range(STAGES):
        _gather(k_smem.index(i), k_ptr, idx_smem, i, n_tiles, n_keys, X)
    _await_tile(STAGES - 1)
    dots = hopper.warpgroup_mma_wait(0, deps=[_dots(k_smem.index(0), q_smem)])
    stage = 0
    for tile in range(n_tiles):
        # The next tile is there, and everyone has done with this one's buffer, which is filled next.
        _await_tile(STAGES - 2)
        after = gl.where(stage == STAGES - 1, 0, stage + 1)
        # Past the last tile this multiplies what an earlier tile left; nobody looks at it.
        coming = _dots(k_smem.index(after), q_smem)
        _gather(k_smem.index(stage), k_ptr, idx_smem, tile + STAGES, n_tiles, n_keys, X)
        score_smem.index(tile).store(gl.sum(_relu(dots) * gl.expand_dims(w, 0), 1))
        dots = hopper.warpgroup_mma_wait(0, deps=[coming])
        stage = after
    async_copy.wait_group(0)
    gl.barrier()
    _compare(
        score_smem, row_idx, target_ptr + row * (2 * n_slots), kl_ptr + row,
        grad_ptr + row * n_slots, there, n_keys, n_slots, SLOTS,
    )  # fmt: skip


@gluon.constexpr_function
def _row_layout(width):  # type: ignore[no-untyped-def]
    """Layout of [64, width] float32 in which a warp adds whole rows, 16 bytes a thread; rows stay in their warp."""
    columns = [[0, 1 << b] for b in range(2, width.bit_length() - 1)]
    rows = [[1, 0], [2, 0], [4, 0]]
    n_row_lanes = 5 - len(columns)
    lanes = columns + rows[:n_row_lanes]
    registers = [[0, 1], [0, 2], *rows[n_row_lanes:], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
@no_type_check
def _add_rows(
    dk_ptr, value, idx_smem, n_keys, grid,
    X: gl.constexpr, FIRST: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Add rows to dk[idx], columns from FIRST on, as float32 or, if FIXED, as int64 multiples of 1 / grid."""
    WIDTH: gl.constexpr = value.shape[1]
    if FIXED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    else:
        LAYOUT: gl.constexpr = _row_layout(WIDTH)
    value = gl.convert_layout(value, LAYOUT)
    idx = idx_smem.load(gl.SliceLayout(1, LAYOUT))
    valid = (idx >= 0) & (idx < n_keys)
    offset = gl.expand_dims(gl.where(valid, idx, 0).to(gl.int64) * X + FIRST, 1)
    col = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    mask = gl.expand_dims(valid, 1)
    if FIXED:
        fixed_ptr = dk_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
        value = (value * grid).to(gl.int64)
        gl.atomic_add(fixed_ptr + offset + col, value, mask=mask, sem="relaxed")
    else:
        gl.atomic_add(dk_ptr + offset + col, value, mask=mask, sem="relaxed")


@gluon.jit
@no_type_check
def _fold(x):
    """Add the accumulator's rows 8 apart, which one thread holds: half the registers."""
    upper, lower = gl.split(x.reshape([4, 2, 8, HEADS]).permute([0, 2, 3, 1]))
    return upper + lower


@gluon.jit(do_not_specialize=["n_heads", "n_keys", "n_slots"])
@no_type_check
def gradient_kernel(
    q_ptr, k_ptr, w_ptr, idx_ptr, length_ptr, grad_ptr, d_kl_ptr, grid_ptr, dq_ptr, dw_ptr, dk_ptr,
    n_heads, n_keys, n_slots,
    X: gl.constexpr, SLOTS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Gradients of one query t, with g[slot] = grad[t, slot] d_kl[t] and dots[slot, j] = q[t, j] . k[idx[t, slot]].

    u[slot, j] = g[slot] w[t, j] 1[dots > 0], in bf16; dq[t, j] = sum over slots of u k[idx]; dk[idx] += sum over j of
    u q[t, j]; dw[t, j] = sum over slots of g relu(dots). Only the order of the additions to dk varies.
    """
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    U: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    COPY: gl.constexpr = _copy_layout(X)
    query = gl.program_id(0).to(gl.int64)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, X], TILE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, X], TILE)
    u_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HEADS], TILE)
    idx_smem = gl.allocate_shared_memory(gl.int32, [SLOTS // KEYS, KEYS], FLAT)
    g_smem = gl.allocate_shared_memory(gl.float32, [SLOTS // KEYS, KEYS], FLAT)

    slot = gl.arange(0, SLOTS, FLAT_SLOTS)
    idx = gl.load(idx_ptr + query * n_slots + slot, mask=slot < n_slots, other=-1)
    g = gl.load(grad_ptr + query * n_slots + slot, mask=slot < n_slots, other=0.0)
    _whole(idx_smem).store(idx)
    # A slot that names no key has no gradient, whatever the cotangent.
    g = gl.where((idx >= 0) & (idx < n_keys), g * gl.load(d_kl_ptr + query), 0.0)
    _whole(g_smem).store(g)
    n_tiles = gl.cdiv(gl.load(length_ptr + query), KEYS)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, ACC))
    w = gl.load(w_ptr + query * n_heads + head, mask=head < n_heads, other=0.0)
    grid = gl.load(grid_ptr)
    gl.barrier()
    # The queries belong to the first tile's group, so that the first wait covers them.
    _load_heads(q_smem, q_ptr, query, n_heads, X)
    for i in gl.static_range(STAGES - 1):
        _gather(k_smem.index(i), k_ptr, idx_smem, i, n_tiles, n_keys, X)
    zero = gl.zeros([KEYS, PART], gl.float32, ACC)
    dq = gl.zeros([HEADS, X], gl.float32, WIDE)
    dw = _fold(gl.zeros([KEYS, HEADS], gl.float32, ACC))
    _await_tile(STAGES - 2)
    dots = hopper.warpgroup_mma_wait(0, deps=[_dots(k_smem.index(0), q_smem)])
    stage = 0
    for tile in range(n_tiles):
        g_tile = gl.expand_dims(g_smem.index(tile).load(KEY), 1)
        dw += _fold(_relu(dots) * g_tile)
        u = gl.where(dots > 0, g_tile * gl.expand_dims(w, 0), 0.0).to(gl.bfloat16)
        u_tile = u_smem.index(tile & 1)
        u_tile.store(u)
        # Everyone's u and the next tile are there; everyone has done with the products of the tile before: its buffer
        # is filled next, and its u gives way in the next step.
        _await_tile(STAGES - 3)
        after = gl.where(stage == STAGES - 1, 0, stage + 1)
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        u_regs = gl.convert_layout(u, U)
        # dk comes in parts: fewer registers, and one part is added while the next is multiplied.
        for part in gl.static_range(X // PART):
            dk = hopper.warpgroup_mma(
                u_regs, q_smem.slice(part * PART, PART, 1), zero, use_acc=False, is_async=True
            )
            if part == 0:
                dq = hopper.warpgroup_mma(
                    u_tile.permute([1, 0]), k_smem.index(stage), dq, is_async=True
                )
                _gather(
                    k_smem.index(before), k_ptr, idx_smem, tile + STAGES - 1, n_tiles, n_keys, X
                )
            if part == X // PART - 1:
                # Past the last tile this multiplies what an earlier tile left; nobody looks at it.
                dots = _dots(k_smem.index(after), q_smem)
                dk, dq, dots, u_regs = hopper.warpgroup_mma_wait(0, deps=[dk, dq, dots, u_regs])
            else:
                dk, dq = hopper.warpgroup_mma_wait(0, deps=[dk, dq])
            _add_rows(dk_ptr, dk, idx_smem.index(tile), n_keys, grid, X, part * PART, FIXED)
        stage = after
    async_copy.wait_group(0)
    dw_sum = gl.sum(gl.sum(dw, 1), 0)
    j = gl.arange(0, HEADS, dw_sum.type.layout)
    gl.store(dw_ptr + query * n_heads + j, dw_sum, mask=j < n_heads)
    rows = gl.arange(0, HEADS, gl.SliceLayout(1, COPY))
    col = gl.arange(0, X, gl.SliceLayout(0, COPY))
    pointers = dq_ptr + gl.expand_dims((query * n_heads + rows) * X, 1) + gl.expand_dims(col, 0)
    dq = gl.convert_layout(dq.to(gl.bfloat16), COPY)
    gl.store(pointers, dq, mask=gl.expand_dims(rows < n_heads, 1))
