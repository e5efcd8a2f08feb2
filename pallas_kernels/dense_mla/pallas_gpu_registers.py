"""What the dense kernels do below Pallas: work tickets, sums of tiles in global memory, masks of bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.mosaic_hopper import Ref


def next_ticket(counter: Ref, slot: Ref, base: int) -> None:
    """Draw the next number from a counter in global memory and leave base + number in shared memory.

    Called by one warpgroup; its first thread does the work. The warpgroup must arrive on an mbarrier afterwards, which
    orders the plain store to shared memory before the readers' loads.

    Args:
        counter: int32 [1] in global memory, 0 before the first draw.
        slot: int32 [1] in shared memory.
        base: Added to the number.
    """

    def emit(_: object, counter_ref: ir.Value, slot_ref: ir.Value) -> None:
        asm.emit(
            "{ .reg .b32 ticket; .reg .b32 lane; .reg .pred first;"
            " mov.u32 lane, %tid.x; and.b32 lane, lane, 127; setp.eq.u32 first, lane, 0;"
            " @first atom.global.add.u32 ticket, [$0], 1;"
            f" @first add.u32 ticket, ticket, {base};"
            " @first st.shared.u32 [$1], ticket; }",
            "l,r,~{memory}",
            [asm.address(counter_ref), asm.address(slot_ref)],
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(emit)(counter, slot)


def opaque(x: jax.Array) -> jax.Array:
    """Return an int32 scalar unchanged, in a way that hides from the compiler that it is loop-invariant.

    Descriptors of shared memory computed from it are then made anew in each step, in uniform registers,
    rather than hoisted out of the loop and kept in the scarce ordinary ones.
    """

    def emit(_: object, scalar: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        (value,) = asm.emit_values("mov.b32 $0, $1;", "=r,r", [asm.scalar(scalar)], asm.i32(), 1)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    splat = plgpu.Layout.WG_SPLAT
    return plgpu.inline_mgpu(
        arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, splat)
    )(emit)(x)


def add_fragments(target: Ref, x: jax.Array) -> None:
    """Add a wgmma tile to float32 global memory, atomically, in the order in which the threads hold it.

    Each instruction adds 16 bytes of a thread, 512 contiguous ones of a warp. Element (row, column) is
    at [column // 8, row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2, row % 16 // 8 * 2 + column % 2].

    Args:
        target: float32 [n / 8, 128, 4] in global memory.
        x: float32 [64, n] in the wgmma layout.
    """
    n = x.shape[1]

    def emit(_: object, ref: ir.Value, array: mgpu.FragmentedArray) -> None:
        registers = array.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT).registers
        values = [_scalar(r) for r in registers.flat]
        lines = ["{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; and.b32 t, t, 127;"]
        lines.append(f"mad.wide.u32 a, t, 16, ${len(values)};")
        for i in range(n // 8):
            four = ",".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"red.relaxed.gpu.global.add.v4.f32 [a+{2048 * i}], {{{four}}};")
        asm.emit(
            "\n".join([*lines, "}"]),
            ",".join(["f"] * len(values) + ["l", "~{memory}"]),
            [*values, asm.address(ref)],
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(emit)(target, x)


def load_fragments(source: Ref, n: int) -> jax.Array:
    """Load what `add_fragments` has added up: float32 [n / 8, 128, 4] to [64, n] in the wgmma layout."""

    def emit(_: object, ref: ir.Value) -> mgpu.FragmentedArray:
        lines = ["{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; and.b32 t, t, 127;"]
        lines.append(f"mad.wide.u32 a, t, 16, ${n // 2};")
        for i in range(n // 8):
            four = ",".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"ld.global.v4.f32 {{{four}}}, [a+{2048 * i}];")
        return asm.emit_tile([*lines, "}"], [asm.address(ref)], n)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, plgpu.Layout.WGMMA),
    )(emit)(source)


def keep_bits(x: jax.Array, words: list[jax.Array], otherwise: float) -> jax.Array:
    """Keep the elements of a wgmma tile whose bit is set, and replace the others.

    Args:
        x: float32 [64, n] in the wgmma layout.
        words: n / 32 int32 arrays [64] in the row layout; bit j of words[i][row] is for column 32 i + j.
        otherwise: The replacement.
    """
    n = x.shape[1]
    row, full = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def emit(
        _: object, array: mgpu.FragmentedArray, *bits: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        by_one = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
        registers = array.to_layout(by_one).registers
        i32 = ir.IntegerType.get_signless(32)
        const = functools.partial(mgpu.utils.c, ty=i32)
        # Thread t of a quad holds columns 8 i + 2 t and 8 i + 2 t + 1 of rows r and r + 8.
        shift = arith.muli(arith.andi(mgpu.utils.thread_idx(), const(3)), const(2))
        shifted = [[arith.shrui(_scalar(r), shift) for r in word.registers.flat] for word in bits]
        f32 = ir.F32Type.get()
        one = ir.VectorType.get((1,), f32)
        fill = vector.broadcast(one, mgpu.utils.c(otherwise, f32))
        kept = np.empty(registers.shape, dtype=object)
        for v in range(n // 2):
            column, lower_row = 8 * (v // 4) + v % 2, v // 2 % 2
            bit = arith.andi(shifted[column // 32][lower_row], const(1 << column % 32))
            is_set = arith.cmpi(arith.CmpIPredicate.ne, bit, const(0))
            kept.flat[v] = arith.select(is_set, registers.flat[v], fill)
        result = mgpu.FragmentedArray(_registers=kept, _layout=by_one, _is_signed=None)
        return result.to_layout(fragmented_array.WGMMA_LAYOUT)

    return plgpu.inline_mgpu(
        arg_types=(full,) + (row,) * len(words),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, full),
    )(emit)(x, *words)


def _scalar(register: ir.Value) -> ir.Value:
    """Take the only element of a register that may be a vector of one."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
