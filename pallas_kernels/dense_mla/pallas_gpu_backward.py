"""Backward of attention over a range of keys on Hopper: one Pallas Mosaic GPU kernel, its keys stationary.

A block holds 128 keys and goes through the queries that read them, 64 at a time. Each of two consumers has 64 keys: it
makes S and P, transposed, adds P^T dO to dV and dS^T q to dK in registers, and leaves dS in shared memory. From both
consumers' dS each makes half of the columns of dQ, which it adds to global memory. So dQ is summed in no fixed order:
it may differ in its last bits from run to run; dK and dV do not.

Registers are the limit (160 of 240 hold dK and dV), so products overlap little within a consumer. Instead the two are
half a step apart, held within one step of each other by dS: one exponentiates while the other multiplies.
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
from jaxtyping import Array, Float

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.dense_mla import pallas_gpu_query_gradient, tiles
from pallas_kernels.dense_mla import pallas_gpu_registers as registers
from pallas_kernels.mosaic_hopper import Ref

LOG2E = math.log2(math.e)
ROWS = tiles.HALF  # keys of a consumer and queries of a step
TILE = tiles.TILE  # keys of a block
THREADS = asm.GROUP
FIRST_FREE = asm.first_free_barrier(4)  # one to spare
Q_STAGES, STAGES = 3, 2
# Bytes of swizzle: half of q's and k's columns is a multiple of 32 elements only.
NARROW, WIDE = 64, 128
# Between the consumers: [warpgroup that arrives, parity of the step].
DS_READY, DS_FREE = FIRST_FREE, FIRST_FREE + 4
MEET, SKEW = DS_FREE + 4, DS_FREE + 5
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
FULL = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Order of work.

    Attributes:
        group: Heads worked on at about the same time; divides the heads.
    """

    group: int


class _Inputs(NamedTuple):
    q: Ref
    k: Ref
    v: Ref
    do: Ref
    bias: Ref  # -log-sum-exp in base 2, -inf for a query without keys
    shift: Ref  # cotangent of the log-sum-exp - out . dO
    start: Ref
    end: Ref
    table: Ref
    words: Ref | None


class _Shared(NamedTuple):
    k: Ref  # [consumer, half of the columns, 64, ...]
    v: Ref
    q: Ref
    do: Ref
    ds: Ref  # [parity, consumer, key, query]
    bias: Ref
    shift: Ref
    q_full: Ref
    do_full: Ref
    q_free: Ref
    do_free: Ref
    kv_full: Ref


class _Work(NamedTuple):
    """A block: its head, first key, steps of queries, and those that need no mask."""

    head: Array
    key: Array
    first: Array
    last: Array
    whole_first: Array
    whole_last: Array

    def slot(self, step: Array) -> Array:
        return lax.rem(step - self.first, jnp.int32(STAGES))

    def q_slot(self, step: Array) -> Array:
        return lax.rem(step - self.first, jnp.int32(Q_STAGES))


def _spread(x_column: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x_column, shape, [1])


def _read_tile(table: Ref, group: int) -> _Work:
    """Look up this block: heads are taken `group` at a time, early keys first, for most queries read them."""
    item, n_tiles = lax.axis_index("item"), jnp.int32(table.shape[0])
    head_group, rest = lax.div(item, n_tiles * group), lax.rem(item, n_tiles * group)
    tile, head = (
        lax.div(rest, jnp.int32(group)),
        head_group * group + lax.rem(rest, jnp.int32(group)),
    )
    return _Work(head, tile * TILE, *(table[tile, i] for i in range(4)))


def _produce(refs: _Inputs, smem: _Shared, tile: _Work) -> None:
    """Load this block's keys and values, then queries and output gradients step by step."""
    half = smem.k.shape[3]
    for w in range(2):
        keys = pl.ds(tile.key + w * ROWS, ROWS)
        for h in range(2):
            source = refs.k.at[keys, tile.head, pl.ds(h * half, half)]
            plgpu.copy_gmem_to_smem(source, smem.k.at[w, h], smem.kv_full)
        plgpu.copy_gmem_to_smem(refs.v.at[keys, tile.head], smem.v.at[w], smem.kv_full)

    @pl.loop(tile.first, tile.last)
    def _load(i: Array) -> None:
        slot, q_slot, rows = tile.slot(i), tile.q_slot(i), pl.ds(i * ROWS, ROWS)

        @pl.when(i >= tile.first + Q_STAGES)
        def _wait_q() -> None:
            plgpu.barrier_wait(smem.q_free.at[q_slot])

        full = smem.q_full.at[q_slot]
        plgpu.copy_gmem_to_smem(refs.q.at[rows, tile.head], smem.q.at[q_slot], full)
        plgpu.copy_gmem_to_smem(refs.bias.at[tile.head, rows], smem.bias.at[q_slot], full)

        @pl.when(i >= tile.first + STAGES)
        def _wait_do() -> None:
            plgpu.barrier_wait(smem.do_free.at[slot])

        full = smem.do_full.at[slot]
        plgpu.copy_gmem_to_smem(refs.do.at[rows, tile.head], smem.do.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.shift.at[tile.head, rows], smem.shift.at[slot], full)


def _load_words(refs: _Inputs, step: Array, key: Array) -> list[Array]:
    """Load the mask bits of 64 keys and a step of queries; nothing without a mask."""
    if refs.words is None:
        return []
    words = [refs.words.at[2 * step + j, pl.ds(key, ROWS)] for j in range(2)]
    return [plgpu.load(ref, layout=BY_ROW, optimized=False) for ref in words]


def _mask(refs: _Inputs, tile: _Work, key: Array, s: Array, i: Array, words: list[Array]) -> Array:
    """Set the scores [key, query] of keys that are not allowed to -inf."""
    if words:  # the bits hold the range too
        return registers.keep_bits(s, words, -jnp.inf)

    def apply() -> Array:
        rows = pl.ds(i * ROWS, ROWS)
        start = plgpu.load(refs.start.at[rows], layout=BY_COLUMN, optimized=False)
        end = plgpu.load(refs.end.at[rows], layout=BY_COLUMN, optimized=False)
        index = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=FULL) + key
        allowed = (index >= _spread(start, s.shape)) & (index < _spread(end, s.shape))
        return jnp.where(allowed, s, -jnp.inf)

    return lax.cond((i < tile.whole_first) | (i >= tile.whole_last), apply, lambda: s)


def _add_query_gradient(
    smem: _Shared, dq_ref: Ref, head: Array, step: Array, slot: Array, wg: Array
) -> None:
    """Add this consumer's half of the columns of dS k, over all 128 keys, to dQ."""
    pairs = [(smem.ds.at[slot, w], smem.k.at[w, wg]) for w in range(2)]
    dq = asm.fresh_product(pairs, swizzle=NARROW, a_outer_is_k=True, b_outer_is_k=True)
    plgpu.wgmma_wait(0)
    dq = lax.optimization_barrier(dq)
    asm.arrive(DS_FREE + 2 * wg + slot, 2 * THREADS)
    registers.add_fragments(dq_ref.at[head, step, wg], dq)


def _add_step(
    refs: _Inputs,
    smem: _Shared,
    dq_ref: Ref,
    accumulators: tuple[Ref, Ref],
    tile: _Work,
    scale: float,
    wg: Array,
    i: Array,
    words: list[Array],
) -> None:
    """Do S, P, dP and dS of step i, add to dV, and add the step before's dS to dK and dQ.

    The step before's dK product runs during the exponentials. On the first step there is none: dS is 0 then, and this
    step's queries stand in.
    """
    dk_acc, dv_acc = accumulators
    slot, q_slot, before = tile.slot(i), tile.q_slot(i), lax.max(i - 1, tile.first)
    last_slot, last_q = tile.slot(i + 1), tile.q_slot(before)
    half, other, shape = smem.k.shape[3], 1 - wg, (ROWS, ROWS)
    plgpu.barrier_wait(smem.q_full.at[q_slot])
    halves = [smem.q.at[q_slot, :, pl.ds(h * half, half)] for h in range(2)]
    s = asm.fresh_product([(smem.k.at[wg, h], halves[h]) for h in range(2)], swizzle=NARROW)
    plgpu.wgmma(dk_acc, smem.ds.at[last_slot, wg], smem.q.at[last_q])
    plgpu.wgmma_wait(1)
    s = lax.optimization_barrier(s)  # no use of it may move in front of the wait
    bias = plgpu.load(smem.bias.at[q_slot], layout=BY_COLUMN)
    s = _mask(refs, tile, tile.key + wg * ROWS, s, i, words)
    p = jnp.exp2(s * (scale * LOG2E) + _spread(bias, shape)).astype(jnp.bfloat16)
    plgpu.barrier_wait(smem.do_full.at[slot])
    dp = asm.fresh_product([(smem.v.at[wg], smem.do.at[slot])], swizzle=WIDE)
    plgpu.wgmma(dv_acc, p, smem.do.at[slot])

    @pl.when((wg == 0) & (i == tile.first))
    def _skew() -> None:  # let the second consumer start
        asm.arrive(SKEW, 2 * THREADS)

    plgpu.wgmma_wait(0)
    dp = lax.optimization_barrier(dp)

    @pl.when(i > tile.first)
    def _free() -> None:
        plgpu.barrier_arrive(smem.q_free.at[last_q])
        # The other has done its dQ with what this step's dS overwrites.
        asm.sync(DS_FREE + 2 * other + slot, 2 * THREADS)

    shift = plgpu.load(smem.shift.at[slot], layout=BY_COLUMN)
    p = lax.optimization_barrier(p).astype(jnp.float32)  # half the registers until here
    smem.ds[slot, wg] = (p * (dp + _spread(shift, shape))).astype(jnp.bfloat16)
    asm.fence_operands()
    asm.arrive(DS_READY + 2 * wg + slot, 2 * THREADS)
    plgpu.barrier_arrive(smem.do_free.at[slot])

    @pl.when(i > tile.first)
    def _ready() -> None:
        asm.sync(DS_READY + 2 * other + last_slot, 2 * THREADS)

    _add_query_gradient(smem, dq_ref, tile.head, before, last_slot, wg)


def _consume(
    refs: _Inputs, smem: _Shared, outputs: tuple, tile: _Work, wg: Array, scale: float
) -> None:
    """Go through the queries with 64 keys; write their dK and dV."""
    dq_ref, dk_ref, dv_ref = outputs
    half, key = smem.k.shape[3], tile.key + wg * ROWS
    any_step = tile.last > tile.first
    smem.ds[STAGES - 1, wg] = plgpu.layout_cast(jnp.zeros((ROWS, ROWS), jnp.bfloat16), FULL)
    asm.fence_operands()
    plgpu.barrier_wait(smem.kv_full)
    asm.sync(MEET, 2 * THREADS)

    @pl.when((wg == 1) & any_step)
    def _skew() -> None:  # half a step behind the other
        asm.sync(SKEW, 2 * THREADS)

    def accumulate(dk_acc: Ref, dv_acc: Ref) -> tuple[Array, Array]:
        def step(i: Array, words: list[Array]) -> list[Array]:
            next_words = _load_words(refs, lax.min(i + 1, tile.last - 1), key)
            opaque_wg = registers.opaque(wg)
            accumulators = (dk_acc, dv_acc)
            _add_step(refs, smem, dq_ref, accumulators, tile, scale, opaque_wg, i, words)
            return next_words

        lax.fori_loop(tile.first, tile.last, step, _load_words(refs, tile.first, key))

        @pl.when(any_step)
        def _last() -> None:
            i = tile.last - 1
            plgpu.wgmma(dk_acc, smem.ds.at[tile.slot(i), wg], smem.q.at[tile.q_slot(i)])
            asm.sync(DS_READY + 2 * (1 - wg) + tile.slot(i), 2 * THREADS)
            _add_query_gradient(smem, dq_ref, tile.head, i, tile.slot(i), wg)

        return plgpu.wgmma_accumulator_load(dk_acc), plgpu.wgmma_accumulator_load(dv_acc)

    shapes = (ROWS, 2 * half), (ROWS, smem.v.shape[2])
    dk, dv = pl.run_scoped(accumulate, *map(plgpu.ACC, shapes))
    asm.sync(MEET, 2 * THREADS)  # the other has read these keys for the last time
    keys = pl.ds(key, ROWS)
    for h in range(2):
        smem.k[wg, h] = (dk[:, h * half : (h + 1) * half] * scale).astype(jnp.bfloat16)
    smem.v[wg] = dv.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for h in range(2):
        target = dk_ref.at[keys, tile.head, pl.ds(h * half, half)]
        plgpu.copy_smem_to_gmem(smem.k.at[wg, h], target)
    plgpu.copy_smem_to_gmem(smem.v.at[wg], dv_ref.at[keys, tile.head])
    plgpu.wait_smem_to_gmem(0)


def _tiled(*shape: int, swizzle: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=asm.operand(swizzle))


def _shared_memory(dim: int, value_dim: int) -> _Shared:
    def consumed(n: int) -> Any:
        return plgpu.Barrier(num_arrivals=2, num_barriers=n)  # two copies, or two consumers

    return _Shared(
        k=_tiled(2, 2, ROWS, dim // 2, swizzle=NARROW),
        v=_tiled(2, ROWS, value_dim, swizzle=WIDE),
        q=_tiled(Q_STAGES, ROWS, dim, swizzle=NARROW),
        do=_tiled(STAGES, ROWS, value_dim, swizzle=WIDE),
        ds=_tiled(STAGES, 2, ROWS, ROWS, swizzle=NARROW),
        bias=plgpu.SMEM((Q_STAGES, ROWS), jnp.float32),
        shift=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        q_full=consumed(Q_STAGES),
        do_full=consumed(STAGES),
        q_free=consumed(Q_STAGES),
        do_free=consumed(STAGES),
        kv_full=plgpu.Barrier(num_arrivals=6),
    )


def _launch(*arguments: Array, scale: float, config: Config, masked: bool) -> tuple:
    """Run the kernel: sums of dS k in fragment order, dK and dV."""
    k, v, start, table = (arguments[i] for i in (1, 2, 6, 8))
    (n_heads, dim), n_steps = k.shape[1:], start.shape[0] // ROWS
    dq_shape = (n_heads, n_steps, 2, dim // 16, THREADS, 4)
    dq_sums = jax.new_ref(jnp.zeros(dq_shape, jnp.float32))

    def body(*refs: Ref, **scratch: Any) -> None:
        *given, dq_ref, dk_ref, dv_ref = refs
        inputs = _Inputs._make([*given[:9], given[9] if masked else None])
        smem, wg = _Shared(**scratch), lax.axis_index("wg")
        tile = _read_tile(inputs.table, config.group)

        @pl.when(wg == 2)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _produce(inputs, smem, tile)

        @pl.when(wg < 2)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            _consume(inputs, smem, (dq_ref, dk_ref, dv_ref), tile, wg, scale)

    dk, dv = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        scratch_types=_shared_memory(dim, v.shape[2])._asdict(),
        grid=(table.shape[0] * n_heads,),
        grid_names=("item",),
        num_threads=3,
        thread_name="wg",
        compiler_params=asm.PARAMS,
        kernel_name="dense_mla_backward",
    )(*arguments, dq_sums)
    return jax.freeze(dq_sums), dk, dv


@functools.partial(jax.jit, static_argnames=("scale", "config"))
def backward(
    inputs: tuple,
    out_THU: Float[Array, "T H U"],
    lse_HP: Float[Array, "H P"],
    d_out_THU: Float[Array, "T H U"],
    d_lse_TH: Float[Array, "T H"],
    *,
    scale: float,
    config: Config | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "S H D"], Float[Array, "S H U"]]:
    """Pull cotangents of `pallas_gpu_forward.forward` back to q, k and v.

    With P = exp(scale * q . k - lse): dv = P^T d_out, dS = P * (d_out . v - out . d_out + d_lse), dq = scale * dS k and
    dk = scale * dS^T q. A query without keys gives nothing, whatever its cotangents.

    Args:
        inputs: (q, k, v, start, end, selected) of the forward.
        out_THU: Its output.
        lse_HP: Its log-sum-exp, padded as it returned it.
        d_out_THU: bfloat16 cotangent of the output.
        d_lse_TH: float32 cotangent of the log-sum-exp.
        scale: Factor on the logits.
        config: Order of work; None chooses.

    Returns:
        (dq, dk, dv), bfloat16. dk and dv are the same from run to run, dq to rounding only.
    """
    q, k, v, start_T, end_T, selected_TS = inputs
    n_queries, n_keys, n_heads = q.shape[0], k.shape[0], q.shape[1]
    lse = lse_HP[:, :n_queries]
    some = jnp.isfinite(lse)
    pad = ((0, 0), (0, -n_queries % ROWS))
    weighted_TH = jnp.sum(out_THU.astype(jnp.float32) * d_out_THU.astype(jnp.float32), axis=2)
    shift = jnp.pad(jnp.where(some, (d_lse_TH - weighted_TH).T, 0.0), pad)
    bias = jnp.pad(jnp.where(some, -LOG2E * lse, -jnp.inf), pad, constant_values=-jnp.inf)
    start, end = tiles.clip_ranges(start_T, end_T, n_keys, ROWS)
    words = []
    if selected_TS is not None:
        words = [tiles.pack_queries(tiles.selected_in_range(selected_TS, start_T, end_T))]
    padded = (tiles.pad_rows(x, 8) for x in (q, k, v, d_out_THU.astype(jnp.bfloat16)))
    table = tiles.key_tiles(start, end, n_keys)
    arguments = (*padded, bias, shift, start, end, table, *words)
    order = config or Config(group=tiles.head_group(n_heads))
    launch = functools.partial(_launch, scale=scale, config=order, masked=bool(words))
    sums, dk, dv = sequential_vmap(launch)(*arguments)  # it adds to memory of its own
    dq = pallas_gpu_query_gradient.from_fragments(sums, arguments[0].shape[0], q.shape[2], scale)
    return dq[:n_queries], dk[:n_keys], dv[:n_keys]
