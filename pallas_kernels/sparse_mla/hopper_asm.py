"""What Pallas Mosaic GPU has no function for on Hopper: inline PTX, named barriers, gates opened by copies.

All of it is called by the 128 threads of a warpgroup, under Lane semantics.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

GROUP = 128  # threads of a warpgroup
# Mosaic GPU itself uses barrier 0, and one for each of three warpgroups.
FIRST_FREE_BARRIER = 4

Ref = Any  # a reference to memory, plain or sliced; Pallas has no public type for both
PLAIN = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT


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


def thread_integers(values: list[ir.Value], layout: Any) -> mgpu.FragmentedArray:
    """Return the int32 array of which each thread holds these values, in one register."""
    kind = ir.VectorType.get((len(values),), i32())
    registers = np.empty((1,), dtype=object)
    registers[0] = vector.from_elements(kind, values)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)


def _barrier(instruction: str, barrier: int | jax.Array, n_threads: int) -> None:
    if isinstance(barrier, int):
        text = f"bar.{instruction} {barrier}, {n_threads};"
        plgpu.inline_mgpu()(lambda _: emit(text, "", []))()
        return
    text = f"bar.{instruction} $0, {n_threads};"
    plgpu.inline_mgpu(arg_types=(SCALAR,))(lambda _, i: emit(text, "r", [scalar(i)]))(barrier)


def arrive(barrier: int | jax.Array, n_threads: int) -> None:
    """Say that this warpgroup has come, without waiting.

    What it wrote before is seen by those who wait.

    Args:
        barrier: Number of a named barrier, 4 to 15; one made at run time must be the same in all threads.
        n_threads: Threads that arrive or wait, a multiple of 32.
    """
    _barrier("arrive", barrier, n_threads)


def sync(barrier: int | jax.Array, n_threads: int) -> None:
    """Wait until n_threads threads have come to a named barrier, this warpgroup's among them."""
    _barrier("sync", barrier, n_threads)


def sync_group(index: int) -> None:
    """Wait for the other warps of this warpgroup, whose number in the block is `index`."""
    sync(1 + index, GROUP)  # the barrier that Mosaic GPU uses for the same purpose


def fence_operands() -> None:
    """Let wgmma see what this thread has stored to shared memory."""
    plgpu.inline_mgpu()(lambda _: emit("fence.proxy.async.shared::cta;", "", []))()


def gate_memory(n: int) -> Any:
    """Return shared memory for n gates: mbarriers that open when copies of all 128 threads have landed."""
    return plgpu.SMEM((2 * n,), jnp.int32)


def make_gates(gates: Ref) -> None:
    """Make the gates of `gate_memory`; all threads of the block call it and then see them."""
    n = gates.shape[0] // 2

    def body(_: Any, ref: ir.Value) -> None:
        lines = ["{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;"]
        lines += [f"@first mbarrier.init.shared.b64 [$0+{8 * i}], {GROUP};" for i in range(n)]
        emit(" ".join([*lines, "bar.sync 0; }"]), "r", [address(ref)])

    plgpu.inline_mgpu(arg_types=(PLAIN,))(body)(gates)


def wait_gate(gates: Ref, i: int | jax.Array, parity: int | jax.Array) -> None:
    """Wait until a gate has opened for the n-th time, where n - 1 has the given parity.

    There is no fence between the copies and wgmma that reads them, though PTX counts them as different proxies. Neither
    FlashMLA nor the Gluon kernel has one; the results are right, and a fence here costs some percent.
    """

    def body(_: Any, ref: ir.Value, i: mgpu.FragmentedArray, phase: mgpu.FragmentedArray) -> None:
        text = (
            "{ .reg .pred open; .reg .b32 gate; mad.lo.u32 gate, $1, 8, $0; again: "
            "mbarrier.try_wait.parity.shared.b64 open, [gate], $2;"
            " @open bra done; bra again; done: }"
        )
        emit(text, "r,r,r", [address(ref), scalar(i), scalar(phase)])

    wait = plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR, SCALAR))(body)
    wait(gates, jnp.int32(i), jnp.int32(parity))


def open_after_copies(gates: Ref, i: int | jax.Array) -> None:
    """Arrive at a gate once this thread's copies so far have landed; does not wait."""

    def body(_: Any, ref: ir.Value, i: mgpu.FragmentedArray) -> None:
        text = (
            "{ .reg .b32 gate; mad.lo.u32 gate, $1, 8, $0;"
            " cp.async.mbarrier.arrive.noinc.shared.b64 [gate]; }"
        )
        emit(text, "r,r", [address(ref), scalar(i)])

    plgpu.inline_mgpu(arg_types=(PLAIN, SCALAR))(body)(gates, jnp.int32(i))
