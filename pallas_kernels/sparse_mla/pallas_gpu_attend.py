"""The warpgroups of the forward of attention to listed keys on Hopper: two consumers and a gathering producer."""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.sparse_mla import pallas_gpu_barriers as barriers
from pallas_kernels.sparse_mla import pallas_gpu_products as products
from pallas_kernels.sparse_mla import pallas_gpu_rows as rows
from pallas_kernels.sparse_mla import pallas_gpu_stores as stores

LOG2E = math.log2(math.e)
LN2 = math.log(2)
HEADS = KEYS = products.ROWS  # of a tile
ROPE = products.ATOM
HALF = 256  # value columns of one consumer
VALUE_DIM = 2 * HALF
DIM = VALUE_DIM + ROPE
# Reference of the exponent before the first key: finite, so that no inf - inf appears.
FAR_BELOW = -1e30
SLACK = 8.0  # the reference follows the maximum only when that has outgrown it by a factor of 2^8
PAIR, ALL = 2 * asm.GROUP, 3 * asm.GROUP
# Named barriers; the first four + consumer.
P_READY, NEAR_FREE, FAR_FREE, MASK_READY, Q_FREE, SUM_READY = (
    barriers.FIRST_FREE_BARRIER + i for i in (0, 2, 4, 6, 8, 9)
)
# Gates; the second and third + consumer.
Q_GATE, NEAR_GATE, FAR_GATE, N_GATES = 0, 1, 3, 5
# Rows of the exchange memory, + consumer.
MASK, REF, SUM, N_EXCHANGE = 0, 2, 4, 6


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared memory; a pair is (of consumer 0's keys, of consumer 1's keys).

    Consumer 0 accumulates the left half of the values and consumer 1 the right: the near half of their own keys, the
    far half of the other's. The rope tile of a consumer's keys takes its weights once its logits are done.
    """

    q_left: Any
    q_right: Any
    q_rope: Any
    k_left: tuple[Any, Any]
    k_right: tuple[Any, Any]
    k_rope: tuple[Any, Any]
    exchange: Any
    gates: Any

    def near(self, g: int) -> tuple[Any, Any]:
        """Return queries and keys of the columns that consumer g accumulates, of its own keys."""
        return (self.q_left, self.k_left[0]) if g == 0 else (self.q_right, self.k_right[1])

    def far(self, g: int) -> tuple[Any, Any]:
        """Return queries and keys of the other columns of consumer g's keys."""
        return (self.q_right, self.k_right[0]) if g == 0 else (self.q_left, self.k_left[1])


@dataclasses.dataclass(frozen=True)
class Work:
    """The tiles of 64 heads of a query that a block works on: `first`, and every n_blocks-th from there."""

    n_heads: int
    n_tiles: int
    n_blocks: int
    n_steps: int

    @property
    def first(self) -> jax.Array:
        """Return this block's number, that of its first tile."""
        return lax.axis_index("block")

    @property
    def count(self) -> jax.Array:
        """Return how many tiles this block has."""
        return lax.div(self.n_tiles - self.first + (self.n_blocks - 1), jnp.int32(self.n_blocks))

    def locate(self, i: int | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query, first row of (query, head) and heads left of the i-th tile, at most the last."""
        per_query = jnp.int32(-(-self.n_heads // HEADS))
        tile = lax.min(self.first + i * self.n_blocks, jnp.int32(self.n_tiles - 1))
        query = lax.div(tile, per_query)
        head = (tile - query * per_query) * HEADS
        return query, query * self.n_heads + head, self.n_heads - head


def _splat_row(x: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((HEADS,), x, jnp.float32), products.ROW)


def _adopt(
    o: jax.Array, total: jax.Array, ref: jax.Array, new_ref: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Make what was summed relative to 2^ref relative to 2^new_ref."""
    shrink = jnp.exp2(ref - new_ref)
    return products.scale_rows(o, shrink), total * shrink


def _logits(g: int, tiles: Tiles, phase: jax.Array, last: jax.Array) -> jax.Array:
    """Return the logits [64, 64] of consumer g's keys, -inf where a slot is not valid."""
    near, far = (
        (NEAR_GATE, [tiles.near(g)]),
        (FAR_GATE, [tiles.far(g), (tiles.q_rope, tiles.k_rope[g])]),
    )
    asm.sync(MASK_READY + g, PAIR)
    s = products.repeat_row(tiles.exchange.at[MASK + g])  # -inf + 0: rows of invalid slots are zero
    for gate, pairs in (far, near) if g else (near, far):  # in the order in which they arrive
        barriers.wait_gate(tiles.gates, gate + g, phase)
        for q, k in pairs:
            s = products.multiply(s, q, k)
    (s,) = products.settle(0, s)

    @pl.when(last)
    def _() -> None:  # this consumer has done its last product with the tile's queries
        asm.arrive(Q_FREE, ALL)

    return products.paired(s)


def _softmax(
    g: int, tiles: Tiles, s: jax.Array, ref: jax.Array, scale_log2: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return weights in float32 and bf16 and their reference; leave them to the other consumer too."""
    peak = jnp.max(s, axis=1) * scale_log2
    ref = jnp.where(peak > ref + SLACK, peak, ref)
    p = jnp.exp2(s * scale_log2 - lax.broadcast_in_dim(ref, s.shape, [0]))
    p16 = p.astype(jnp.bfloat16)
    if g == 0:  # all warps have read the rope keys that the weights replace; consumer 1 just met
        barriers.sync_group(g)
    tiles.k_rope[g][...] = p16
    tiles.exchange[REF + g] = ref
    asm.fence_operands()
    asm.arrive(P_READY + g, PAIR)
    return p, p16, ref


def _other_ref(g: int, tiles: Tiles) -> jax.Array:
    """Wait for the other consumer's weights; return their reference."""
    asm.sync(P_READY + 1 - g, PAIR)
    return plgpu.load(tiles.exchange.at[REF + 1 - g], layout=products.ROW)


State = tuple[jax.Array, jax.Array, jax.Array]  # accumulator, reference, sum of own weights


def _arrive_unless(last: jax.Array, barrier: int) -> None:
    """Release a tile, except after the last step: then it takes output."""

    @pl.when(jnp.logical_not(last))
    def _() -> None:
        asm.arrive(barrier, PAIR)


def _absorb_first(
    tiles: Tiles, s: jax.Array, state: State, last: jax.Array, scale_log2: float
) -> State:
    """Add a step's values to the left half: own keys, then the other's.

    References go in one chain, consumer 0's then 1's in each step, as an accumulator adds up the weights of both.
    """
    o, ref, total = state
    p, p16, new_ref = _softmax(0, tiles, s, ref, scale_log2)
    o, total = _adopt(o, total, ref, new_ref)
    o = products.multiply(o, p16, tiles.near(0)[1], b_outer_is_k=True)
    total = total + jnp.sum(p, axis=1)
    ref = _other_ref(0, tiles)
    (o,) = products.settle(0, o)
    asm.arrive(NEAR_FREE, PAIR)
    o, total = _adopt(o, total, new_ref, ref)
    o = products.multiply(o, tiles.k_rope[1], tiles.far(1)[1], b_outer_is_k=True)
    (o,) = products.settle(0, o)
    _arrive_unless(last, FAR_FREE + 1)
    return o, ref, total


def _absorb_second(
    tiles: Tiles, s: jax.Array, state: State, last: jax.Array, scale_log2: float
) -> State:
    """Add a step's values to the right half: the other's keys, whose product hides the softmax, then own ones."""
    o, ref, total = state
    new_ref = _other_ref(1, tiles)
    o, total = _adopt(o, total, ref, new_ref)
    o = products.multiply(o, tiles.k_rope[0], tiles.far(0)[1], b_outer_is_k=True)
    p, p16, ref = _softmax(1, tiles, s, new_ref, scale_log2)
    (o,) = products.settle(0, o)
    asm.arrive(FAR_FREE, PAIR)
    o, total = _adopt(o, total, new_ref, ref)
    o = products.multiply(o, p16, tiles.near(1)[1], b_outer_is_k=True)
    total = total + jnp.sum(p, axis=1)
    (o,) = products.settle(0, o)
    _arrive_unless(last, NEAR_FREE + 1)
    return o, ref, total


def _store(
    g: int, tiles: Tiles, state: State, place: tuple[Any, ...], refs: tuple[Any, Any]
) -> None:
    """Divide by the sum of both consumers' weights, and store this half of the output."""
    o, ref, total = state
    out_ref, lse_ref = refs
    _, first, n_left = place
    tiles.exchange[SUM + g] = total
    asm.sync(SUM_READY, PAIR)
    total = total + plgpu.load(tiles.exchange.at[SUM + 1 - g], layout=products.ROW)
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    if g == 0:
        lse = jnp.where(some, (ref + jnp.log2(divisor)) * LN2, -jnp.inf)
        stores.store_row_values(lse_ref, lse, first, n_left)
    o = products.scale_rows(o, jnp.where(some, 1.0 / divisor, 0.0))
    # The values that this consumer used last, those that the producer fills last. They pass the output on so that it is
    # written in whole lines.
    tile, free = (tiles.k_left[1], FAR_FREE + 1) if g == 0 else (tiles.k_right[1], NEAR_FREE + 1)
    barriers.sync_group(g)  # all warps are done with the tile
    tile[...] = products.paired(o).astype(jnp.bfloat16)
    barriers.sync_group(g)
    stores.store_tile(out_ref, tile, first, n_left, g * HALF)
    asm.arrive(free, PAIR)


def consume(g: int, tiles: Tiles, work: Work, refs: tuple[Any, Any], *, scale: float) -> None:
    """Attend with each tile's heads."""
    scale_log2 = scale * LOG2E
    absorb = _absorb_second if g else _absorb_first
    # At the start all shared memory is free.
    asm.arrive(NEAR_FREE + g, PAIR)
    asm.arrive(FAR_FREE + 1 - g, PAIR)
    asm.arrive(Q_FREE, ALL)

    def attend(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        phase, q_phase = carry
        barriers.wait_gate(tiles.gates, Q_GATE, q_phase)

        def step(j: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
            state, phase = carry
            last = j == work.n_steps - 1
            s = _logits(g, tiles, phase, last)
            return absorb(tiles, s, state, last, scale_log2), 1 - phase

        state = products.zeros((HEADS, HALF)), _splat_row(FAR_BELOW), _splat_row(0.0)
        state, phase = lax.fori_loop(0, work.n_steps, step, (state, phase))
        _store(g, tiles, state, work.locate(i), refs)
        return phase, 1 - q_phase

    lax.fori_loop(0, work.count, attend, (jnp.int32(0), jnp.int32(0)))


def produce(tiles: Tiles, work: Work, q_ref: Any, kv_ref: Any, idx_ref: Any) -> None:
    """Gather the queries of each tile and the keys of each step; indices are loaded a step ahead."""
    heads_parts = [(0, tiles.q_left), (HALF, tiles.q_right), (VALUE_DIM, tiles.q_rope)]

    def load_slots(query: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        first = step * (2 * KEYS)
        return tuple(rows.load_slots(idx_ref, query, first + g * KEYS) for g in range(2))

    def tile(i: jax.Array, slots: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        query, first, n_left = work.locate(i)
        next_query, *_ = work.locate(i + 1)
        asm.sync(Q_FREE, ALL)
        heads = rows.count_slots(first, n_left)
        for column, part in heads_parts:
            rows.copy_rows(q_ref, heads, column, part)
        barriers.open_after_copies(tiles.gates, Q_GATE)

        def step(j: jax.Array, slots: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            last = j == work.n_steps - 1
            following = load_slots(jnp.where(last, next_query, query), jnp.where(last, 0, j + 1))
            _gather_step(tiles, slots, kv_ref)
            return following

        return lax.fori_loop(0, work.n_steps, step, slots)

    lax.fori_loop(0, work.count, tile, load_slots(work.locate(0)[0], jnp.int32(0)))
    # Take the last arrivals, so that no barrier is left half full.
    for g in range(2):
        asm.sync(NEAR_FREE + g, PAIR)
        asm.sync(FAR_FREE + g, PAIR)
    asm.sync(Q_FREE, ALL)


def _gather_step(tiles: Tiles, slots: tuple[jax.Array, ...], kv_ref: Any) -> None:
    """Gather the keys of a step, parts in the order in which the consumers leave them."""

    def mask(g: int) -> None:
        rows.store_mask(slots[g], tiles.exchange.at[MASK + g], kv_ref.shape[0])
        asm.arrive(MASK_READY + g, PAIR)

    def near(g: int) -> None:
        rows.copy_rows(kv_ref, slots[g], g * HALF, tiles.near(g)[1])
        barriers.open_after_copies(tiles.gates, NEAR_GATE + g)

    def far(g: int) -> None:
        rows.copy_rows(kv_ref, slots[g], (1 - g) * HALF, tiles.far(g)[1])
        rows.copy_rows(kv_ref, slots[g], VALUE_DIM, tiles.k_rope[g])
        barriers.open_after_copies(tiles.gates, FAR_GATE + g)

    asm.sync(NEAR_FREE, PAIR)
    mask(0)
    near(0)
    asm.sync(FAR_FREE, PAIR)
    far(0)
    # Consumer 0 is done with consumer 1's weights, for which that has read its mask.
    asm.sync(FAR_FREE + 1, PAIR)
    mask(1)
    far(1)
    asm.sync(NEAR_FREE + 1, PAIR)
    near(1)
