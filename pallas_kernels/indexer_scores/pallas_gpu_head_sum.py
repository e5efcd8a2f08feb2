"""Register-level parts of the Hopper score kernel: wgmma over 64 keys and the head-summed epilogue.

A warpgroup multiplies 64 keys (rows of the accumulator) by the heads of a few queries (its columns), so that a thread
holds a quarter of the heads of the same two keys, and most of `sum_j w[j] relu(x[j])` is a chain of FMAs in one thread.
Written in Mosaic GPU, below Pallas, for what Pallas lacks: a product that overwrites its accumulator, a reduction that
leaves each lane of a quad another score, and stores of single lanes under a mask.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.experimental.mosaic.gpu import mma_utils, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels import mosaic_hopper as asm

WGMMA_ROWS = 64  # keys of one instruction
WARP_THREADS = 32
WARP_ROWS = 16  # keys of one warp
ROW_HALF = 8  # a thread holds rows r and r + 8
COLUMN_GROUP = 8  # a quad of lanes holds 8 neighbouring columns, two each
K_BYTES = 32  # bytes of the contracted axis in one instruction
SATURATION_BITS = 26  # sums of e4m3 products over 128 channels stay below 448^2 * 128 < 2^26
SATURATION_PTX = "0f32800000"  # 2^-26, in PTX


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """Static facts of a warpgroup's tile.

    Attributes:
        columns: Accumulator columns: queries of the warpgroup times heads.
        heads: Heads of a query, a power of two, at least 8.
        swizzle: Bytes of the shared-memory swizzle.
        saturate: Compute relu(x) as saturate(x * 2^-26); right for |x| < 2^26, and 0 for NaN.
    """

    columns: int
    heads: int
    swizzle: int
    saturate: bool


def i32(x: int) -> ir.Value:
    """Return an int32 constant."""
    return utils.c(x, ir.IntegerType.get_signless(32))


def f32(x: float) -> ir.Value:
    """Return a float32 constant."""
    return utils.c(x, ir.F32Type.get())


def _i64(x: int) -> ir.Value:
    return utils.c(x, ir.IntegerType.get_signless(64))


def less(x: ir.Value, y: ir.Value) -> ir.Value:
    """Compare signed integers."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def add_steps(descriptors: list[ir.Value], offset: int) -> list[ir.Value]:
    """Move wgmma descriptors by an encoded offset."""
    return [arith.addi(d, _i64(offset)) if offset else d for d in descriptors]


def descriptors(keys: ir.Value, queries: ir.Value, shape: TileShape) -> tuple[list, list, int]:
    """Return the wgmma descriptors of each k-step of (keys, queries) and the step between 64-key tiles.

    Args:
        keys: Shared memory [keys / 8, X / E, 8, E], E elements in `swizzle` bytes.
        queries: Shared memory [columns / 8, X / E, 8, E].
        shape: The tile.
    """
    group = shape.swizzle // utils.bytewidth(ir.MemRefType(keys.type).element_type)
    n_groups = ir.MemRefType(keys.type).shape[1]
    (key_base, _), (tile_step, key_step), _ = mma_utils.create_descriptor(
        keys, swizzle=shape.swizzle, group_size=(WGMMA_ROWS, group), logical_k_major=False
    )
    (query_base, _), (_, query_step), _ = mma_utils.create_descriptor(
        utils.memref_transpose(queries, (1, 0, 3, 2)),
        swizzle=shape.swizzle,
        group_size=(group, shape.columns),
        logical_k_major=True,
    )

    def k_steps(base: ir.Value, group_step: int) -> list[ir.Value]:
        offsets = itertools.product(range(n_groups), range(0, shape.swizzle, K_BYTES))
        return [
            add_steps([base], mma_utils.encode_addr(g * group_step + byte))[0]
            for g, byte in offsets
        ]

    return (
        k_steps(key_base, key_step),
        k_steps(query_base, query_step),
        mma_utils.encode_addr(tile_step),
    )


def multiply(keys: list, queries: list, element_type: ir.Type, columns: int) -> list[ir.Value]:
    """Issue and commit `keys @ queries^T` into fresh registers; they are returned while still in flight.

    The first instruction has scale-d false, so nothing has to zero the accumulator.

    Args:
        keys: Descriptors of the k-steps.
        queries: Likewise.
        element_type: Type of the operands.
        columns: Columns of the product.
    """
    nvvm.wgmma_fence_aligned()
    n_regs = columns // 2
    is_bf16 = isinstance(element_type, ir.BF16Type)
    kind = "bf16" if is_bf16 else "e4m3"
    k = K_BYTES // utils.bytewidth(element_type)
    transposes = ", 0, 0" if is_bf16 else ""
    acc = ", ".join(f"${i}" for i in range(n_regs))
    registers: list[ir.Value] = []
    for key_desc, query_desc in zip(keys, queries, strict=True):
        n_inputs = len(registers)
        a, b = n_regs + n_inputs, n_regs + n_inputs + 1
        registers = asm.emit_values(
            f"{{ .reg .pred p; setp.ne.b32 p, {int(n_inputs > 0)}, 0; wgmma.mma_async.sync.aligned"
            f".m64n{columns}k{k}.f32.{kind}.{kind} {{{acc}}}, ${a}, ${b}, p, 1, 1{transposes}; }}",
            ",".join(["=f"] * n_regs + [str(i) for i in range(n_inputs)] + ["l", "l"]),
            [*registers, key_desc, query_desc],
            ir.F32Type.get(),
            n_regs,
        )
    nvvm.wgmma_commit_group_sync_aligned()
    return registers


def wait(registers: list[ir.Value]) -> list[ir.Value]:
    """Wait for all products; the registers pass through, so that no use of them can move above."""
    n = len(registers)
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)])
    return asm.emit_values(
        "wgmma.wait_group.sync.aligned 0;", constraints, registers, ir.F32Type.get(), n
    )


def _relu(x: ir.Value, saturate: bool) -> ir.Value:
    if saturate:  # a full-rate instruction, where max runs at half rate
        ptx = f"mul.rn.sat.f32 $0, $1, {SATURATION_PTX};"
        return utils.inline_ptx(ptx, x, result_types=ir.F32Type.get())
    return arith.maximumf(x, f32(0.0))  # NaN stays


def weighted_sums(registers: list, weights: list, shape: TileShape) -> list[list[ir.Value]]:
    """Sum w * relu(x) over the heads a thread holds, as [query][row half].

    Args:
        registers: Accumulator; four values a column group: two rows, r and r + 8, of two columns each.
        weights: A value for each column that the thread holds.
        shape: The tile.
    """
    groups = shape.heads // COLUMN_GROUP
    sums = []
    for query in range(shape.columns // shape.heads):
        halves: list = [None, None]
        for group in range(query * groups, (query + 1) * groups):
            for column, half in itertools.product(range(2), range(2)):
                x = _relu(registers[4 * group + 2 * half + column], shape.saturate)
                w, old = weights[2 * group + column], halves[half]
                halves[half] = arith.mulf(x, w) if old is None else mlir_math.fma(x, w, old)
        sums.append(halves)
    return sums


def reduce_quads(sums: list[list[ir.Value]], lane: ir.Value) -> list[ir.Value]:
    """Sum over the four lanes of a quad, with three shuffles for four sums.

    Of each pair of queries, lane bit 0 keeps one, and of its two row halves bit 1 keeps one.
    """

    def exchange(bit: int, a: ir.Value, b: ir.Value) -> ir.Value:
        masked = arith.andi(lane, i32(bit))
        clear = arith.cmpi(arith.CmpIPredicate.eq, masked, i32(0))
        kept, sent = arith.select(clear, a, b), arith.select(clear, b, a)
        return arith.addf(kept, utils.shfl_bfly(sent, bit))

    scores = []
    for even, odd in zip(sums[::2], sums[1::2], strict=True):
        low, high = (exchange(1, even[half], odd[half]) for half in range(2))
        scores.append(exchange(2, low, high))
    return scores


def thread_in_group() -> ir.Value:
    """Return the thread's index in its warpgroup."""
    return arith.remui(utils.thread_idx(), i32(asm.GROUP))


def lane_and_row() -> tuple[ir.Value, ir.Value]:
    """Return the lane, and the key row within 64 of the score that it holds after `reduce_quads`."""
    thread = thread_in_group()
    lane = arith.remui(thread, i32(WARP_THREADS))
    warp_row = arith.muli(arith.divui(thread, i32(WARP_THREADS)), i32(WARP_ROWS))
    half = arith.muli(arith.andi(arith.divui(lane, i32(2)), i32(1)), i32(ROW_HALF))
    return lane, arith.addi(arith.addi(warp_row, half), arith.divui(lane, i32(4)))


def element_pointer(ref: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    """Return the address of float32 [row, column] of a global array seen as [rows, last axis].

    Rows times columns may pass 2^31, so the offset is 64-bit.
    """
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, row), _i64(ir.MemRefType(ref.type).shape[-1]))
    offset = arith.addi(offset, arith.extsi(i64, column))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], ir.F32Type.get())


def store_if(predicate: ir.Value, pointer: ir.Value, value: ir.Value) -> None:
    """Store a float32 to global memory where the predicate holds."""
    utils.inline_ptx("st.global.f32 [$0], $1;", pointer, value, predicate=predicate)


def load_if(predicate: ir.Value, pointer: ir.Value) -> ir.Value:
    """Load a read-only float32 from global memory, 0 where the predicate does not hold."""
    return utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; "
        "@p ld.global.nc.f32 $0, [$1]; }",
        pointer,
        arith.extui(ir.IntegerType.get_signless(32), predicate),
        result_types=ir.F32Type.get(),
        has_side_effects=True,
    )


@contextmanager
def for_range(start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """Loop over int32 values; the bounds may differ between threads."""
    for_op: Any = scf.ForOp  # its stub describes the generated class below it
    loop = for_op(start, stop, i32(step))
    with ir.InsertionPoint(loop.body):
        yield loop.induction_variable
        scf.yield_([])
