"""Named barriers of the sparse kernels, and gates: mbarriers that open when gathered rows have landed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels import mosaic_hopper as asm

FIRST_FREE_BARRIER = asm.first_free_barrier(3)


def sync_group(index: int) -> None:
    """Wait for the other warps of this warpgroup, whose number in the block is `index`."""
    asm.sync(1 + index, asm.GROUP)  # the barrier that Mosaic GPU uses for the same purpose


def gate_memory(n: int) -> Any:
    """Return shared memory for n gates: mbarriers that open when copies of all 128 threads have landed."""
    return plgpu.SMEM((2 * n,), jnp.int32)


def make_gates(gates: asm.Ref) -> None:
    """Make the gates of `gate_memory`; all threads of the block call it and then see them."""
    n = gates.shape[0] // 2

    def body(_: Any, ref: ir.Value) -> None:
        lines = ["{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;"]
        lines += [f"@first mbarrier.init.shared.b64 [$0+{8 * i}], {asm.GROUP};" for i in range(n)]
        asm.emit(" ".join([*lines, "bar.sync 0; }"]), f"r,{asm.MEMORY}", [asm.address(ref)])

    plgpu.inline_mgpu(arg_types=(asm.PLAIN,))(body)(gates)


def wait_gate(gates: asm.Ref, i: int | jax.Array, parity: int | jax.Array) -> None:
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
        operands = [asm.address(ref), asm.scalar(i), asm.scalar(phase)]
        asm.emit(text, f"r,r,r,{asm.MEMORY}", operands)

    wait = plgpu.inline_mgpu(arg_types=(asm.PLAIN, asm.SCALAR, asm.SCALAR))(body)
    wait(gates, jnp.int32(i), jnp.int32(parity))


def open_after_copies(gates: asm.Ref, i: int | jax.Array) -> None:
    """Arrive at a gate once this thread's copies so far have landed; does not wait."""

    def body(_: Any, ref: ir.Value, i: mgpu.FragmentedArray) -> None:
        text = (
            "{ .reg .b32 gate; mad.lo.u32 gate, $1, 8, $0;"
            " cp.async.mbarrier.arrive.noinc.shared.b64 [gate]; }"
        )
        asm.emit(text, f"r,r,{asm.MEMORY}", [asm.address(ref), asm.scalar(i)])

    plgpu.inline_mgpu(arg_types=(asm.PLAIN, asm.SCALAR))(body)(gates, jnp.int32(i))
