"""Merging, in Gluon, of attention outputs that several programs computed from parts of one row's keys."""

from typing import no_type_check

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
@no_type_check
def merge_row(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, n_rows, n_parts: gl.constexpr, DIM: gl.constexpr
):
    """Merge row program_id(0), one query and head: the mean of its parts' outputs, weighted by exp of their lse.

    The sum over parts is taken in one fixed order. A part without keys has lse -inf and a finite output; a row without
    any gives 0 and -inf.

    part_ptr: float32 [n_parts, n_rows, DIM], DIM 128, 256 or 512. part_lse_ptr: float32 [n_parts, n_rows], natural log.
    out_ptr: bfloat16 [n_rows, DIM]. lse_ptr: float32 [n_rows].
    """
    PARTS: gl.constexpr = triton.next_power_of_2(n_parts)
    # Every thread of the four warps has all parts of its DIM / 128 columns, all loads in flight at once.
    layout: gl.constexpr = gl.BlockedLayout([PARTS, DIM // 128], [1, 32], [1, 4], [1, 0])
    row = gl.program_id(0).to(gl.int64)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, layout))
    col = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = part.to(gl.int64) * n_rows + row
    lse = gl.load(part_lse_ptr + at, mask=part < n_parts, other=float("-inf"))
    value = gl.load(
        part_ptr + at[:, None] * DIM + col[None, :], mask=(part < n_parts)[:, None], other=0.0
    )
    top = gl.max(lse, axis=0)
    # An empty row's parts are all -inf: subtract 0 there, so that every weight is 0 and none is NaN.
    base = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp(lse - base)
    total = gl.sum(weight, axis=0)
    inverse = gl.where(total != 0, 1.0 / total, 0.0)
    out = gl.sum(weight[:, None] * value, axis=0) * inverse
    gl.store(out_ptr + row * DIM + col, out.to(out_ptr.dtype.element_ty))
    gl.store(lse_ptr + row, base + gl.log(total))
