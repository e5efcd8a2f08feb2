"""The producer of the paged MLA kernel for FP8 rows: load, widen to bfloat16, store.

A half tile is two pieces of 64 rows x 128 channels, one power-of-two scale a row and piece. While a half tile is
widened, the first piece of the next one is on its way to registers and the second to a stage in shared memory: the two
are counted apart, so waiting for one is not waiting for the other. With one piece in flight, in registers, memory
latency was the limit.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pallas_kernels import gluon_hopper as hw
from pallas_kernels.paged_mla import gluon_gpu_tiles as tiles
from pallas_kernels.paged_mla.gluon_gpu_tiles import HALF, ROPE, STEP, TILE, TWO_GROUPS

GROUP = gl.constexpr(128)  # channels that share a scale
GROUPS = gl.constexpr(4)
# Half tiles in the order in which they are freed: left of tile 0, right of 1, right of 0, left of 1.
TILE_OF = gl.constexpr((0, 1, 0, 1))
SIDE_OF = gl.constexpr((0, 1, 1, 0))
FREE_OF = gl.constexpr(
    (tiles.FREE_0L.value, tiles.FREE_1R.value, tiles.FREE_0R.value, tiles.FREE_1L.value)
)

# 16-byte chunks of a piece (64 rows, 128 e4m3 channels): 4 lanes on 64 bytes of a row, 8 lanes on 8 rows, so that the
# 16-byte stores of the widened channels meet no bank twice.
CHUNK = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]],
        [[8, 0], [16, 0]],
        [],
        [64, 8],
    )
)
ROW_CHUNK = gl.constexpr(gl.SliceLayout(1, CHUNK.value))
# The same chunks as words, for the stage: each thread reads what it copied.
STAGED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        [[8, 0], [16, 0]],
        [],
        [64, 32],
    )
)
# The chunks with the axis over a thread's registers apart, and what a thread needs once a row, such as a scale.
CHUNK_CUBE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [32, 0, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2]],
        [[8, 0, 0], [16, 0, 0]],
        [],
        [64, 2, 4],
    )
)
LANE = gl.constexpr(gl.SliceLayout(1, CHUNK_CUBE.value))
# The same rows in each thread, for the copy of the rope part.
ROPE_COPY = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[8, 0], [16, 0]],
        [],
        [64, 64],
    )
)
WORDS_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 32))  # the stage, a bfloat16 tile as words


@gluon.jit
@no_type_check
def _widen(word, scale):
    """Return 4 e4m3 channels times their scale as two words of 2 bfloat16, exact where bfloat16 holds the product.

    Sign, 4 exponent and 3 mantissa bits moved to a bfloat16's places are the value times 2^-120, subnormals too. NaN
    codes read as 480. `scale` is the bits of two equal bfloat16.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t, up;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.b32 s, a, 4;
        shr.b32 t, b, 4;
        and.b32 s, s, 0x07f007f0;
        and.b32 t, t, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, s, 0xea;
        lop3.b32 b, b, 0x80008000, t, 0xea;
        mov.b32 up, 0x7b807b80;
        mul.rn.bf16x2 a, a, up;
        mul.rn.bf16x2 b, b, up;
        mul.rn.bf16x2 $0, a, $3;
        mul.rn.bf16x2 $1, b, $3;
        }""",
        "=r,=r,r,r",
        [word, scale],
        (gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
@no_type_check
def _over_chunks(x):
    """Repeat what a thread has once a row over its chunks."""
    x = gl.expand_dims(x, 1).broadcast_to([TILE, 2, 4]).reshape([TILE, 8])
    return gl.convert_layout(x, CHUNK, assert_trivial=True)


@gluon.jit
@no_type_check
def _fetch(latent_ptr, scale_ptr, row, n_rows, after, SIDE: gl.constexpr):
    """Start loading a half tile's first piece and both pieces' scales into registers; an invalid row loads row 0.

    `after` are zeros that depend on the previous words and scales. So those have arrived before these loads start:
    ptxas counts both on one scoreboard, and waiting for the older ones would wait for the newer too.
    """
    row = gl.where((row >= 0) & (row < n_rows), row, 0).to(gl.int64)
    lane_row = gl.convert_layout(row, gl.SliceLayout(1, LANE), assert_trivial=True)
    chunk = 2 * SIDE * GROUP + 16 * gl.arange(0, 8, gl.SliceLayout(0, CHUNK))
    bytes_ptr = latent_ptr.to(gl.pointer_type(gl.int8), bitcast=True)
    at = bytes_ptr + (row * (GROUPS * GROUP))[:, None] + (chunk[None, :] + _over_chunks(after))
    scales = gl.inline_asm_elementwise(
        "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l",
        [scale_ptr + (lane_row * GROUPS + 2 * SIDE)[:, None] + after], (gl.int32, gl.int32), False, 1,
    )  # fmt: skip
    words = gl.inline_asm_elementwise(
        "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l",
        [at], (gl.int32, gl.int32, gl.int32, gl.int32), False, 1,
    )  # fmt: skip
    return words, scales


@gluon.jit
@no_type_check
def _copy_to_stage(latent_ptr, row, n_rows, stage, SIDE: gl.constexpr):
    """Start copying a half tile's second piece to the stage; an invalid row becomes zeros and is not read."""
    row = gl.convert_layout(row, gl.SliceLayout(1, STAGED), assert_trivial=True)
    WORDS: gl.constexpr = GROUP // 4
    col = (2 * SIDE + 1) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, STAGED))
    valid = (row >= 0) & (row < n_rows)
    words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    at = words_ptr + (row.to(gl.int64) * (GROUPS * WORDS))[:, None] + col[None, :]
    async_copy.async_copy_global_to_shared(stage, at, mask=valid[:, None])
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _read_stage(stage):
    """Wait for the stage and return its words, the four of a chunk apart."""
    async_copy.wait_group(0)
    even, odd = gl.split(stage.load(STAGED).reshape([TILE, 8, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, CHUNK, assert_trivial=True),
        gl.convert_layout(w1, CHUNK, assert_trivial=True),
        gl.convert_layout(w2, CHUNK, assert_trivial=True),
        gl.convert_layout(w3, CHUNK, assert_trivial=True),
    )


@gluon.jit
@no_type_check
def _xor(a, b):
    return a ^ b


@gluon.jit
@no_type_check
def _arrived(words, scales, z):
    """Return zeros that depend on all that a thread has loaded; z is a zero unknown to the compilers."""
    mixed = words[0] ^ words[1] ^ words[2] ^ words[3]
    # Over the axes that lie in a thread's registers: chunks 4 apart, rows 32 apart.
    mixed = gl.reduce(mixed.reshape([TILE, 2, 4]), 1, _xor)
    mixed = gl.convert_layout(mixed, LANE, assert_trivial=True) ^ scales[0] ^ scales[1]
    mixed = gl.reduce(mixed.reshape([2, 32, 4]), 0, _xor) & z
    mixed = gl.expand_dims(mixed, 0).broadcast_to([2, 32, 4]).reshape([TILE, 4])
    return gl.convert_layout(mixed, LANE, assert_trivial=True)


@gluon.jit
@no_type_check
def _put(words, scale, row, n_rows, tile, PIECE: gl.constexpr):
    """Widen piece 0 to 3 of a tile and store it; an invalid row's scale becomes 0, and so its channels."""
    # A power of two is a bfloat16, the upper half of its float32; here twice in a word.
    scale = _over_chunks(scale)
    scale |= (scale.to(gl.uint32, bitcast=True) >> 16).to(gl.int32, bitcast=True)
    scale = gl.where(((row >= 0) & (row < n_rows))[:, None], scale, 0)
    a0, a1 = _widen(words[0], scale)
    a2, a3 = _widen(words[1], scale)
    a4, a5 = _widen(words[2], scale)
    a6, a7 = _widen(words[3], scale)
    # Word 4 i + 2 j + k of a chunk, from [.., k, j, i].
    low = gl.join(gl.join(a0, a1), gl.join(a2, a3))
    high = gl.join(gl.join(a4, a5), gl.join(a6, a7))
    out = gl.join(low, high).permute([0, 1, 4, 3, 2]).reshape([TILE, GROUP // 2])
    smem = tile[PIECE // 2].index(0)
    smem = smem._reinterpret(gl.int32, [TILE, HALF // 2], WORDS_SHARED)
    smem.slice(PIECE % 2 * (GROUP // 2), GROUP // 2, dim=1).store(out)


@gluon.jit
@no_type_check
def _copy_rope(rope_ptr, row, n_rows, smem):
    """Start copying the rope part of the rows of a tile."""
    row = gl.convert_layout(row, gl.SliceLayout(1, ROPE_COPY), assert_trivial=True)
    col = gl.arange(0, ROPE, gl.SliceLayout(0, ROPE_COPY))
    valid = (row >= 0) & (row < n_rows)
    at = rope_ptr + row.to(gl.int64)[:, None] * ROPE + col[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=valid[:, None])


@gluon.jit
@no_type_check
def allocate_stage():
    """Return shared memory for one piece."""
    return gl.allocate_shared_memory(gl.int32, [TILE, GROUP // 4], WORDS_SHARED)


@gluon.jit
@no_type_check
def produce_fp8(
    q_ptr, latent_ptr, rope_ptr, scale_ptr, rows_ptr, n_rows, n_heads, first_head, lo, hi, n_steps, q, k0, k1, ready,
    stage,
):  # fmt: skip
    """Load FP8 rows, widen them and store them as bfloat16 tiles; loads run one half tile ahead."""
    tiles.copy_queries(q_ptr, first_head, n_heads, q, ready[4])
    rows = (
        tiles.listed(rows_ptr, lo, hi, ROW_CHUNK),
        tiles.listed(rows_ptr, lo + TILE, hi, ROW_CHUNK),
    )
    start = gl.zeros([TILE, 4], gl.int32, LANE)
    words, scales = _fetch(latent_ptr, scale_ptr, rows[0], n_rows, start, 0)
    _copy_to_stage(latent_ptr, rows[0], n_rows, stage, 0)
    z = n_rows >> 31  # 0, which neither LLVM nor ptxas knows
    for step in range(n_steps):
        slot = lo + (step + 1) * STEP
        coming = rows
        for i in gl.static_range(4):
            row = rows[TILE_OF[i]]
            tile = k1 if TILE_OF[i] else k0
            after = _arrived(words, scales, z)
            if i == 2:
                # Likewise: the next rows are not looked at before this.
                zero = gl.convert_layout(gl.reduce(_over_chunks(after), 1, _xor), ROW_CHUNK)
                coming = (coming[0] + zero, coming[1] + zero)
            if i < 3:
                next_row = rows[TILE_OF[i + 1]]
            else:
                next_row = coming[0]
            # All loads of the next half tile start before this one is widened, and before its place is free.
            next_words, next_scales = _fetch(
                latent_ptr, scale_ptr, next_row, n_rows, after, SIDE_OF[(i + 1) % 4]
            )
            staged = _read_stage(stage)
            _copy_to_stage(latent_ptr, next_row, n_rows, stage, SIDE_OF[(i + 1) % 4])
            if step > 0:
                hw.sync(FREE_OF[i], TWO_GROUPS)
            if i >= 2:
                # Joins the next commit group, so the wait for the stage does not wait for it.
                _copy_rope(rope_ptr, row, n_rows, tile[2].index(0))
                async_copy.mbarrier_arrive(ready[i - 1], increment_count=False)
            if i == 0:
                coming = (
                    tiles.listed(rows_ptr, slot, hi, ROW_CHUNK),
                    tiles.listed(rows_ptr, slot + TILE, hi, ROW_CHUNK),
                )
            _put(words, scales[0], row, n_rows, tile, 2 * SIDE_OF[i])
            _put(staged, scales[1], row, n_rows, tile, 2 * SIDE_OF[i] + 1)
            fence_async_shared()  # plain stores wrote the half, wgmma reads it through the async proxy
            mbarrier.arrive(ready[TILE_OF[i] * 2 + SIDE_OF[i]])
            words = next_words
            scales = next_scales
        rows = coming
