"""Forward of attention over a range of keys on Hopper, in Pallas Mosaic GPU.

One work loop a multiprocessor draws tiles of 128 queries of a head, longest first. A warpgroup loads with TMA, two
consume 64 queries each and take turns: while one has the tensor cores, the other exponentiates. Inside a turn the
score product of the next keys is issued before the value product of the last ones, whose wait the softmax hides.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.dense_mla import pallas_gpu_registers as registers
from pallas_kernels.dense_mla import tiles
from pallas_kernels.mosaic_hopper import Ref

LOG2E = math.log2(math.e)
LOWEST = -1e30  # running maximum before the first key: finite, so that no inf - inf appears
ROWS, TILE = tiles.HALF, tiles.TILE  # queries of a consumer, the height of a wgmma, and of an item
STAGES = 2
THREADS = asm.GROUP
FIRST_FREE = asm.first_free_barrier(4)  # one to spare
TURN, K_FREE, V_FREE, Q_FREE = (FIRST_FREE + 2 * i for i in range(4))
BY_ROW, FULL = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the forward kernel.

    Attributes:
        block_kv: Keys of a step, a multiple of 32.
        group: Heads worked on at about the same time; divides the heads.
        n_sms: Multiprocessors, one work loop each.
    """

    block_kv: int = 128
    group: int
    n_sms: int = dataclasses.field(default_factory=dispatch.multiprocessors)


class _Inputs(NamedTuple):
    q: Ref
    k: Ref
    v: Ref
    start: Ref
    end: Ref
    table: Ref
    counter: Ref
    words: Ref | None


class _Shared(NamedTuple):
    q: Ref
    k: Ref
    v: Ref
    out: Ref
    lse: Ref
    ticket: Ref
    q_full: Ref
    k_full: Ref
    v_full: Ref
    ticket_full: Ref


class _Work(NamedTuple):
    """A tile: its head, first query, blocks of keys, and the blocks that need no mask for each half."""

    head: Array
    row: Array
    first: Array
    last: Array
    whole_first: tuple[Array, Array]
    whole_last: tuple[Array, Array]


def _slot(step: Array) -> Array:
    return lax.rem(step, jnp.int32(STAGES))


def _read_tile(ticket: Array, table: Ref, group: int) -> _Work:
    """Look up a ticket: heads are taken `group` at a time, the tiles of a group in the table's order."""
    n_tiles, group = jnp.int32(table.shape[0]), jnp.int32(group)
    head_group, rest = lax.div(ticket, n_tiles * group), lax.rem(ticket, n_tiles * group)
    rank, head = lax.div(rest, group), head_group * group + lax.rem(rest, group)
    tile, first, last, *halves = (table[rank, i] for i in range(7))
    return _Work(head, tile * TILE, first, last, (halves[0], halves[2]), (halves[1], halves[3]))


def _produce(refs: _Inputs, smem: _Shared, config: Config) -> None:
    """Draw tickets and load queries, keys and values; runs in the loading warpgroup."""
    n_items = refs.table.shape[0] * refs.q.shape[1]

    def load(source: Any, target: Ref, full: Ref, free: int, step: Array) -> None:
        slot = _slot(step)

        @pl.when(step >= STAGES)
        def _wait() -> None:  # both consumers have left the block that was here
            asm.sync(free + slot, 3 * THREADS)

        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

    def work(carry: tuple) -> tuple:
        ticket, n_done, step = carry
        tile = _read_tile(ticket, refs.table, config.group)
        # A consumer gives its queries up after it has read its next ticket: so this place was read a tile ago.
        parity = lax.rem(n_done + 1, jnp.int32(2))
        registers.next_ticket(refs.counter, smem.ticket.at[pl.ds(parity, 1)], config.n_sms)
        plgpu.barrier_arrive(smem.ticket_full.at[parity])

        def queries() -> None:
            for half in range(2):

                @pl.when(n_done > 0)
                def _wait(half: int = half) -> None:  # the consumer is done with the old ones
                    asm.sync(Q_FREE + half, 2 * THREADS)

                rows = pl.ds(tile.row + half * ROWS, ROWS)
                source = refs.q.at[rows, tile.head]
                plgpu.copy_gmem_to_smem(source, smem.q.at[half], smem.q_full.at[half])

        def block(i: Array, step: Array) -> Array:
            keys = pl.ds(i * config.block_kv, config.block_kv)
            load(refs.k.at[keys, tile.head], smem.k, smem.k_full, K_FREE, step)
            pl.when(i == tile.first)(queries)
            load(refs.v.at[keys, tile.head], smem.v, smem.v_full, V_FREE, step)
            return step + 1

        step = lax.fori_loop(tile.first, tile.last, block, step)
        plgpu.barrier_wait(smem.ticket_full.at[parity])
        return smem.ticket[parity], n_done + 1, step

    start = (lax.axis_index("cta"), jnp.int32(0), jnp.int32(0))
    lax.while_loop(lambda carry: carry[0] < n_items, work, start)


def _load_words(refs: _Inputs, block: Array, row: Array, block_kv: int) -> list[Array]:
    """Load the mask bits of 64 queries and a block of keys; nothing without a mask."""
    if refs.words is None:
        return []
    n_words = block_kv // 32
    words = [refs.words.at[block * n_words + j, pl.ds(row, ROWS)] for j in range(n_words)]
    return [plgpu.load(ref, layout=BY_ROW, optimized=False) for ref in words]


def _consumer_mask(refs: _Inputs, tile: _Work, wg: Array, row: Array, block_kv: int) -> Any:
    """Return mask(scores, block, words): -inf where a key is not allowed, at no cost in whole blocks."""
    shape, rows = (ROWS, block_kv), pl.ds(row, ROWS)
    start = plgpu.load(refs.start.at[rows], layout=BY_ROW, optimized=False)
    end = plgpu.load(refs.end.at[rows], layout=BY_ROW, optimized=False)
    whole_first = jnp.where(wg == 0, *tile.whole_first)
    whole_last = jnp.where(wg == 0, *tile.whole_last)

    def mask(s: Array, i: Array, words: list[Array]) -> Array:
        if words:  # the bits hold the range too
            return registers.keep_bits(s, words, -jnp.inf)

        def apply() -> Array:
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=FULL) + i * block_kv
            allowed = (key >= asm.spread_rows(start, shape)) & (key < asm.spread_rows(end, shape))
            return jnp.where(allowed, s, -jnp.inf)

        return lax.cond((i < whole_first) | (i >= whole_last), apply, lambda: s)

    return mask


def _softmax(s: Array, m: Array, total: Array, scale: float) -> tuple[Array, Array, Array, Array]:
    """Return (weights, rescaling of what came before, new maximum, new sum), the maximum in base 2."""
    m_new = jnp.maximum(m, s.max(axis=1) * (scale * LOG2E))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * (scale * LOG2E) - asm.spread_rows(m_new, s.shape))
    return p, alpha, m_new, total * alpha + p.sum(axis=1)


def _attend(
    refs: _Inputs, smem: _Shared, tile: _Work, step: Array, wg: Array, scale: float, config: Config
) -> tuple[Array, Array, Array, Array, Array]:
    """Go through the keys of 64 queries, all but the last value product.

    Returns (weights x values so far, last weights, maximum, sum of weights, step of the last block).
    """
    block_kv = config.block_kv
    row = tile.row + wg * ROWS
    mask = _consumer_mask(refs, tile, wg, row, block_kv)
    mine, other = TURN + wg, TURN + 1 - wg
    q, both = smem.q.at[wg], 3 * THREADS

    def scores(slot: Array) -> Array:
        return asm.fresh_product([(q, smem.k.at[slot])], swizzle=128)

    def block(i: Array, carry: tuple) -> tuple:
        o, p, m, total, step, words = carry
        slot, last_slot = _slot(step + 1), _slot(step)
        next_words = _load_words(refs, lax.min(i + 1, tile.last - 1), row, block_kv)  # in time
        plgpu.barrier_wait(smem.k_full.at[slot])
        asm.sync(mine, 2 * THREADS)

        def products(o_acc: Ref) -> tuple:
            o_acc[...] = o
            s = scores(slot)
            plgpu.wgmma(o_acc, p, smem.v.at[last_slot])
            asm.arrive(other, 2 * THREADS)
            plgpu.wgmma_wait(1)
            s = lax.optimization_barrier(s)  # no use of it may move in front of the wait
            asm.arrive(K_FREE + slot, both)
            weights = _softmax(mask(s, i, words), m, total, scale)
            p_new, alpha, m_new, total_new = lax.optimization_barrier(weights)
            # Waiting here for these keys' values ends the basic block: without that ptxas moves the softmax
            # behind the wait for the value product.
            plgpu.barrier_wait(smem.v_full.at[slot])
            o_new = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            asm.arrive(V_FREE + last_slot, both)
            o_new = o_new * asm.spread_rows(alpha, o.shape)
            return o_new, p_new.astype(jnp.bfloat16), m_new, total_new

        return *pl.run_scoped(products, plgpu.ACC(o.shape)), step + 1, next_words

    words = _load_words(refs, tile.first, row, block_kv)
    plgpu.barrier_wait(smem.q_full.at[wg])
    plgpu.barrier_wait(smem.k_full.at[_slot(step)])
    asm.sync(mine, 2 * THREADS)
    s = scores(_slot(step))
    asm.arrive(other, 2 * THREADS)
    plgpu.wgmma_wait(0)
    s = lax.optimization_barrier(s)
    asm.arrive(K_FREE + _slot(step), both)
    m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
    p, _, m, total = _softmax(mask(s, tile.first, words), m, total, scale)
    plgpu.barrier_wait(smem.v_full.at[_slot(step)])
    o = plgpu.layout_cast(jnp.zeros((ROWS, smem.v.shape[2]), jnp.float32), FULL)
    words = _load_words(refs, lax.min(tile.first + 1, tile.last - 1), row, block_kv)
    carry = (o, p.astype(jnp.bfloat16), m, total, step, words)
    return lax.fori_loop(tile.first + 1, tile.last, block, carry)[:5]


def _store(
    o: Array, m: Array, total: Array, smem: _Shared, outputs: tuple, tile: _Work, wg: Array
) -> None:
    """Normalise and write 64 queries, 64 columns at a time through shared memory."""
    (out_ref, lse_ref), rows = outputs, pl.ds(tile.row + wg * ROWS, ROWS)
    some = total > 0  # no key at all: output 0, log-sum-exp -inf
    safe = jnp.where(some, total, 1.0)
    o = o * asm.spread_rows(1.0 / safe, o.shape)
    lse = jnp.where(some, (m + jnp.log2(safe)) * (1 / LOG2E), -jnp.inf)
    for j in range(0, o.shape[1], 64):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # TMA has read what is there
        smem.out[wg] = o[:, j : j + 64].astype(out_ref.dtype)
        if j == 0:
            smem.lse[wg] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[wg], out_ref.at[rows, tile.head, pl.ds(j, 64)])
        if j == 0:
            plgpu.copy_smem_to_gmem(smem.lse.at[wg], lse_ref.at[tile.head, rows])


def _consume(
    refs: _Inputs, smem: _Shared, outputs: tuple, wg: Array, scale: float, config: Config
) -> None:
    """Attend from one half of each tile."""
    n_items = refs.table.shape[0] * refs.q.shape[1]

    @pl.when(wg == 1)
    def _first_turn() -> None:  # the second consumer gives the first turn to the first
        asm.arrive(TURN, 2 * THREADS)

    def work(carry: tuple) -> tuple:
        ticket, n_done, step = carry
        tile = _read_tile(ticket, refs.table, config.group)
        o, p, m, total, step = _attend(refs, smem, tile, step, wg, scale, config)
        parity = lax.rem(n_done + 1, jnp.int32(2))
        plgpu.barrier_wait(smem.ticket_full.at[parity])
        ticket = smem.ticket[parity]
        asm.arrive(Q_FREE + wg, 2 * THREADS)

        def last_product(o_acc: Ref) -> Array:
            o_acc[...] = o
            plgpu.wgmma(o_acc, p, smem.v.at[_slot(step)])
            return plgpu.wgmma_accumulator_load(o_acc)

        o = pl.run_scoped(last_product, plgpu.ACC((ROWS, o.shape[1])))
        asm.arrive(V_FREE + _slot(step), 3 * THREADS)
        _store(o, m, total, smem, outputs, tile, wg)
        return ticket, n_done + 1, step + 1

    start = (lax.axis_index("cta"), jnp.int32(0), jnp.int32(0))
    lax.while_loop(lambda carry: carry[0] < n_items, work, start)
    plgpu.wait_smem_to_gmem(0)


def _shared_memory(dim: int, value_dim: int, block_kv: int) -> _Shared:
    def tiled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=asm.operand(128))

    return _Shared(
        q=tiled(2, ROWS, dim),
        k=tiled(STAGES, block_kv, dim),
        v=tiled(STAGES, block_kv, value_dim),
        out=tiled(2, ROWS, 64),
        lse=plgpu.SMEM((2, ROWS), jnp.float32),
        ticket=plgpu.SMEM((2,), jnp.int32),
        q_full=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_barriers=STAGES),
        v_full=plgpu.Barrier(num_barriers=STAGES),
        ticket_full=plgpu.Barrier(num_barriers=2),
    )


@functools.partial(jax.jit, static_argnames=("scale", "config"))
def forward(
    q_THD: Float[Array, "T H D"],
    k_SHD: Float[Array, "S H D"],
    v_SHU: Float[Array, "S H U"],
    start_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    selected_TS: Bool[Array, "T S"] | None = None,
    *,
    scale: float,
    config: Config | None = None,
) -> tuple[Float[Array, "T H U"], Float[Array, "H P"]]:
    """Attend as `op.dense_mla` does, for one sequence.

    Args:
        q_THD: bfloat16 queries.
        k_SHD: bfloat16 keys.
        v_SHU: bfloat16 values.
        start_T: int32, first valid key of each query.
        end_T: int32, one past the last valid key.
        selected_TS: Optional mask.
        scale: Factor on the logits, positive.
        config: Sizes; None chooses.

    Returns:
        (out, log-sum-exp [H, T padded in any way to whole tiles]).

    Raises:
        NotImplementedError: As `tiles.check`.
    """
    tiles.check(q_THD, k_SHD, v_SHU, scale)
    n_queries, n_heads, dim = q_THD.shape
    n_keys, _, value_dim = v_SHU.shape
    config = config or Config(group=tiles.head_group(n_heads))
    start, end = tiles.clip_ranges(start_T, end_T, n_keys, TILE)
    words = []
    if selected_TS is not None:
        allowed_TS = tiles.selected_in_range(selected_TS, start_T, end_T)
        words = [tiles.pack_keys(allowed_TS, config.block_kv)]
    q, k, v = (tiles.pad_rows(x, 8) for x in (q_THD, k_SHD, v_SHU))
    arguments = (
        q,
        k,
        v,
        start,
        end,
        tiles.query_tiles(start, end, n_keys, config.block_kv),
        *words,
    )

    def body(*refs: Ref, **scratch: Any) -> None:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR(()))
        *given, out_ref, lse_ref = refs
        inputs = _Inputs._make([*given[:6], counter, given[6] if words else None])
        smem, wg = _Shared(**scratch), lax.axis_index("wg")

        @pl.when(wg == 2)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _produce(inputs, smem, config)

        @pl.when(wg < 2)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            _consume(inputs, smem, (out_ref, lse_ref), wg, scale, config)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0], n_heads, value_dim), v.dtype),
            jax.ShapeDtypeStruct((n_heads, start.shape[0]), jnp.float32),
        ),
        scratch_types=_shared_memory(dim, value_dim, config.block_kv)._asdict(),
        grid=(config.n_sms,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=asm.PARAMS,
        kernel_name="dense_mla_forward",
    )
    # One counter serves one launch: under vmap, launch once for each member.
    out, lse = sequential_vmap(kernel)(*arguments)
    return out[:n_queries], lse
