"""One CUDA thread's code, written with Python operators and emitted into a Pallas Mosaic GPU kernel.

Pallas has no notion of a single thread: no scattered shared-memory access, no shared-memory atomics, no
warp votes. `plgpu.inline_mgpu` lets a kernel emit MLIR itself; `Thread` is the small vocabulary that the
selection kernel needs, so that its code reads like the CUDA it becomes. The same code runs in numpy, all
threads in lockstep, on the machine of tests/pallas_kernels/topk_select/lockstep.py.

All values are 32-bit words: unsigned integers, or the bits of a float32 in the `f...` methods. Shared
memory is addressed in words from the start of the scratch buffer: a static region plus an index.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm, scf

from pallas_kernels.topk_select.words import Pred, Word, constant, i32, raw

ALL_LANES = 0xFFFFFFFF


class Thread:
    """What a thread of the block can do. Blocks of one cluster share a row of work."""

    def __init__(self, arrays: dict[str, ir.Value], shared: ir.Value, n_threads: int, cluster: int):
        """Bind the kernel's refs: named global arrays of 32-bit elements, and the scratch words."""
        self.n_threads, self.cluster = n_threads, cluster
        self._arrays = arrays
        i64 = ir.IntegerType.get_signless(64)
        address = arith.trunci(i32(), mgpu.llvm.ptrtoint(i64, mgpu.memref_ptr(shared)))
        self._shared = Word(address)
        self.tid = Word(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))
        self.lane = self.tid & 31
        self.warp = Word(mgpu.warp_idx())
        block = Word(arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)))
        self.group = block >> (cluster.bit_length() - 1)
        self.rank = block & (cluster - 1)

    # Values.

    def word(self, value: int) -> Word:
        """Return a constant, for the start of a loop's state."""
        return Word(constant(value))

    def select(self, pred: Pred, a: Any, b: Any) -> Word:
        """Return a where the condition holds, else b."""
        return Word(arith.select(pred.value, raw(a), raw(b)))

    def min(self, a: Any, b: Any) -> Word:
        """Return the smaller, unsigned."""
        return Word(arith.minui(raw(a), raw(b)))

    def max(self, a: Any, b: Any) -> Word:
        """Return the larger, unsigned."""
        return Word(arith.maxui(raw(a), raw(b)))

    def clip_signed(self, a: Word, low: int, high: int) -> Word:
        """Clip a signed value to [low, high]."""
        return Word(arith.minsi(arith.maxsi(a.value, constant(low)), constant(high)))

    def sign_mask(self, a: Word) -> Word:
        """Return all ones where the top bit is set, else 0."""
        return Word(arith.shrsi(a.value, constant(31)))

    def divide(self, a: Any, b: Any) -> Word:
        """Return the unsigned quotient, rounded down."""
        return Word(arith.divui(raw(a), raw(b)))

    def popcount(self, a: Word) -> Word:
        """Count the ones."""
        return self._asm("popc.b32 $0, $1;", a)

    def leading_zeros(self, a: Word) -> Word:
        """Count the zeros above the highest one; 32 for 0."""
        return self._asm("clz.b32 $0, $1;", a)

    def lowest_bit(self, a: Word) -> Word:
        """Return the position of the lowest one of a nonzero word."""
        return self._asm("{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", a)

    # Floats, held as their bits. Comparisons are IEEE: NaN compares false, -0.0 equals 0.0.

    def _float(self, a: Any) -> ir.Value:
        return arith.bitcast(ir.F32Type.get(), raw(a))

    def _bits(self, value: ir.Value) -> Word:
        return Word(arith.bitcast(i32(), value))

    def fmax(self, a: Word, b: Word) -> Word:
        """Return the larger float; the other one where one is NaN."""
        return self._bits(arith.maxnumf(self._float(a), self._float(b)))

    def fge(self, a: Word, b: Word) -> Pred:
        """Compare floats, a >= b."""
        return Pred(arith.cmpf(arith.CmpFPredicate.OGE, self._float(a), self._float(b)))

    def fadd_zero(self, a: Word) -> Word:
        """Add 0.0, which turns -0.0 into 0.0 and leaves subnormals alone."""
        return self._asm("add.f32 $0, $1, 0f00000000;", a)

    def sqrt_ceil(self, a: Word) -> Word:
        """Return the square root rounded up, within one."""
        asm = (
            "{ .reg .f32 f; cvt.rn.f32.u32 f, $1; sqrt.approx.f32 f, f; cvt.rpi.f32.f32 f, f;"
            " cvt.rzi.u32.f32 $0, f; }"
        )
        return self._asm(asm, a)

    # Warp. All 32 lanes must take part.

    def ballot(self, pred: Pred) -> Word:
        """Return the lanes where the condition holds, one bit each."""
        kind = nvvm.VoteSyncKind.ballot
        return Word(nvvm.vote_sync(constant(ALL_LANES), pred.value, kind, results=[i32()]))

    def warp_sum(self, a: Word) -> Word:
        """Return the sum over the warp."""
        return self._asm("redux.sync.add.u32 $0, $1, 0xffffffff;", a, convergent=True)

    def shift_lanes(self, a: Word, distance: int) -> Word:
        """Return the value of the lane `distance` below, or one's own where there is none."""
        return Word(
            nvvm.shfl_sync(
                constant(ALL_LANES), a.value, constant(distance), constant(0), nvvm.ShflKind.up
            )
        )

    def warp_fetch_add(self, region: int, total: Word) -> Word:
        """Add a warp-uniform number to the first word of a shared region, once a warp; return the old value."""
        old = self._asm(
            "{ .reg .pred p; .reg .b32 r; setp.eq.u32 p, $3, 0; mov.b32 r, 0;"
            f" @p atom.shared.add.u32 r, [$1+{4 * region}], $2;"
            " shfl.sync.idx.b32 $0, r, 0, 0x1f, 0xffffffff; }",
            self._shared,
            total,
            self.lane,
            effects=True,
            convergent=True,
        )
        return old

    # Shared memory.

    def _at(self, index: Any) -> Word:
        return (
            self._shared + self.word(4 * index)
            if isinstance(index, int)
            else self._shared + index * 4
        )

    def load(self, region: int, index: Any) -> Word:
        """Read a word."""
        return self._asm(f"ld.shared.u32 $0, [$1+{4 * region}];", self._at(index), effects=True)

    def store(self, region: int, index: Any, a: Any) -> None:
        """Write a word."""
        self._do(f"st.shared.u32 [$0+{4 * region}], $1;", self._at(index), a)

    def load4(self, region: int, index: Any) -> list[Word]:
        """Read 4 words; region and index are multiples of 4."""
        return self._asm4(f"ld.shared.v4.u32 {{$0,$1,$2,$3}}, [$4+{4 * region}];", self._at(index))

    def store4(self, region: int, index: Any, a: list[Any]) -> None:
        """Write 4 words; region and index are multiples of 4."""
        asm = f"st.shared.v4.u32 [$0+{4 * region}], {{$1,$2,$3,$4}};"
        self._do(asm, self._at(index), *a)

    def add(self, region: int, index: Any, a: Any) -> None:
        """Add to a word, atomically: a sum does not depend on the order."""
        if isinstance(a, int):
            # As an immediate, ptxas counts the lanes that meet on one word instead of queueing them.
            self._do(f"red.shared.add.u32 [$0+{4 * region}], {a};", self._at(index))
        else:
            self._do(f"red.shared.add.u32 [$0+{4 * region}], $1;", self._at(index), a)

    def or_(self, region: int, index: Any, a: Word) -> None:
        """Set bits of a word, atomically."""
        self._do(f"red.shared.or.b32 [$0+{4 * region}], $1;", self._at(index), a)

    def _peer(self, rank: Any, index: Any) -> Word:
        return self._asm("mapa.shared::cluster.u32 $0, $1, $2;", self._at(index), rank)

    def peer_load(self, rank: Any, region: int, index: Any) -> Word:
        """Read a word of a block of the cluster."""
        if self.cluster == 1:
            return self.load(region, index)
        asm = f"ld.shared::cluster.u32 $0, [$1+{4 * region}];"
        return self._asm(asm, self._peer(rank, index), effects=True)

    def peer_load4(self, rank: Any, region: int, index: Any) -> list[Word]:
        """Read 4 words of a block of the cluster."""
        if self.cluster == 1:
            return self.load4(region, index)
        asm = f"ld.shared::cluster.v4.u32 {{$0,$1,$2,$3}}, [$4+{4 * region}];"
        return self._asm4(asm, self._peer(rank, index))

    def peer_store4(self, rank: Any, region: int, index: Any, a: list[Any]) -> None:
        """Write 4 words of a block of the cluster."""
        asm = f"st.shared::cluster.v4.u32 [$0+{4 * region}], {{$1,$2,$3,$4}};"
        self._do(asm, self._peer(rank, index), *a)

    def warp_barrier(self) -> None:
        """Wait for all threads of the warp; shared memory written before is seen after."""
        self._do("bar.warp.sync 0xffffffff;", convergent=True)

    def barrier(self) -> None:
        """Wait for all threads of the block; shared memory written before is seen after."""
        gpu.barrier()

    def cluster_barrier(self) -> None:
        """Wait for all threads of the cluster; shared memory written before is seen after."""
        if self.cluster == 1:
            gpu.barrier()
            return
        self._do("barrier.cluster.arrive.release.aligned;", convergent=True)
        self._do("barrier.cluster.wait.acquire.aligned;", convergent=True)

    # Global memory. An address is 64 bits wide; indices within a row are 32.

    def address(self, name: str, row: Word, stride: int, offset: Any = 0) -> ir.Value:
        """Return the address of element row * stride + offset of a global array."""
        i64 = ir.IntegerType.get_signless(64)
        base = mgpu.llvm.ptrtoint(i64, mgpu.memref_ptr(self._arrays[name]))
        wide = [arith.extui(i64, raw(x)) for x in (row, stride, offset)]
        element = arith.addi(arith.muli(wide[0], wide[1]), wide[2])
        return arith.addi(base, arith.muli(element, mgpu.c(4, i64)))

    def phase(self, address: ir.Value) -> Word:
        """Return how many elements the address lies past a 16-byte boundary, 0 to 3."""
        return (Word(arith.trunci(i32(), address)) >> 2) & 3

    def align(self, address: ir.Value) -> ir.Value:
        """Return the 16-byte boundary at or below the address."""
        return arith.andi(address, mgpu.c(-16, address.type))

    def _element(self, address: ir.Value, index: Any, size: int) -> ir.Value:
        offset = arith.extui(address.type, raw(index))
        return arith.addi(address, arith.muli(offset, mgpu.c(size, address.type)))

    def read(self, address: ir.Value, index: Any) -> Word:
        """Read an element that nothing writes during the kernel."""
        asm = "ld.global.nc.u32 $0, [$1];"
        return Word(mgpu.inline_ptx(asm, self._element(address, index, 4), result_types=i32()))

    def read4(self, address: ir.Value, group: Any) -> list[Word]:
        """Read 4 elements from a 16-byte boundary, past L1; nothing writes them during the kernel.

        Said to have effects, else LLVM sinks each of several loads to its use and they run one by one.
        """
        asm = "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];"
        place = self._element(address, group, 16)
        out = mgpu.inline_ptx(asm, place, result_types=[i32()] * 4, has_side_effects=True)
        return [Word(x) for x in out]

    def copy4(self, region: int, index: Any, address: ir.Value, group: Any) -> None:
        """Start to copy 4 elements from a 16-byte boundary into shared memory."""
        asm = f"cp.async.cg.shared.global [$0+{4 * region}], [$1], 16;"
        place = self._element(address, group, 16)
        mgpu.inline_ptx(asm, self._at(index).value, place, has_side_effects=True)

    def prefetch4(self, address: ir.Value, group: Any, n_groups: Any) -> None:
        """Ask for some groups of 4 elements from a 16-byte boundary into the L2 cache; at least one."""
        place, size = self._element(address, group, 16), raw(self.word(16) * n_groups)
        asm = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        mgpu.inline_ptx(asm, place, size, has_side_effects=True)

    def wait_copies(self) -> None:
        """Wait for the copies that this thread started; it sees them, others only after a barrier."""
        self._do("cp.async.wait_all;")

    def write(self, address: ir.Value, index: Any, a: Any) -> None:
        """Write an element."""
        mgpu.inline_ptx(
            "st.global.u32 [$0], $1;",
            self._element(address, index, 4),
            raw(a),
            has_side_effects=True,
        )

    # Control flow.

    @contextlib.contextmanager
    def when(self, pred: Pred) -> Iterator[None]:
        """Run the block in the threads where the condition holds."""
        with mgpu.when(pred.value):
            yield

    def loop(self, low: Any, high: Any, step: int, *state: Word) -> Callable[..., Any]:
        """Decorate `body(i, *state) -> new state` (None if there is none); return the last state."""

        def run(body: Callable[..., Any]) -> tuple[Word, ...]:
            init = [s.value for s in state]
            for_: Any = scf.ForOp  # its stub lacks the order of the arguments
            op = for_(raw(low), raw(high), constant(step), init)
            with ir.InsertionPoint(op.body):
                new = body(Word(op.induction_variable), *map(Word, op.inner_iter_args))
                scf.yield_([s.value for s in new or ()])
            return tuple(map(Word, op.results))

        return run

    def repeat(self, *state: Word) -> Callable[..., Any]:
        """Decorate `body(*state) -> (again, *new state)`, run at least once; return the last state."""

        def run(body: Callable[..., Any]) -> tuple[Word, ...]:
            types = [i32()] * len(state)
            op = scf.WhileOp(types, [s.value for s in state])
            before, after = op.before.blocks.append(*types), op.after.blocks.append(*types)
            with ir.InsertionPoint(before):
                again, *new = body(*map(Word, before.arguments))
                scf.condition(again.value, [s.value for s in new])
            with ir.InsertionPoint(after):
                scf.yield_(list(after.arguments))
            return tuple(map(Word, op.results))

        return run

    def keep_rolled(self) -> None:
        """Say at the start of a loop's body that unrolling it would only cost registers."""
        self._do('.pragma "nounroll";')

    # Instructions that no dialect of the pipeline has, or that it would widen to 64-bit addresses.

    def _asm(self, asm: str, *args: Any, effects: bool = False, convergent: bool = False) -> Word:
        values = map(raw, args)
        return Word(
            mgpu.inline_ptx(
                asm, *values, result_types=i32(), has_side_effects=effects, convergent=convergent
            )
        )

    def _asm4(self, asm: str, *args: Any) -> list[Word]:
        values = map(raw, args)
        out = mgpu.inline_ptx(asm, *values, result_types=[i32()] * 4, has_side_effects=True)
        return [Word(x) for x in out]

    def _do(self, asm: str, *args: Any, convergent: bool = False) -> None:
        values = map(raw, args)
        mgpu.inline_ptx(asm, *values, has_side_effects=True, convergent=convergent)
