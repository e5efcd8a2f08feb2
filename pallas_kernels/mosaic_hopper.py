"""What Pallas Mosaic GPU has no function for on Hopper, and several kernels need: inline PTX, named barriers, products.

All of it is called by the 128 threads of a warpgroup.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

GROUP = 128  # threads of a warpgroup
Ref = Any  # a reference to memory, plain or sliced, or its declaration; Pallas has no public type for all
PLAIN = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT
MEMORY = "~{memory}"  # keeps loads and stores on their side of an instruction
# For kernels that place all barriers themselves, where no thread reads shared memory that it also writes.
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


def i32() -> ir.Type:
    """Return MLIR's 32-bit integer type."""
    return ir.IntegerType.get_signless(32)


def emit(text: str, constraints: str, operands: list[ir.Value]) -> None:
    """Emit inline assembly that may read and write memory."""
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True)


def emit_values(
    text: str, constraints: str, operands: list[ir.Value], kind: ir.Type, n: int
) -> list[ir.Value]:
    """Emit inline assembly with n results of one kind; it may read and write memory too."""
    results = llvm.StructType.get_literal([kind] * n) if n > 1 else kind
    out = llvm.inline_asm(results, operands, text, constraints, has_side_effects=True)
    return [llvm.extractvalue(kind, out, [i]) for i in range(n)] if n > 1 else [out]


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """Return the one register of a scalar."""
    return array.registers.item()


def address(ref: ir.Value) -> ir.Value:
    """Return where a reference points: 64 bits for global memory, 32 for shared."""
    return mgpu.utils.memref_ptr(ref)


def elements(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return a thread's elements in the order of its registers; bf16 in pairs, as int32."""
    if array.mlir_dtype == ir.BF16Type.get():
        return [llvm.bitcast(i32(), register) for register in array.registers.flat]
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in array.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def from_elements(flat: list[ir.Value], like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Return an array of 32-bit elements in the layout of another; undoes `elements`."""
    kind = like.registers.flat[0].type
    n = ir.VectorType(kind).shape[0]
    registers = np.empty(like.registers.shape, dtype=object)
    for i in range(registers.size):
        registers.flat[i] = vector.from_elements(kind, flat[n * i : n * (i + 1)])
    return mgpu.FragmentedArray(
        _registers=registers, _layout=like.layout, _is_signed=like.is_signed
    )


def first_free_barrier(n_groups: int) -> int:
    """Return the first of the 16 named barriers that is ours: Mosaic GPU uses 0, and one for each warpgroup."""
    return 1 + n_groups


def _barrier(instruction: str, barrier: int | jax.Array, n_threads: int) -> None:
    if isinstance(barrier, int):
        text = f"bar.{instruction} {barrier}, {n_threads};"
        plgpu.inline_mgpu()(lambda _: emit(text, MEMORY, []))()
        return
    text = f"bar.{instruction} $0, {n_threads};"
    plgpu.inline_mgpu(arg_types=(SCALAR,))(lambda _, i: emit(text, f"r,{MEMORY}", [scalar(i)]))(
        barrier
    )


def arrive(barrier: int | jax.Array, n_threads: int) -> None:
    """Say that this warpgroup has come, without waiting.

    What it wrote before is seen by those who wait.

    Args:
        barrier: Number of a named barrier, up to 15; one made at run time must be the same in all threads.
        n_threads: Threads that arrive or wait, a multiple of 32.
    """
    _barrier("arrive", barrier, n_threads)


def sync(barrier: int | jax.Array, n_threads: int) -> None:
    """Wait until n_threads threads have come to a named barrier, this warpgroup's among them."""
    _barrier("sync", barrier, n_threads)


def fence_operands() -> None:
    """Order this thread's stores to shared memory before what wgmma and TMA read, with no barrier."""
    plgpu.inline_mgpu()(lambda _: emit("fence.proxy.async.shared::cta;", MEMORY, []))()


def operand(swizzle: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> tuple[Any, Any]:
    """Return the transforms of shared memory that TMA writes and wgmma reads, rows of `swizzle` bytes together."""
    tiling: Any = plgpu.TilingTransform  # abstract to a type checker only
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // jnp.dtype(dtype).itemsize)), swizzling(swizzle)


def spread_rows(x_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Give each element of a row its value in x_row."""
    return jax.lax.broadcast_in_dim(x_row, shape, [0])


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
        return emit_tile(lines, [d for d, _ in descriptors], n)

    ref_type = plgpu.RefType(operand(swizzle))
    return plgpu.inline_mgpu(
        arg_types=(ref_type,) * (2 * len(pairs)),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, plgpu.Layout.WGMMA),
    )(emit)(*(ref for pair in pairs for ref in pair))


def emit_tile(lines: list[str], operands: list[ir.Value], n: int) -> mgpu.FragmentedArray:
    """Emit inline assembly whose n / 2 results are the registers of a wgmma accumulator: float32 [64, n]."""
    f32 = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * (n // 2)),
        operands,
        "\n".join(lines),
        ",".join(["=f"] * (n // 2) + ["l"] * len(operands)),
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


def store_tile(target: Ref, x: jax.Array) -> None:
    """Store a wgmma tile to global memory straight from the registers, 8 bytes a thread and row."""

    def emit(_: object, ref: ir.Value, array: mgpu.FragmentedArray) -> None:
        array.store_untiled(ref, optimized=False)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(emit)(target, x)
