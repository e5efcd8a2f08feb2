"""Products of tiles by wgmma, in place and without waiting, which Pallas Mosaic GPU does not offer."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import mosaic_hopper as asm

ROWS = 64  # of a product: the height of wgmma
ATOM = 64  # columns of a tile that lie together: 128 bytes of bf16, the width of the swizzle

OPERAND = asm.operand(2 * ATOM)
TILE = plgpu.RefType(OPERAND)
# One register an element, as wgmma has them: pairs of float32 become 64-bit registers, which ptxas must take apart.
ACC = plgpu.Layout._WGMMA_ACC_32BIT
FULL = plgpu.Layout.WGMMA
ROW = FULL.reduce(1)


def operand(shape: tuple[int, ...]) -> Any:
    """Return bf16 shared memory in the layout that wgmma reads."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)


def _acc_type(shape: tuple[int, ...]) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, ACC)


def _accumulator(shape: tuple[int, ...], flat: list[ir.Value]) -> mgpu.FragmentedArray:
    """Return float32 registers in the order of wgmma as an array in `ACC`."""
    zero = utils.c(0.0, ir.F32Type.get())
    like = mgpu.FragmentedArray.splat(zero, shape, ACC.to_mgpu())
    return asm.from_elements(flat, like)


def _descriptor(ref: ir.Value, outer_is_k: bool) -> tuple[int, list[int]]:
    """Return the upper bits of a tile's wgmma descriptor and the offset of each step of 16 along the contraction.

    Where the rows are the contraction axis, the hardware walks atoms along the row by the leading offset and groups
    of 8 rows by the stride offset; otherwise only the stride offset counts. Offsets are in units of 16 bytes.
    """
    kind = ir.MemRefType(ref.type)  # [rows / 8, columns / 64, 8, 64]
    strides, _ = kind.get_strides_and_offset()
    down, along = 2 * strides[0] >> 4, 2 * strides[1] >> 4
    swizzle_128 = 1 << 62
    bits = swizzle_128 | down << 32 | (along if outer_is_k else 1) << 16
    if outer_is_k:
        return bits, [2 * step * down for step in range(kind.shape[0] // 2)]
    return bits, [step // 4 * along + step % 4 * 2 for step in range(4 * kind.shape[1])]


def _base(name: str, operand: int, bits: int) -> str:
    """Return PTX that makes the descriptor of a tile, whose address is an operand of the assembly.

    It stands inside the assembly so that LLVM does not hoist descriptors out of loops into scarce registers.
    """
    return (
        f"cvt.u64.u32 {name}, ${operand}; shr.u64 {name}, {name}, 4; or.b64 {name}, {name}, {bits};"
    )


def _product_text(
    n_out: int, n_old: int, a: ir.Value | None, b: ir.Value, outer: tuple[bool, bool]
) -> str:
    """Return the PTX of a product; operands are out, old, b, then a's address or registers (a None)."""
    n = 2 * n_out
    b_bits, b_steps = _descriptor(b, outer[1])
    first_in = n_out + n_old
    lines = ["{ .reg .b64 a, a0, b, b0; .reg .pred old; wgmma.fence.sync.aligned;"]
    lines.append(_base("b0", first_in, b_bits))
    a_steps: list[int] = []
    if a is not None:
        a_bits, a_steps = _descriptor(a, outer[0])
        lines.append(_base("a0", first_in + 1, a_bits))
    out = ",".join(f"${i}" for i in range(n_out))
    for step, b_step in enumerate(b_steps):
        # With `old` false the instruction overwrites its accumulator.
        lines.append(f"setp.ne.b32 old, {int(n_old > 0 or step > 0)}, 0; add.s64 b, b0, {b_step};")
        if a is None:
            first = first_in + 1 + 4 * step
            a_text = "{" + ",".join(f"${first + i}" for i in range(4)) + "}"
            transposed = f"{int(outer[1])}"
        else:
            lines.append(f"add.s64 a, a0, {a_steps[step]};")
            a_text, transposed = "a", f"{int(outer[0])}, {int(outer[1])}"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
            f" {{{out}}}, {a_text}, b, old, 1, 1, {transposed};"
        )
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])


def multiply(
    acc: jax.Array | None,
    a: Any,
    b: asm.Ref,
    *,
    a_outer_is_k: bool = False,
    b_outer_is_k: bool = False,
) -> jax.Array:
    """Issue acc + a @ b as one wgmma group and do not wait for it; the result may only be read after `settle`.

    Args:
        acc: float32 [64, n] in `ACC`, or None for zeros.
        a: bf16 [64, k] as a `FULL` array or `operand` memory, or [k, 64] memory with a_outer_is_k.
        b: bf16 [n, k] `operand` memory, or [k, n] with b_outer_is_k.
        a_outer_is_k: Whether a's rows are the contraction axis.
        b_outer_is_k: Whether b's rows are the contraction axis.
    """
    in_registers = isinstance(a, jax.Array)
    n = b.shape[1 if b_outer_is_k else 0]
    n_out = n // 2

    def body(_: Any, b: ir.Value, a: Any, acc: Any = None) -> mgpu.FragmentedArray:
        old = [] if acc is None else asm.elements(acc)
        outer = (a_outer_is_k, b_outer_is_k)
        text = _product_text(n_out, len(old), None if in_registers else a, b, outer)
        operands = [*old, asm.address(b)]
        operands += asm.elements(a) if in_registers else [asm.address(a)]
        constraints = ["=f"] * n_out + [str(i) for i in range(len(old))]
        constraints += ["r"] * (len(operands) - len(old))
        f32 = ir.F32Type.get()
        flat = asm.emit_values(text, ",".join(constraints), operands, f32, n_out)
        return _accumulator((ROWS, n), flat)

    arrays = (b, a) if acc is None else (b, a, acc)
    return plgpu.inline_mgpu(
        arg_types=(TILE, FULL if in_registers else TILE, ACC)[: len(arrays)],
        return_type=_acc_type((ROWS, n)),
    )(body)(*arrays)


def settle(n_running: int, *accs: jax.Array) -> tuple[jax.Array, ...]:
    """Wait until at most n_running wgmma groups run; the arrays pass through, so that no use moves ahead of it."""

    def body(_: Any, *accs: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        flat = [x for acc in accs for x in asm.elements(acc)]
        n = len(flat)
        fields = iter(
            asm.emit_values(
                f"wgmma.wait_group.sync.aligned {n_running};",
                ",".join(["=f"] * n + [str(i) for i in range(n)]),
                flat,
                ir.F32Type.get(),
                n,
            )
        )
        return tuple(
            asm.from_elements(list(itertools.islice(fields, acc.registers.size)), acc)
            for acc in accs
        )

    types = tuple(_acc_type(acc.shape) for acc in accs)
    return plgpu.inline_mgpu(arg_types=(ACC,) * len(accs), return_type=types)(body)(*accs)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """Return an accumulator of zeros."""

    def body(_: Any) -> mgpu.FragmentedArray:
        zero = utils.c(0.0, ir.F32Type.get())
        return mgpu.FragmentedArray.splat(zero, shape, ACC.to_mgpu())

    return plgpu.inline_mgpu(return_type=_acc_type(shape))(body)()


def repeat_row(row: asm.Ref) -> jax.Array:
    """Return the accumulator [64, n] each of whose rows is float32 [n] of shared memory."""
    n_columns = row.shape[0]

    def body(_: Any, row_ref: ir.Value) -> mgpu.FragmentedArray:
        n = n_columns // 4
        lines = ["{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 3; shl.b32 t, t, 3;"]
        lines.append(f"add.u32 t, t, ${n};")
        lines += [
            f"ld.shared.v2.f32 {{${2 * i}, ${2 * i + 1}}}, [t+{32 * i}];" for i in range(n // 2)
        ]
        text, constraints = " ".join([*lines, "}"]), ",".join(["=&f"] * n + ["r"])
        values = asm.emit_values(text, constraints, [asm.address(row_ref)], ir.F32Type.get(), n)
        flat = [values[2 * (i // 4) + i % 2] for i in range(n_columns // 2)]
        return _accumulator((ROWS, n_columns), flat)

    kind = _acc_type((ROWS, n_columns))
    return plgpu.inline_mgpu(arg_types=(asm.PLAIN,), return_type=kind)(body)(row)


def paired(acc: jax.Array) -> jax.Array:
    """Return a settled accumulator in `FULL`."""

    def body(_: Any, acc: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return acc.to_layout(FULL.to_mgpu())

    kind = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, FULL)
    return plgpu.inline_mgpu(arg_types=(ACC,), return_type=kind)(body)(acc)


def scale_rows(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply each row of an accumulator by its factor, float32 [64] in `ROW`; skipped where a warp's are all 1."""

    def body(
        _: Any, acc: mgpu.FragmentedArray, factor: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        f32, contract = ir.F32Type.get(), arith.FastMathFlags.contract
        factors, old = asm.elements(factor), asm.elements(acc)  # of rows r and r + 8
        text = (
            "{ .reg .pred p; setp.neu.f32 p, $1, 0f3F800000; @!p setp.neu.f32 p, $2, 0f3F800000;"
            " vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
        )
        (some,) = asm.emit_values(text, "=r,f,f", factors, asm.i32(), 1)
        some = arith.cmpi(arith.CmpIPredicate.ne, some, utils.c(0, asm.i32()))
        branch = scf.IfOp(some, [f32] * len(old), has_else=True)  # type: ignore[call-arg]
        with ir.InsertionPoint(branch.then_block):
            scaled = [
                arith.mulf(x, factors[i // 2 % 2], fastmath=contract) for i, x in enumerate(old)
            ]
            scf.yield_(scaled)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        return asm.from_elements(list(branch.results), acc)

    kind = _acc_type(acc.shape)
    return plgpu.inline_mgpu(arg_types=(ACC, ROW), return_type=kind)(body)(acc, factor)
