"""PTX named barriers and a few other instructions that Pallas Mosaic GPU does not offer as functions.

All of it is inline assembly for one warpgroup. `~{memory}` keeps loads and stores on their side of a barrier.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Ref = Any  # a reference, or its declaration; Pallas has several classes of both

# Mosaic GPU itself uses barrier 0 and one for each warpgroup: ours start after four warpgroups' worth.
FIRST_FREE = 5
# No barriers of Mosaic's own around loads and stores: these kernels place theirs, and no thread reads
# shared memory that it also writes.
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


def _barrier(instruction: str, barrier_id: int | jax.Array, n_threads: int) -> None:
    """Run `bar.<instruction>` on a barrier known now (int) or at run time (int32 scalar)."""

    def emit(operands: list, name: str, constraints: str) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            operands,
            f"bar.{instruction} {name}, {n_threads};",
            constraints,
            has_side_effects=True,
        )

    if isinstance(barrier_id, int):
        plgpu.inline_mgpu()(lambda _: emit([], str(barrier_id), "~{memory}"))()
        return
    scalar = plgpu.Layout.WG_SPLAT
    plgpu.inline_mgpu(arg_types=(scalar,))(
        lambda _, i: emit([i.registers[()]], "$0", "r,~{memory}")
    )(barrier_id)


# Say that this warp has come, without waiting; n_threads counts those who arrive and those who wait.
arrive = functools.partial(_barrier, "arrive")
# Wait until n_threads threads have come, this warp's 32 among them.
sync = functools.partial(_barrier, "sync")


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
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [mgpu.utils.memref_ptr(counter_ref), mgpu.utils.memref_ptr(slot_ref)],
            "{ .reg .b32 ticket; .reg .b32 lane; .reg .pred first;"
            " mov.u32 lane, %tid.x; and.b32 lane, lane, 127; setp.eq.u32 first, lane, 0;"
            " @first atom.global.add.u32 ticket, [$0], 1;"
            f" @first add.u32 ticket, ticket, {base};"
            " @first st.shared.u32 [$1], ticket; }",
            "l,r,~{memory}",
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(emit)(counter, slot)


def operand(swizzle: int) -> tuple[Any, Any]:
    """Return the transforms of bf16 shared memory that TMA writes and wgmma reads."""
    tiling: Any = plgpu.TilingTransform  # abstract to a type checker only
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // 2)), swizzling(swizzle)


def _descriptor(
    ref: ir.Value, swizzle: int, outer_is_k: bool
) -> tuple[ir.Value, Callable[[int], int]]:
    """Return the wgmma descriptor of a tiled operand and the offset of its k-th step of 16.

    Tiles are (8, swizzle / 2) elements. Where the rows are the contraction axis, the hardware walks
    tiles along the row by the leading offset and groups of 8 rows by the stride offset; otherwise only
    the stride offset counts, and steps along the row stay in one swizzled tile for swizzle / 32 steps.
    """
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    down, along = 2 * strides[0], 2 * strides[1]  # bytes from tile to tile
    leading = along if outer_is_k else 0
    descriptor = mma_utils.encode_descriptor(ref, leading, down, swizzle)
    steps = swizzle // 32

    def offset(step: int) -> int:
        n_bytes = 2 * step * down if outer_is_k else step // steps * along + step % steps * 32
        return n_bytes >> 4

    return descriptor, offset


def fresh_product(
    pairs: list[tuple[Ref, Ref]],
    *,
    swizzle: int,
    a_outer_is_k: bool = False,
    b_outer_is_k: bool = False,
) -> jax.Array:
    """Issue the sum of bf16 products `a @ b` from shared memory as one wgmma group, and do not wait for it.

    `plgpu.wgmma` adds to an accumulator, whose zeros cost a move per register and step; here the first
    instruction overwrites it instead. The result may be read only after `plgpu.wgmma_wait` and then
    `lax.optimization_barrier`, which keeps every use of it behind the wait.

    Args:
        pairs: Operands of each product. a is [64, k], or [k, 64] with a_outer_is_k; b is [n, k], or
            [k, n] with b_outer_is_k.
        swizzle: Bytes; all refs have the transforms `operand(swizzle)`.
        a_outer_is_k: Whether a's rows are the contraction axis.
        b_outer_is_k: Whether b's rows are the contraction axis.

    Returns:
        float32 [64, n] in the wgmma layout.
    """
    k_axis = 0 if b_outer_is_k else 1
    n, depth = pairs[0][1].shape[1 - k_axis], pairs[0][1].shape[k_axis]
    flags = f"1, 1, {int(a_outer_is_k)}, {int(b_outer_is_k)}"

    def emit(_: object, *refs: ir.Value) -> mgpu.FragmentedArray:
        n_regs = n // 2
        out = "{" + ",".join(f"${i}" for i in range(n_regs)) + "}"
        lines = ["{ .reg .pred old; .reg .b64 a; .reg .b64 b; wgmma.fence.sync.aligned;"]
        descriptors = []
        for i, ref in enumerate(refs):
            outer_is_k = b_outer_is_k if i % 2 else a_outer_is_k
            descriptors.append(_descriptor(ref, swizzle, outer_is_k))
        for pair in range(len(refs) // 2):
            (_, a_offset), (_, b_offset) = descriptors[2 * pair : 2 * pair + 2]
            a, b = f"${n_regs + 2 * pair}", f"${n_regs + 2 * pair + 1}"
            for step in range(depth // 16):
                lines += [
                    f"setp.ne.b32 old, {int(pair + step > 0)}, 0;",
                    f"add.s64 a, {a}, {a_offset(step)}; add.s64 b, {b}, {b_offset(step)};",
                    f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {out}, a, b, old, {flags};",
                ]
        lines.append("wgmma.commit_group.sync.aligned; }")
        return _run_product(lines, [d for d, _ in descriptors], n)

    ref_type = plgpu.RefType(operand(swizzle))
    return plgpu.inline_mgpu(
        arg_types=(ref_type,) * (2 * len(pairs)),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, plgpu.Layout.WGMMA),
    )(emit)(*(ref for pair in pairs for ref in pair))


def _run_product(lines: list[str], descriptors: list[ir.Value], n: int) -> mgpu.FragmentedArray:
    """Emit the PTX of a product and collect its n / 2 registers as a [64, n] array."""
    f32 = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * (n // 2)),
        descriptors,
        "\n".join(lines),
        ",".join(["=f"] * (n // 2) + ["l"] * len(descriptors)),
        has_side_effects=True,
    )
    zero = mgpu.utils.c(0.0, f32)
    by_one = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    shape = mgpu.FragmentedArray.splat(zero, (64, n), by_one).registers.shape
    registers = np.empty(shape, dtype=object)
    for i in range(n // 2):
        value = llvm.extractvalue(f32, struct, [i])
        registers.flat[i] = vector.broadcast(ir.VectorType.get((1,), f32), value)
    array = mgpu.FragmentedArray(_registers=registers, _layout=by_one, _is_signed=None)
    return array.to_layout(fragmented_array.WGMMA_LAYOUT)


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
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [*values, mgpu.utils.memref_ptr(ref)],
            "\n".join([*lines, "}"]),
            ",".join(["f"] * len(values) + ["l", "~{memory}"]),
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(emit)(target, x)


def opaque(x: jax.Array) -> jax.Array:
    """Return an int32 scalar unchanged, in a way that hides from the compiler that it is loop-invariant.

    Descriptors of shared memory computed from it are then made anew in each step, in uniform registers,
    rather than hoisted out of the loop and kept in the scarce ordinary ones.
    """

    def emit(_: object, scalar: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        value = llvm.inline_asm(
            i32, [scalar.registers[()]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    splat = plgpu.Layout.WG_SPLAT
    return plgpu.inline_mgpu(
        arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, splat)
    )(emit)(x)


def fence_proxy() -> None:
    """Order this thread's stores to shared memory before what wgmma and TMA read, with no barrier."""

    def emit(_: object) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [],
            "fence.proxy.async.shared::cta;",
            "~{memory}",
            has_side_effects=True,
        )

    plgpu.inline_mgpu()(emit)()


def load_fragments(source: Ref, n: int) -> jax.Array:
    """Load what `add_fragments` has added up: float32 [n / 8, 128, 4] to [64, n] in the wgmma layout."""

    def emit(_: object, ref: ir.Value) -> mgpu.FragmentedArray:
        lines = ["{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; and.b32 t, t, 127;"]
        lines.append(f"mad.wide.u32 a, t, 16, ${n // 2};")
        for i in range(n // 8):
            four = ",".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"ld.global.v4.f32 {{{four}}}, [a+{2048 * i}];")
        return _run_product([*lines, "}"], [mgpu.utils.memref_ptr(ref)], n)

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


def store_tile(target: Ref, x: jax.Array) -> None:
    """Store a wgmma tile to global memory straight from the registers, 8 bytes a thread and row."""

    def emit(_: object, ref: ir.Value, array: mgpu.FragmentedArray) -> None:
        array.store_untiled(ref, optimized=False)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(emit)(target, x)
