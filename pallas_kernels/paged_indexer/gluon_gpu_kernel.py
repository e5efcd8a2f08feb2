"""Indexer scores over paged keys on Hopper, in Gluon."""

from typing import no_type_check

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(64)  # keys of a tile: the M of one warpgroup's wgmma


@gluon.jit
@no_type_check
def _page_rows(table_ptr, first, hi, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the int64 cache rows of positions first..first+BLOCK-1 and which of them are below hi."""
    at = first + gl.arange(0, BLOCK, LAYOUT)
    if PAGE % BLOCK == 0:
        # A tile starts at a multiple of BLOCK, so it lies in one page: one scalar look-up.
        page = gl.load(table_ptr + first // PAGE, mask=first < hi, other=0)
        row = page.to(gl.int64) * PAGE + (first % PAGE) + gl.arange(0, BLOCK, LAYOUT)
    else:
        page = gl.load(table_ptr + at // PAGE, mask=at < hi, other=0)
        row = page.to(gl.int64) * PAGE + at % PAGE
    return row, at < hi


@gluon.jit
@no_type_check
def _copy_tile(
    k_ptr, k_smem, k_scale_ptr, scale_smem, table_ptr, first, hi,
    PAGE: gl.constexpr, QUANTISED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's keys and scales as one group; rows from hi on become zeros and are not read."""
    X: gl.constexpr = k_smem.shape[1]
    row, inside = _page_rows(table_ptr, first, hi, PAGE, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, X, gl.SliceLayout(0, LAYOUT))
    ptr = k_ptr + row[:, None] * X + col[None, :]
    async_copy.async_copy_global_to_shared(k_smem, ptr, mask=inside[:, None])
    if QUANTISED:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        row, inside = _page_rows(table_ptr, first, hi, PAGE, flat)
        async_copy.async_copy_global_to_shared(scale_smem, k_scale_ptr + row, mask=inside)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _halves(bytes_MX, M: gl.constexpr, X: gl.constexpr):
    """Widen e4m3 bytes, 32 of a row in each thread, to float16 in the order of a wgmma operand.

    float16 holds every e4m3 value. Column c = 32 q + 2 r + b of the bytes becomes column 8 r + 2 q + b.
    """
    half = gl.inline_asm_elementwise(
        """{
        .reg .b16 lo, hi;
        mov.b32 {lo, hi}, $2;
        cvt.rn.f16x2.e4m3x2 $0, lo;
        cvt.rn.f16x2.e4m3x2 $1, hi;
        }""",
        "=r,=r,r",
        [bytes_MX],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )
    half = half.reshape([M, 4, X // 8, 2]).permute([0, 2, 1, 3])
    return half.reshape([M, X])


@gluon.jit
@no_type_check
def _operand(tile, ACC: gl.constexpr):
    """Return a tile of e4m3 keys as the left operand of wgmma, in registers."""
    M: gl.constexpr = tile.shape[0]
    X: gl.constexpr = tile.shape[1]
    # Each thread takes 32 bytes of a row: 16-byte loads without bank conflicts.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [M, X],
    )  # fmt: skip
    return gl.convert_layout(_halves(tile.load(layout), M, X), gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
@no_type_check
def _copy_queries(q_ptr, q_smem, first_token, last_token):
    """Start copying the queries; a token past the last one reads the last one again, its scores are not stored."""
    TOKENS: gl.constexpr = q_smem.shape[0]
    J: gl.constexpr = q_smem.shape[1]
    X: gl.constexpr = q_smem.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // X, X // 8], [4, 1], [1, 0])
    row = gl.arange(0, J, gl.SliceLayout(1, layout))
    col = gl.arange(0, X, gl.SliceLayout(0, layout))
    for t in gl.static_range(TOKENS):
        token = min(first_token + t, last_token).to(gl.int64)
        at = q_ptr + token * (J * X) + row[:, None] * X + col[None, :]
        async_copy.async_copy_global_to_shared(q_smem.index(t), at)


@gluon.jit
@no_type_check
def paged_scores_kernel(
    q_ptr, w_ptr, k_ptr, k_scale_ptr, table_ptr, end_ptr, out_ptr,
    n_tokens, n_pages, n_keys, n_chunks, chunk,
    J: gl.constexpr, X: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, QUANTISED: gl.constexpr,
):  # fmt: skip
    """Score one chunk of one sequence's keys for TOKENS of its queries.

    Program (sequence, chunk, token group), token group fastest so that a chunk's keys are read from L2 the second time.
    """
    WARPS: gl.constexpr = 4
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, J, 16])
    per_row: gl.constexpr = X // 16 if QUANTISED else X // 8
    copy_layout: gl.constexpr = gl.BlockedLayout(
        [1, 16 if QUANTISED else 8], [32 // per_row, per_row], [WARPS, 1], [1, 0]
    )
    if QUANTISED:
        k_ptr = k_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    q_dtype: gl.constexpr = gl.float16 if QUANTISED else gl.bfloat16
    q_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)

    n_groups = (n_tokens + TOKENS - 1) // TOKENS
    pid = gl.program_id(0)
    group = pid % n_groups
    chunk_at = (pid // n_groups) % n_chunks
    seq = pid // n_groups // n_chunks
    first_token = seq * n_tokens + group * TOKENS
    table_ptr += seq.to(gl.int64) * n_pages

    # Keys beyond the last visible position of this group's tokens are never read.
    lo = chunk_at * chunk
    hi = 0
    for t in gl.static_range(TOKENS):
        hi = max(
            hi, gl.load(end_ptr + first_token + t, mask=group * TOKENS + t < n_tokens, other=0)
        )
    hi = min(min(hi, lo + chunk), n_keys)
    n_tiles = (hi - lo + BLOCK - 1) // BLOCK
    if n_tiles <= 0:
        return

    q_smem = gl.allocate_shared_memory(q_dtype, [TOKENS, J, X], q_shared)
    if QUANTISED:
        k_shared: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
        k_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, X], k_shared)
    else:
        k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, X], q_shared)

    scale_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES, BLOCK if QUANTISED else 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    _copy_queries(q_ptr, q_smem, first_token, seq * n_tokens + n_tokens - 1)
    # The queries belong to the first tile's group, so that the first wait covers them.
    for i in gl.static_range(STAGES - 1):
        _copy_tile(
            k_ptr, k_smem.index(i), k_scale_ptr, scale_smem.index(i), table_ptr,
            lo + i * BLOCK, hi, PAGE, QUANTISED, copy_layout,
        )  # fmt: skip

    head = gl.arange(0, J, gl.SliceLayout(0, acc_layout))
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, acc_layout))
    zero = gl.zeros([BLOCK, J], gl.float32, acc_layout)
    weights = ()
    ends = ()
    for t in gl.static_range(TOKENS):
        live = group * TOKENS + t < n_tokens
        # Triton knows no starred tuples.
        weight = gl.load(w_ptr + (first_token + t) * J + head, mask=live, other=0.0)
        weights = weights + (weight,)  # noqa: RUF005
        ends = ends + (gl.load(end_ptr + first_token + t, mask=live, other=0),)  # noqa: RUF005
    for i in range(n_tiles):
        async_copy.wait_group(STAGES - 2)
        # cp.async writes through the generic proxy, wgmma reads through the async proxy.
        fence_async_shared()
        # Everyone's part of tile i is there, and everyone has done with tile i - 1, whose buffer is filled next.
        gl.barrier()
        ahead = i + STAGES - 1
        _copy_tile(
            k_ptr, k_smem.index(ahead % STAGES), k_scale_ptr, scale_smem.index(ahead % STAGES), table_ptr,
            lo + ahead * BLOCK, hi, PAGE, QUANTISED, copy_layout,
        )  # fmt: skip

        at = lo + i * BLOCK + key
        tile = k_smem.index(i % STAGES)
        if QUANTISED:
            keys = _operand(tile, acc_layout)
            k_scale = scale_smem.index(i % STAGES).load(gl.SliceLayout(1, acc_layout))
        else:
            keys = tile
        acc = warpgroup_mma(
            keys, q_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        for t in gl.static_range(TOKENS):
            # The next token's product runs under this token's sum.
            if t + 1 < TOKENS:
                coming = warpgroup_mma(
                    keys, q_smem.index(t + 1).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                logits = warpgroup_mma_wait(1, [acc])
                acc = coming
            else:
                logits = warpgroup_mma_wait(0, [acc])
            parts = gl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[t][None, :]
            score = gl.sum(parts, axis=1)
            if QUANTISED:
                score *= k_scale
            score = gl.where(at < ends[t], score, float("-inf"))
            out_at = out_ptr + (first_token + t).to(gl.int64) * n_keys + at
            live = group * TOKENS + t < n_tokens
            gl.store(out_at, score, mask=live & (at < hi))
    async_copy.wait_group(0)
