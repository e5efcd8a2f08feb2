"""What both producers and the consumers of the paged MLA kernel share: sizes, layouts, barriers, row lists."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pallas_kernels import gluon_hopper as hw

HEADS = gl.constexpr(64)  # of a program: the M of one warpgroup's wgmma
TILE = gl.constexpr(64)  # rows of a tile
STEP = gl.constexpr(128)  # rows of a pair of tiles
HALF = gl.constexpr(256)  # value dims of one consumer group
ROPE = gl.constexpr(64)

TILE_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))
ROW_COPY = gl.constexpr(gl.SliceLayout(1, hw.COPY.value))

# Named barriers by which the last reader of a half tile tells the producer. Triton itself takes 0 to 3.
# All of this kernel's barriers count two groups, one arriving and one waiting; each is used again only after an answer.
TWO_GROUPS = gl.constexpr(256)
FREE_0L, FREE_0R = gl.constexpr(12), gl.constexpr(13)
FREE_1L, FREE_1R = gl.constexpr(14), gl.constexpr(15)


@gluon.jit
@no_type_check
def listed(rows_ptr, slot, hi, LAYOUT: gl.constexpr):
    """Return the cache rows of TILE slots from `slot` on; -1 from slot hi on."""
    at = slot + gl.arange(0, TILE, LAYOUT)
    return gl.load(rows_ptr + at, mask=at < hi, other=-1)


@gluon.jit
@no_type_check
def copy_queries(q_ptr, first_head, n_heads, q, ready):
    """Start copying a head tile's queries, zeros for heads past the last; every thread arrives at `ready`."""
    DIM: gl.constexpr = 2 * HALF + ROPE
    head = first_head + gl.arange(0, HEADS, ROW_COPY)
    inside = (head < n_heads)[:, None]
    for i in gl.static_range(3):
        smem = q[i].index(0)
        col = i * HALF + gl.arange(0, smem.shape[1], gl.SliceLayout(0, hw.COPY))
        at = q_ptr + head[:, None] * DIM + col[None, :]
        async_copy.async_copy_global_to_shared(smem, at, mask=inside)
    async_copy.mbarrier_arrive(ready, increment_count=False)
