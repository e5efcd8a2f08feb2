"""Output of the Gluon forward of sparse MLA: whole tiles to their place, parts of tiles to be merged."""

import math
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pallas_kernels import gluon_combine
from pallas_kernels.sparse_mla import gluon_gpu_items as items

HEADS = gl.constexpr(items.HEADS_PER_TILE)
LN2 = gl.constexpr(math.log(2.0))


@gluon.constexpr_function
@no_type_check
def _wide_layout(half: int) -> gl.DistributedLinearLayout:
    """Return wgmma's accumulator layout with column bits 2, 4 and 8, 16 swapped between threads and registers."""
    columns = [[0, 32 << i] for i in range((half // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[items.HEADS_PER_TILE, half],
    )


@gluon.jit
@no_type_check
def _write_rows(
    o, total, ref, out_ptr, lse_ptr, row0, head0, n_heads, GROUP: gl.constexpr, HALF: gl.constexpr
):
    """Normalise rows row0 on and write this group's half of the output; group 0 writes the log-sum-exp."""
    if out_ptr.dtype.element_ty == gl.bfloat16:
        # Eight columns a thread, exchanged inside a warp: 16-byte stores, and no tile of keys waits to stage them.
        LAYOUT: gl.constexpr = _wide_layout(HALF)
    else:
        LAYOUT: gl.constexpr = o.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    if GROUP == 0:
        heads = gl.arange(0, HEADS, ref.type.layout)
        lse = gl.where(total > 0, ref * LN2 + gl.log(total), float("-inf"))
        gl.store(lse_ptr + row0 + heads, lse, mask=head0 + heads < n_heads)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)  # an empty row is 0
    o = o * gl.expand_dims(gl.convert_layout(inverse, O_ROW), 1)
    rows = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    cols = GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    pointers = out_ptr + gl.expand_dims((row0 + rows) * (2 * HALF), 1) + gl.expand_dims(cols, 0)
    value = gl.convert_layout(o.to(out_ptr.dtype.element_ty), LAYOUT)
    gl.store(pointers, value, mask=gl.expand_dims(head0 + rows < n_heads, 1))


@gluon.jit
@no_type_check
def write_item(o, total, ref, out, work, item, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Write a whole tile to the output, or a part of one to its place among the parts."""
    out_ptr, lse_ptr, part_ptr, part_lse_ptr = out
    _, n_heads, n_tiles, n_whole, _ = work
    tile, part = items.tile_and_part(item, work)
    tiles_per_query = gl.cdiv(n_heads, HEADS)
    head0 = (tile % tiles_per_query) * HEADS
    query = tile // tiles_per_query
    if item < n_whole:
        row0 = query.to(gl.int64) * n_heads + head0
        _write_rows(o, total, ref, out_ptr, lse_ptr, row0, head0, n_heads, GROUP, HALF)
    else:
        first_query, n_queries = n_whole // tiles_per_query, n_tiles // tiles_per_query
        place = part.to(gl.int64) * (n_queries - first_query) + (query - first_query)
        row0 = place * n_heads + head0
        _write_rows(o, total, ref, part_ptr, part_lse_ptr, row0, head0, n_heads, GROUP, HALF)


@gluon.jit(do_not_specialize=["n_rows", "first_row"])
@no_type_check
def merge_kernel(
    part_ptr, part_lse_ptr, _old_out, _old_lse, out_ptr, lse_ptr, n_rows, first_row,
    n_parts: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Program i: merge the parts of row i, see `gluon_combine.merge_row`, and write them to row first_row + i."""
    out_ptr += first_row.to(gl.int64) * DIM
    lse_ptr += first_row
    gluon_combine.merge_row(part_ptr, part_lse_ptr, out_ptr, lse_ptr, n_rows, n_parts, DIM)
