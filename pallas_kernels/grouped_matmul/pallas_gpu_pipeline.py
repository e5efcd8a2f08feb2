"""The pipeline of the grouped products on Hopper, in Pallas Mosaic GPU.

One persistent block a multiprocessor takes every n-th tile of 128 x 256 outputs. A warpgroup loads with TMA; two
multiply with wgmma, 64 rows each, sharing the right operand.

Barriers, for each of the slots that hold a step's operands; step s uses slot s % stages, and both sides count steps
over all their tiles, the same ones in the same order.
- `full[slot]`: one arrival a copy, and its bytes. Completes once a fill. Each consumer waits once a fill.
- `pieces[slot]`: takes the place of `full` in the last step of a group whose rows end inside it, which is loaded in
  more copies. Loader and consumers choose by the same condition on the same numbers.
- `free[slot]`: one arrival of each consumer, after its wgmma has read the slot. The loader waits for it before every
  fill but the first.
No barrier runs a phase ahead of a waiter. The loader's fill k + 1 of a slot follows its wait for phase k of `free`,
which follows both consumers' arrivals, which follow their waits for fill k. A consumer's arrival k + 1 at `free`
follows its wait for fill k + 1, which follows the loader's wait for phase k of `free`. Global memory is written by
TMA stores only, each output once, and nothing in a launch reads it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

Ref = Any
HALF = 64  # rows of a consumer: the height of a wgmma
TILE = 2 * HALF
COLUMNS = 256  # the widest wgmma; its float32 sums take 128 registers
STEP = 64  # contraction of a step: a row of the 128-byte swizzle in bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes that do not change the result.

    Attributes:
        stages: Steps' operands in shared memory.
        out_slots: Pieces of 64 columns of output in shared memory, for each consumer.
        band: Tiles of rows worked on at about the same time, for the L2 cache.
        n_sms: Multiprocessors, one block each.
    """

    stages: int = 4
    out_slots: int = 2
    band: int = 16
    n_sms: int = 132


class Shared(NamedTuple):
    """Shared memory: slots of operands, slots of output for each consumer, barriers."""

    left: Ref
    right: Ref
    out: Ref
    full: Ref
    pieces: Ref
    free: Ref


class Tile(NamedTuple):
    """A tile of the output.

    Attributes:
        group: Its group; E in tiles of rows past the last one, which have no step.
        row: First row of the output: of x, but for dw a column of x.
        column: First column of the output.
        n_rows: Rows that exist.
        first: First index of the contraction.
        depth: Length of the contraction.
    """

    group: Array
    row: Array
    column: Array
    n_rows: Array | int
    first: Array | int
    depth: Array


class Product(NamedTuple):
    """What makes one of the three products: its tiles, and what they load and store.

    Attributes:
        n_tiles: Number of tiles, 1 or more.
        read: Maps a tile's index to the tile.
        left: Maps (tile, half 0 or 1, first index of a step, its length) to global memory.
        right: Maps (tile, first index of a step, its length) to global memory.
        out: Maps (tile, row of the tile, number of rows, column) to global memory.
        left_by_step: Whether the rows of the left operand are the contraction.
        right_by_step: Whether the rows of the right operand are the contraction.
        step_unit: The contraction's length is a multiple of it: 8, 16, 32 or 64.
        out_unit: Rows of the output that exist in a tile are a multiple of it, likewise.
    """

    n_tiles: Array | int
    read: Callable[[Array], Tile]
    left: Callable[..., Ref]
    right: Callable[..., Ref]
    out: Callable[..., Ref]
    left_by_step: bool
    right_by_step: bool
    step_unit: int
    out_unit: int

    def in_pieces(self, tile: Tile, i: Array) -> Array | bool:
        """Whether step i of a tile is shorter than its slot."""
        if self.step_unit == STEP:
            return False
        return (i + 1) * STEP > tile.depth


def _int32(x: Array | int) -> Array:
    return jnp.asarray(x, jnp.int32)


def span(start: Array, n: int, unit: int = STEP) -> Any:
    """Slice n from a start that is known to be a multiple of a unit: TMA wants to know."""
    return pl.ds(pl.multiple_of(start, unit), n)


def _n_steps(tile: Tile) -> Array:
    return lax.div(tile.depth + (STEP - 1), jnp.int32(STEP))


def _either(condition: Array | bool, yes: Callable[[], None], no: Callable[[], None]) -> None:
    """Run one of two branches; a condition known now leaves no branch."""
    if isinstance(condition, bool):
        (yes if condition else no)()
    else:
        lax.cond(condition, yes, no)


def _each_tile(product: Product, config: Config, work: Callable[[Tile, Array], Array]) -> Array:
    """Fold work(tile, step number) -> next step number over this block's tiles; return how many steps there were."""
    cta, last = _int32(lax.axis_index("cta")), product.n_tiles - 1
    n_mine = lax.div(last - cta + config.n_sms, jnp.int32(config.n_sms))

    def read(i: Array) -> Tile:
        tile = product.read(jnp.minimum(cta + i * config.n_sms, last))
        return jax.tree.map(_int32, tile)

    def one(i: Array, carry: tuple[Tile, Array]) -> tuple[Tile, Array]:
        following = read(i + 1)  # its numbers arrive while this tile is worked on
        return following, work(*carry)

    start = read(jnp.int32(0)), jnp.int32(0)
    return lax.fori_loop(jnp.int32(0), n_mine, one, start)[1]


def in_bands(i: Array, n_down: Array | int, n_across: int, band: int) -> tuple[Array, Array]:
    """Map a number to (down, across): bands of `band` tiles down, in a band down first."""
    size = jnp.int32(band * n_across)
    top, rest = lax.div(i, size) * band, lax.rem(i, size)
    height = jnp.minimum(band, n_down - top)
    return top + lax.rem(rest, height), lax.div(rest, height)


def _load(product: Product, smem: Shared, config: Config) -> None:
    """Keep the slots full; runs in the loading warpgroup."""

    def copy_whole(tile: Tile, index: Array, slot: Array) -> None:
        for half in range(2):
            source = product.left(tile, half, index, STEP)
            plgpu.copy_gmem_to_smem(source, smem.left.at[slot, half], smem.full.at[slot])
        source = product.right(tile, index, STEP)
        plgpu.copy_gmem_to_smem(source, smem.right.at[slot], smem.full.at[slot])

    def copy_pieces(tile: Tile, index: Array, slot: Array) -> None:
        # A piece past the group's rows is read from past the array: TMA fills it with zeros, in both operands, so
        # that no NaN of another group's rows gets in.
        n = product.step_unit
        for begin in range(0, STEP, n):
            inside = index + begin < tile.first + tile.depth
            rows, barrier = pl.ds(begin, n), smem.pieces.at[slot]
            for half in range(2):
                source = product.left(tile, half, index + begin, n, inside)
                plgpu.copy_gmem_to_smem(source, smem.left.at[slot, half, rows], barrier)
            source = product.right(tile, index + begin, n, inside)
            plgpu.copy_gmem_to_smem(source, smem.right.at[slot, rows], barrier)

    def work(tile: Tile, step: Array) -> Array:
        def one(i: Array, step: Array) -> Array:
            slot = lax.rem(step, jnp.int32(config.stages))

            @pl.when(step >= config.stages)
            def _reused() -> None:  # both consumers have read what is there
                plgpu.barrier_wait(smem.free.at[slot])

            arguments = tile, tile.first + i * STEP, slot
            _either(
                product.in_pieces(tile, i),
                lambda: copy_pieces(*arguments),
                lambda: copy_whole(*arguments),
            )
            return step + 1

        return lax.fori_loop(jnp.int32(0), _n_steps(tile), one, step)

    n_steps = _each_tile(product, config, work)
    for slot in range(config.stages):

        @pl.when(slot < n_steps)
        def _drained(
            slot: int = slot,
        ) -> None:  # its last fill has been read too: no phase goes unseen
            plgpu.barrier_wait(smem.free.at[slot])


def _multiply(product: Product, smem: Shared, wg: Array, config: Config) -> None:
    """Compute and store one half of each tile."""

    def operands(slot: Array) -> tuple[Ref, Ref]:
        left, right = smem.left.at[slot, wg], smem.right.at[slot]
        if product.left_by_step:
            left = left.transpose((1, 0))
        if not product.right_by_step:
            right = right.transpose((1, 0))
        return left, right

    def work(tile: Tile, step: Array) -> Array:
        def accumulate(acc: Ref) -> tuple[Array, Array]:
            def one(i: Array, step: Array) -> Array:
                slot = lax.rem(step, jnp.int32(config.stages))
                _either(
                    product.in_pieces(tile, i),
                    lambda: plgpu.barrier_wait(smem.pieces.at[slot]),
                    lambda: plgpu.barrier_wait(smem.full.at[slot]),
                )
                plgpu.wgmma(acc, *operands(slot))
                # The other consumer's products keep the tensor cores busy meanwhile.
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem.free.at[slot])
                return step + 1

            step_after = lax.fori_loop(jnp.int32(0), _n_steps(tile), one, step)
            return acc[...], step_after

        acc, step = pl.run_scoped(accumulate, plgpu.ACC((HALF, COLUMNS), jnp.float32))
        n_rows = jnp.clip(tile.n_rows - wg * HALF, 0, HALF)
        pl.when(n_rows > 0)(lambda: _store(acc, product, smem, tile, wg, n_rows))
        return step

    _each_tile(product, config, work)
    plgpu.wait_smem_to_gmem(0)


def _store(
    acc: Array, product: Product, smem: Shared, tile: Tile, wg: Array, n_rows: Array
) -> None:
    """Write the rows that exist, 64 columns at a time through shared memory; TMA drops columns past the last."""
    row, n_slots = wg * HALF, smem.out.shape[1]
    for j in range(COLUMNS // STEP):
        # All but the last group of this warpgroup's stores have read their slot; there is one group a slot. Its
        # barrier puts the wait of the thread that issues them before every thread's writes.
        plgpu.wait_smem_to_gmem(n_slots - 1, wait_read_only=True)
        source, column = smem.out.at[wg, j % n_slots], j * STEP
        source[...] = acc[:, column : column + STEP].astype(smem.out.dtype)
        plgpu.commit_smem()

        def copy(part: Ref, begin: Array | int, n: int, column: int = column) -> None:
            target = product.out(tile, row + begin, n, column)
            plgpu.copy_smem_to_gmem(part, target, commit_group=False)

        def copy_pieces(source: Ref = source, copy: Callable = copy) -> None:
            n = product.out_unit
            n_pieces = lax.div(n_rows, jnp.int32(n))  # a group's last rows, without the next one's

            @pl.loop(0, n_pieces)
            def _piece(i: Array) -> None:
                copy(source.at[span(i * n, n, n)], i * n, n)

        whole = True if product.out_unit == HALF else n_rows == HALF
        _either(whole, functools.partial(copy, source, 0, HALF), copy_pieces)
        plgpu.commit_smem_to_gmem_group()


def shared_memory(
    dtype: jax.typing.DTypeLike, config: Config, right_by_step: bool, step_unit: int
) -> Shared:
    """Declare the slots and their barriers.

    Args:
        dtype: Of the operands and the output.
        config: Sizes.
        right_by_step: As in `Product`.
        step_unit: As in `Product`.
    """
    tiling: Any = plgpu.TilingTransform  # abstract to a type checker only
    swizzling: Any = plgpu.SwizzleTransform
    transforms = tiling((8, STEP)), swizzling(128)
    right = (STEP, COLUMNS) if right_by_step else (COLUMNS, STEP)
    copies = 3  # of a step: two halves of the left operand, and the right one
    return Shared(
        left=plgpu.SMEM((config.stages, 2, HALF, STEP), dtype, transforms=transforms),
        right=plgpu.SMEM((config.stages, *right), dtype, transforms=transforms),
        out=plgpu.SMEM((2, config.out_slots, HALF, STEP), dtype, transforms=transforms),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        pieces=plgpu.Barrier(num_arrivals=copies * (STEP // step_unit), num_barriers=config.stages),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
    )


def launch(
    make: Callable[..., Product],
    operands: tuple[Array, ...],
    out: jax.ShapeDtypeStruct,
    *,
    shared: Shared,
    config: Config,
    name: str,
) -> Array:
    """Run a product.

    Args:
        make: Makes it of the references to the operands and the output.
        operands: Arrays in global memory.
        out: The output.
        shared: Shared memory.
        config: Sizes.
        name: Of the kernel.
    """

    def body(*refs: Ref, **scratch: Any) -> None:
        smem, wg = Shared(**scratch), lax.axis_index("wg")
        product = make(*refs)

        @pl.when(wg == 2)
        def _loader() -> None:
            plgpu.set_max_registers(40, action="decrease")
            _load(product, smem, config)

        @pl.when(wg < 2)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            _multiply(product, smem, wg, config)

    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=shared._asdict(),
        grid=(config.n_sms,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        # No barriers of Mosaic's own around loads and stores: `_store` places its own, and no thread reads shared
        # memory.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name=name,
    )
    return kernel(*operands)
