"""What the threads of a warpgroup take out of products: stored, added atomically, or handed to another warpgroup."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.sparse_mla import pallas_gpu_rows as rows
from pallas_kernels.sparse_mla.pallas_gpu_products import ACC, ATOM, FULL, ROW, ROWS, TILE

KEYS = plgpu.Layout.WG_STRIDED((2 * asm.GROUP,), vec_size=2)
KEYS_TYPE = plgpu.ShapeDtypeStruct((2 * asm.GROUP,), jnp.int32, KEYS)
# r: the thread's row of a product's first 8 of 16 rows a warp; q: its place among the 4 threads of a row.
_LANE_ROW = (
    "mov.u32 t, %tid.x; and.b32 q, t, 3; shr.u32 r, t, 2; and.b32 r, r, 7;"
    "shr.u32 t, t, 1; and.b32 t, t, 48; add.u32 r, r, t;"
)


def store_tile(
    target: asm.Ref, tile: asm.Ref, first: jax.Array, n_valid: int | jax.Array, column: int
) -> None:
    """Store rows [0, n_valid) of a tile to rows first.. of global memory, from `column` on; the inverse of `copy_rows`.

    Args:
        target: bf16 in global memory; its last axis are the columns, the axes before it the rows.
        tile: bf16 [64, width] in shared memory, `operand`, written by this warpgroup before a `sync_group`.
        first: First row.
        n_valid: Rows to store.
        column: First column, a multiple of 8.
    """
    n, row_bytes = rows.ROWS_PER_THREAD, 2 * target.shape[-1]

    def body(
        _: Any,
        ref: ir.Value,
        tile_ref: ir.Value,
        first: mgpu.FragmentedArray,
        n_valid: mgpu.FragmentedArray,
    ) -> None:
        kind = ir.MemRefType(tile_ref.type)
        strides, _ = kind.get_strides_and_offset()
        down, along = 2 * strides[0], 2 * strides[1]
        lines = ["{ .reg .b32 t, r, c, d, s, v<4>; .reg .b64 a; .reg .pred p;", rows.THREAD]
        lines.append(rows.tile_place(down, "$1"))
        lines.append("shr.u32 r, t, 3;")
        for i in range(n):
            lines.append(f"add.u32 s, r, {16 * i}; setp.lt.u32 p, s, $3; add.u32 s, s, $2;")
            lines.append(f"mad.wide.u32 a, s, {row_bytes}, $0; mad.wide.u32 a, c, 16, a;")
            for atom in range(kind.shape[1]):
                here, to = 2 * i * down + atom * along, 2 * column + atom * 2 * ATOM
                lines.append(f"ld.shared.v4.b32 {{v0, v1, v2, v3}}, [d+{here}];")
                lines.append(f"@p st.global.v4.b32 [a+{to}], {{v0, v1, v2, v3}};")
        operands = [asm.address(ref), asm.address(tile_ref), asm.scalar(first), asm.scalar(n_valid)]
        asm.emit(" ".join([*lines, "}"]), "l,r,r,r", operands)

    arg_types = (asm.PLAIN, TILE, asm.SCALAR, asm.SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(body)(target, tile, first, jnp.int32(n_valid))


def store_rows(
    target: asm.Ref, x: jax.Array, first: jax.Array, n_valid: int | jax.Array, column: int
) -> None:
    """Store rows [0, n_valid) of a bf16 [64, n] `FULL` array to rows first.. of global memory, from `column` on."""
    row_bytes = 2 * target.shape[-1]

    def body(
        _: Any,
        ref: ir.Value,
        x: mgpu.FragmentedArray,
        first: mgpu.FragmentedArray,
        n_valid: mgpu.FragmentedArray,
    ) -> None:
        pairs = asm.elements(x)
        n = len(pairs)
        lines = ["{ .reg .b32 t, q, r; .reg .b64 a0, a1; .reg .pred p;", _LANE_ROW]
        lines.append(f"add.u32 t, r, ${n + 1}; mad.wide.u32 a0, t, {row_bytes}, ${n};")
        lines.append(f"mad.wide.u32 a0, q, 4, a0; add.s64 a1, a0, {8 * row_bytes};")
        for half in range(2):  # rows r and r + 8
            lines.append(f"add.u32 t, r, {8 * half}; setp.lt.u32 p, t, ${n + 2};")
            for i in range(n // 2):
                to = 2 * column + 16 * i
                lines.append(f"@p st.global.b32 [a{half}+{to}], ${2 * i + half};")
        operands = [*pairs, asm.address(ref), asm.scalar(first), asm.scalar(n_valid)]
        asm.emit(" ".join([*lines, "}"]), ",".join(["r"] * n + ["l", "r", "r"]), operands)

    arg_types = (asm.PLAIN, FULL, asm.SCALAR, asm.SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(body)(target, x, first, jnp.int32(n_valid))


def store_row_values(target: asm.Ref, x: jax.Array, first: jax.Array, n_valid: jax.Array) -> None:
    """Store elements [0, n_valid) of a float32 [64] `ROW` array to elements first.. of global memory."""

    def body(
        _: Any,
        ref: ir.Value,
        x: mgpu.FragmentedArray,
        first: mgpu.FragmentedArray,
        n_valid: mgpu.FragmentedArray,
    ) -> None:
        text = (
            f"{{ .reg .b32 t, q, r; .reg .b64 a; .reg .pred p, one; {_LANE_ROW}"
            " setp.eq.u32 one, q, 0; add.u32 t, r, $3; mad.wide.u32 a, t, 4, $2;"
            "setp.lt.and.u32 p, r, $4, one; @p st.global.f32 [a], $0;"
            "add.u32 r, r, 8; setp.lt.and.u32 p, r, $4, one; @p st.global.f32 [a+32], $1; }"
        )
        operands = [*asm.elements(x), asm.address(ref), asm.scalar(first), asm.scalar(n_valid)]
        asm.emit(text, "f,f,l,r,r", operands)

    arg_types = (asm.PLAIN, ROW, asm.SCALAR, asm.SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(body)(target, x, first, n_valid)


def store_fragments(target: asm.Ref, x: jax.Array, first: jax.Array, column: jax.Array) -> None:
    """Store a bf16 [64, 64] `FULL` array whose columns are spread slots: see `load_slots`.

    Args:
        target: bf16 in global memory; its last axis takes 64 slots from `column` on, in their own order.
        x: The array.
        first: First row, of the axes before the last.
        column: First column, a multiple of 64.
    """
    row_bytes = 2 * target.shape[-1]

    def body(
        _: Any,
        ref: ir.Value,
        x: mgpu.FragmentedArray,
        first: mgpu.FragmentedArray,
        column: mgpu.FragmentedArray,
    ) -> None:
        lines = ["{ .reg .b32 t, q, r; .reg .b64 a0, a1;", _LANE_ROW, "add.u32 t, r, $17;"]
        lines.append(f"mad.wide.u32 a0, t, {row_bytes}, $16; mad.wide.u32 a0, $18, 2, a0;")
        lines.append(f"mad.wide.u32 a0, q, 32, a0; add.s64 a1, a0, {8 * row_bytes};")
        for half in range(2):  # rows r and r + 8
            for i in range(2):
                four = ",".join(f"${2 * j + half}" for j in range(4 * i, 4 * i + 4))
                lines.append(f"st.global.v4.b32 [a{half}+{16 * i}], {{{four}}};")
        operands = [*asm.elements(x), asm.address(ref), asm.scalar(first), asm.scalar(column)]
        asm.emit(" ".join([*lines, "}"]), ",".join(["r"] * 16 + ["l", "r", "r"]), operands)

    arg_types = (asm.PLAIN, FULL, asm.SCALAR, asm.SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(body)(target, x, first, column)


def load_keys(idx: asm.Ref, query: jax.Array, first: jax.Array) -> jax.Array:
    """Load for each thread the indices of its two rows of a product, for `add_rows`; -1 past the end of the list.

    Args:
        idx: int32 [T, K] in global memory.
        query: int32 scalar in [0, T).
        first: Slot of the product's first row.
    """
    n_slots = idx.shape[1]

    def body(
        _: Any, ref: ir.Value, query: mgpu.FragmentedArray, first: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        lines = ["{ .reg .b32 t, q, r; .reg .b64 a; .reg .pred p;", _LANE_ROW, "add.u32 r, r, $4;"]
        lines.append(f"mad.wide.u32 a, $3, {4 * n_slots}, $2; mad.wide.u32 a, r, 4, a;")
        for half in range(2):  # rows r and r + 8
            lines.append(f"add.u32 t, r, {8 * half}; setp.lt.u32 p, t, {n_slots};")
            lines.append(f"mov.b32 ${half}, -1; @p ld.global.nc.u32 ${half}, [a+{32 * half}];")
        operands = [asm.address(ref), asm.scalar(query), asm.scalar(first)]
        text, constraints = " ".join([*lines, "}"]), "=&r,=&r,l,r,r"
        return rows.thread_integers(
            asm.emit_values(text, constraints, operands, asm.i32(), 2), KEYS
        )

    arg_types = (asm.PLAIN, asm.SCALAR, asm.SCALAR)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=KEYS_TYPE)(body)(idx, query, first)


def _add_text(n: int, n_rows: int, row_bytes: int, column: int) -> str:
    """Return the PTX of `add_rows`; operands are n values, the target's address, rows r and r + 8.

    Two threads exchange columns so that each has four neighbours: the even one of 8 columns, the odd one of the next 8.
    An instruction then adds to 64 contiguous bytes of each of 8 rows.
    """
    lines = [
        f"{{ .reg .b32 t, q, o; .reg .b64 a0, a1; .reg .pred p<2>, odd; .reg .f32 s<2>, v<{n}>;"
    ]
    lines.append("mov.u32 t, %tid.x; and.b32 q, t, 3; and.b32 o, q, 1; setp.ne.u32 odd, o, 0;")
    lines.append("shr.u32 q, q, 1; mad.lo.u32 q, o, 2, q;")
    for half in range(2):
        row, address = f"${n + 1 + half}", f"a{half}"
        lines.append(
            f"setp.lt.u32 p{half}, {row}, {n_rows}; mad.wide.u32 {address}, {row}, {row_bytes}, ${n};"
        )
        lines.append(f"mad.wide.u32 {address}, q, 16, {address};")
    # Threads meet in the exchange; only then may those whose row is outside leave, twice in 32 values.
    for start in range(0, n, 32):
        adds: list[list[str]] = [[], []]
        for i in range(start, min(start + 32, n), 8):  # 16 columns of two rows
            for half in range(2):
                x = [f"${i + 2 * half + j}" for j in (0, 1, 4, 5)]
                v = [f"v{i + 4 * half + j}" for j in range(4)]
                lines += [
                    f"selp.f32 s0, {x[0]}, {x[2]}, odd; selp.f32 s1, {x[1]}, {x[3]}, odd;",
                    "shfl.sync.bfly.b32 s0, s0, 1, 31, -1; shfl.sync.bfly.b32 s1, s1, 1, 31, -1;",
                    f"selp.f32 {v[0]}, s0, {x[0]}, odd; selp.f32 {v[1]}, s1, {x[1]}, odd;",
                    f"selp.f32 {v[2]}, {x[2]}, s0, odd; selp.f32 {v[3]}, {x[3]}, s1, odd;",
                ]
                place = f"a{half}+{4 * column + 8 * i}"
                adds[half].append(
                    f"red.relaxed.gpu.global.add.v4.f32 [{place}], {{{', '.join(v)}}};"
                )
        for half in range(2):
            label = f"skip{start + half}"
            lines += [f"@!p{half} bra {label};", *adds[half], f"{label}:"]
    return " ".join([*lines, "}"])


def add_rows(target: asm.Ref, acc: jax.Array, keys: jax.Array, column: int) -> None:
    """Add the rows of a settled accumulator to rows of global memory, atomically; rows outside are left out.

    Args:
        target: float32 [S, D] in global memory.
        acc: float32 [64, n] in `ACC`, n a multiple of 16.
        keys: Rows of each thread, from `load_keys`.
        column: First column, a multiple of 4.
    """
    n_rows, row_bytes = target.shape[0], 4 * target.shape[1]

    def body(_: Any, ref: ir.Value, acc: mgpu.FragmentedArray, keys: mgpu.FragmentedArray) -> None:
        values = asm.elements(acc)
        n = len(values)
        operands = [*values, asm.address(ref), *asm.elements(keys)]
        text = _add_text(n, n_rows, row_bytes, column)
        asm.emit(text, ",".join(["f"] * n + ["l", "r", "r"]), operands)

    plgpu.inline_mgpu(arg_types=(asm.PLAIN, ACC, KEYS))(body)(target, acc, keys)


# What one warpgroup's threads hand to the same threads of another.


def box_memory() -> Any:
    """Return shared memory for `put` and `take`."""
    return plgpu.SMEM((ROWS * ROWS // 2,), jnp.int32)


def put(box: asm.Ref, x: jax.Array) -> None:
    """Leave a bf16 [64, 64] `FULL` array in a box."""

    def body(_: Any, ref: ir.Value, x: mgpu.FragmentedArray) -> None:
        lines = ["{ .reg .b32 t;", rows.THREAD, "mad.lo.u32 t, t, 16, $16;"]
        for i in range(4):
            four = ",".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"st.shared.v4.b32 [t+{16 * asm.GROUP * i}], {{{four}}};")
        operands = [*asm.elements(x), asm.address(ref)]
        asm.emit(" ".join([*lines, "}"]), ",".join(["r"] * 17), operands)

    plgpu.inline_mgpu(arg_types=(asm.PLAIN, FULL))(body)(box, x)


def take(box: asm.Ref) -> jax.Array:
    """Return the array that `put` left."""

    def body(_: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        lines = ["{ .reg .b32 t;", rows.THREAD, "mad.lo.u32 t, t, 16, $16;"]
        for i in range(4):
            four = ",".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"ld.shared.v4.b32 {{{four}}}, [t+{16 * asm.GROUP * i}];")
        text, constraints = " ".join([*lines, "}"]), ",".join(["=&r"] * 16 + ["r"])
        values = asm.emit_values(text, constraints, [asm.address(ref)], asm.i32(), 16)
        bf16 = ir.BF16Type.get()
        zero = utils.c(0.0, bf16)
        like = mgpu.FragmentedArray.splat(zero, (ROWS, ROWS), FULL.to_mgpu())
        registers = np.empty(like.registers.shape, dtype=object)
        for i, value in enumerate(values):
            registers.flat[i] = llvm.bitcast(ir.VectorType.get((2,), bf16), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)

    kind = plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, FULL)
    return plgpu.inline_mgpu(arg_types=(asm.PLAIN,), return_type=kind)(body)(box)
