"""Gather of rows of global memory into tiles of shared memory by cp.async, each thread picking its own rows.

An array of int32 [512] in `SLOTS` layout holds four numbers of each thread: element 4 t + i belongs to thread t and
names the source of row t // 8 + 16 i of a tile of 64 rows, so that 8 threads copy the 128 bytes of a row that are one
line of shared memory.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.sparse_mla.pallas_gpu_products import ATOM, ROWS, TILE

ROWS_PER_THREAD = ROWS // (asm.GROUP // 8)
SLOTS = plgpu.Layout.WG_STRIDED((asm.GROUP * ROWS_PER_THREAD,), vec_size=ROWS_PER_THREAD)
SLOTS_TYPE = plgpu.ShapeDtypeStruct((asm.GROUP * ROWS_PER_THREAD,), jnp.int32, SLOTS)

# t: the thread's number in its warpgroup.
THREAD = "mov.u32 t, %tid.x; and.b32 t, t, 127;"


def thread_integers(values: list[ir.Value], layout: Any) -> mgpu.FragmentedArray:
    """Return the int32 array of which each thread holds these values, in one register."""
    kind = ir.VectorType.get((len(values),), asm.i32())
    registers = np.empty((1,), dtype=object)
    registers[0] = vector.from_elements(kind, values)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)


def tile_place(down: int, tile: str) -> str:
    """Return PTX for a thread's 16 bytes of a tile: d, their address, and c, their place in the line of 128 bytes.

    Row r = t / 8 is line r % 8 of group r / 8; chunk c of the line is at place c ^ (r % 8).
    """
    return (
        "shr.u32 r, t, 3; and.b32 c, t, 7;"
        f"shr.u32 s, r, 3; mad.lo.u32 d, s, {down}, {tile};"
        "and.b32 s, r, 7; shl.b32 r, s, 7; add.u32 d, d, r; xor.b32 s, s, c; shl.b32 s, s, 4;"
        "add.u32 d, d, s;"
    )


def load_slots(
    idx: asm.Ref, query: jax.Array, first: jax.Array, *, spread: bool = False
) -> jax.Array:
    """Load the indices of 64 slots of a query as `SLOTS`; -1 past the end of the list.

    Args:
        idx: int32 [T, K] in global memory.
        query: int32 scalar in [0, T).
        first: int32 scalar, the first slot.
        spread: Give row n the slot n % 8 // 2 * 16 + n // 8 * 2 + n % 2, so that the columns of a product which one
            thread holds are 16 neighbouring slots: see `store_fragments`.
    """
    n, n_slots = ROWS_PER_THREAD, idx.shape[1]
    start, stride = "shr.u32 t, t, 3;", 16  # a thread's first row, and the step to its next ones
    if spread:
        stride = 4
        start += (
            "shl.b32 s, t, 3; and.b32 s, s, 48; and.b32 q, t, 1; add.u32 s, s, q;"
            "shr.u32 t, t, 3; mad.lo.u32 t, t, 2, s;"
        )

    def body(
        _: Any, ref: ir.Value, query: mgpu.FragmentedArray, first: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        lines = ["{ .reg .b32 t, s, q; .reg .b64 a; .reg .pred p;", THREAD, start]
        lines.append("add.u32 t, t, $6;")
        for i in range(n):
            lines += [
                f"add.u32 s, t, {stride * i}; setp.lt.u32 p, s, {n_slots}; mov.b32 ${i}, -1;",
                f"mad.wide.u32 a, $5, {4 * n_slots}, $4; mad.wide.u32 a, s, 4, a;",
                f"@p ld.global.nc.u32 ${i}, [a];",
            ]
        operands = [asm.address(ref), asm.scalar(query), asm.scalar(first)]
        constraints = ",".join(["=&r"] * n + ["l", "r", "r"])
        values = asm.emit_values(" ".join([*lines, "}"]), constraints, operands, asm.i32(), n)
        return thread_integers(values, SLOTS)

    arg_types = (asm.PLAIN, asm.SCALAR, asm.SCALAR)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=SLOTS_TYPE)(body)(idx, query, first)


def count_slots(first: jax.Array, n_valid: int | jax.Array) -> jax.Array:
    """Return the numbers first + row as `SLOTS`, -1 from row n_valid on."""
    n = ROWS_PER_THREAD

    def body(
        _: Any, first: mgpu.FragmentedArray, n_valid: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        lines = ["{ .reg .b32 t, s; .reg .pred p;", THREAD, "shr.u32 t, t, 3;"]
        for i in range(n):
            lines.append(
                f"add.u32 s, t, {16 * i}; setp.lt.u32 p, s, $5;"
                f"add.u32 s, s, $4; selp.b32 ${i}, s, -1, p;"
            )
        operands = [asm.scalar(first), asm.scalar(n_valid)]
        constraints = ",".join(["=&r"] * n + ["r", "r"])
        values = asm.emit_values(" ".join([*lines, "}"]), constraints, operands, asm.i32(), n)
        return thread_integers(values, SLOTS)

    arg_types = (asm.SCALAR, asm.SCALAR)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=SLOTS_TYPE)(body)(
        first, jnp.int32(n_valid)
    )


def copy_rows(source: asm.Ref, slots: jax.Array, column: int | jax.Array, tile: asm.Ref) -> None:
    """Start to copy columns [column, column + width) of the rows in `slots` into a tile; zeros for rows outside.

    A copy is 16 bytes. What a slot outside [0, rows of the source) names is never read.

    Args:
        source: bf16 in global memory; its last axis are the columns, the axes before it the rows.
        slots: `SLOTS`.
        column: First column, a multiple of 8.
        tile: bf16 [64, width] in shared memory, `operand`.
    """
    n, n_rows, row_bytes = ROWS_PER_THREAD, math.prod(source.shape[:-1]), 2 * source.shape[-1]
    static = isinstance(column, int)

    def body(
        _: Any,
        source_ref: ir.Value,
        slots: mgpu.FragmentedArray,
        tile_ref: ir.Value,
        shift: mgpu.FragmentedArray,
    ) -> None:
        kind = ir.MemRefType(tile_ref.type)
        strides, _ = kind.get_strides_and_offset()
        down, along = 2 * strides[0], 2 * strides[1]
        lines = ["{ .reg .b32 t, r, c, d, s; .reg .b64 a; .reg .pred p;", THREAD]
        lines.append(tile_place(down, "$5") + ("" if static else " add.u32 c, c, $6;"))
        for i in range(n):
            lines.append(
                f"setp.lt.u32 p, ${i}, {n_rows}; selp.b32 r, ${i}, 0, p; selp.b32 s, 16, 0, p;"
                f"mad.wide.u32 a, r, {row_bytes}, $4; mad.wide.u32 a, c, 16, a;"
            )
            for atom in range(kind.shape[1]):
                to = 2 * i * down + atom * along
                where = (2 * column if static else 0) + atom * 2 * ATOM
                lines.append(f"cp.async.cg.shared.global [d+{to}], [a+{where}], 16, s;")
        addresses = [asm.address(source_ref), asm.address(tile_ref)]
        operands = [*asm.elements(slots), *addresses, asm.scalar(shift)]
        asm.emit(" ".join([*lines, "}"]), ",".join(["r"] * n + ["l", "r", "r"]), operands)

    chunk = jnp.int32(0 if static else column // 8)
    arg_types = (asm.PLAIN, SLOTS, TILE, asm.SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(body)(source, slots, tile, chunk)


def store_mask(slots: jax.Array, mask: asm.Ref, n_rows: int) -> None:
    """Store 0 for each slot in [0, n_rows) and -inf for another: float32 [64] in shared memory."""
    n = ROWS_PER_THREAD

    def body(_: Any, slots: mgpu.FragmentedArray, mask_ref: ir.Value) -> None:
        lines = ["{ .reg .b32 t, r; .reg .pred p, first;", THREAD]
        lines.append("shr.u32 r, t, 3; mad.lo.u32 r, r, 4, $4; and.b32 t, t, 7;")
        lines.append("setp.eq.u32 first, t, 0;")  # one of the 8 threads of a row
        for i in range(n):
            lines.append(
                f"setp.lt.u32 p, ${i}, {n_rows}; selp.b32 t, 0, 0xff800000, p;"
                f" @first st.shared.b32 [r+{64 * i}], t;"
            )
        operands = [*asm.elements(slots), asm.address(mask_ref)]
        asm.emit(" ".join([*lines, "}"]), ",".join(["r"] * n + ["r"]), operands)

    plgpu.inline_mgpu(arg_types=(SLOTS, asm.PLAIN))(body)(slots, mask)
