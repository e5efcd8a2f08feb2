"""The three kernel bodies of the backward of attention to listed keys on Hopper: weights, key and query gradient.

Each block works on one query with three warpgroups: two consumers and a producer that gathers into rings of slots. A
slot is full when its gate opens, and free when its readers have arrived at barrier EMPTY + slot.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
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
from pallas_kernels.sparse_mla.pallas_gpu_attend import (
    ALL,
    HALF,
    HEADS,
    KEYS,
    PAIR,
    ROPE,
    VALUE_DIM,
)

LOG2E = math.log2(math.e)
# exp2 of a logit that belongs to no valid slot may overflow; bounded, it is a finite factor of a row of zeros.
HIGHEST = 64.0
EMPTY = barriers.FIRST_FREE_BARRIER  # + slot
P_FULL, P_EMPTY = EMPTY + 4, EMPTY + 5
WEIGHT_SLOTS, KEY_SLOTS, QUERY_SLOTS = 3, 2, 4


@dataclasses.dataclass(frozen=True)
class Query:
    """The query of a block: its place in the chunk and in the arrays, and its steps of 64 slots."""

    local: jax.Array
    index: jax.Array
    n_steps: int

    def head_rows(self, n_heads: int, tile: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first row of (query, head) of a tile of 64 heads, and how many rows it has."""
        head = jnp.int32(tile * HEADS)
        return self.index * n_heads + head, n_heads - head


def _ring(i: jax.Array, n_slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the slot of the i-th item of a ring, and its gate's parity."""
    return lax.rem(i, jnp.int32(n_slots)), lax.rem(lax.div(i, jnp.int32(n_slots)), jnp.int32(2))


def _role(condition: Any, body: Callable[[], None], *, consumer: bool = True) -> None:
    """Run a warpgroup's part with its share of the registers."""

    @pl.when(condition)
    def _() -> None:
        if consumer:
            plgpu.set_max_registers(216, action="increase")
        else:
            plgpu.set_max_registers(72, action="decrease")
        body()


def _row_values(ref: Any, query: Query, tile: jax.Array) -> jax.Array:
    """Load a float32 number of each of a tile's heads and repeat it over the keys."""
    heads = pl.ds(tile * HEADS, HEADS)
    values = plgpu.load(ref.at[query.index, heads], layout=products.ROW, optimized=False)
    return lax.broadcast_in_dim(values, (HEADS, KEYS), [0])


def weights(query: Query, tile: jax.Array, refs: Any, smem: Any, *, scale: float) -> None:
    """Compute P and dS of 64 heads of a query.

    `P = 2^(scale log2(e) q . k - lse)`, `dS = scale P (dO . v - delta)`. Items of the ring are Q, dO, then 64 keys
    each; consumer 0 holds Q in registers and makes P, consumer 1 holds dO and makes dS.

    Args:
        query: The query.
        tile: Which 64 heads.
        refs: q [T, H, 576], dO [T, H, 512], kv [S, 576], indices [T, K]; lse in powers of 2 and delta, float32
            [T, heads of whole tiles]; P and dS of the chunk, bf16 [chunk, heads, slots of whole steps].
        smem: Latent and rope parts of the ring, the box that passes P on, gates.
        scale: Factor on the logits.
    """
    *_, p_ref, ds_ref = refs
    latent, rope, box, gates = smem
    row0 = query.local * p_ref.shape[1] + tile * HEADS
    wg = lax.axis_index("wg")

    def take_item(item: int, *parts: Any) -> list[jax.Array]:
        """Read Q or dO; both consumers release both slots, and the third is free from the start."""
        asm.arrive(EMPTY + 2, ALL)
        barriers.wait_gate(gates, item, 0)
        values = [plgpu.load(part.at[item], layout=products.FULL) for part in parts]
        asm.arrive(EMPTY, ALL)
        asm.arrive(EMPTY + 1, ALL)
        return values

    def exponents() -> None:
        lse = _row_values(refs[4], query, tile)
        q, q_rope = take_item(0, latent, rope)

        @pl.loop(0, query.n_steps)
        def _(i: jax.Array) -> None:
            slot, parity = _ring(i + 2, WEIGHT_SLOTS)
            barriers.wait_gate(gates, slot, parity)
            s = products.multiply(None, q, latent.at[slot])
            s = products.multiply(s, q_rope, rope.at[slot])
            (s,) = products.settle(0, s)
            asm.arrive(EMPTY + slot, ALL)
            logits = products.paired(s) * (scale * LOG2E) - lse
            p = jnp.exp2(jnp.minimum(logits, HIGHEST)).astype(jnp.bfloat16)
            asm.sync(P_EMPTY, PAIR)
            stores.put(box, p)
            asm.arrive(P_FULL, PAIR)
            stores.store_fragments(p_ref, p, row0, i * KEYS)

        asm.sync(P_EMPTY, PAIR)  # takes the last arrival

    def gradients() -> None:
        shift = _row_values(refs[5], query, tile) * scale
        (d_out,) = take_item(1, latent)
        asm.arrive(P_EMPTY, PAIR)

        @pl.loop(0, query.n_steps)
        def _(i: jax.Array) -> None:
            slot, parity = _ring(i + 2, WEIGHT_SLOTS)
            barriers.wait_gate(gates, slot, parity)
            dp = products.multiply(None, d_out, latent.at[slot])
            (dp,) = products.settle(0, dp)
            asm.arrive(EMPTY + slot, ALL)
            asm.sync(P_FULL, PAIR)
            p = stores.take(box)
            asm.arrive(P_EMPTY, PAIR)
            ds = p.astype(jnp.float32) * (products.paired(dp) * scale - shift)
            stores.store_fragments(ds_ref, ds.astype(jnp.bfloat16), row0, i * KEYS)

    _role(wg == 0, exponents)
    _role(wg == 1, gradients)
    _role(wg == 2, lambda: _gather_all(query, tile, refs[:4], smem), consumer=False)


def _gather_all(query: Query, tile: jax.Array, refs: Any, smem: Any) -> None:
    """Produce the ring of `weights`: Q, dO, then whole rows of 64 keys, in the order of `store_fragments`."""
    q_ref, do_ref, kv_ref, idx_ref = refs
    latent, rope, _, gates = smem
    heads = rows.count_slots(*query.head_rows(q_ref.shape[1], tile))
    rows.copy_rows(q_ref, heads, 0, latent.at[0])
    rows.copy_rows(q_ref, heads, VALUE_DIM, rope.at[0])
    barriers.open_after_copies(gates, 0)
    rows.copy_rows(do_ref, heads, 0, latent.at[1])
    barriers.open_after_copies(gates, 1)

    def load_slots(i: int | jax.Array) -> jax.Array:
        return rows.load_slots(idx_ref, query.index, jnp.int32(i * KEYS), spread=True)

    def step(i: jax.Array, slots: jax.Array) -> jax.Array:
        slot, _ = _ring(i + 2, WEIGHT_SLOTS)
        following = load_slots(i + 1)
        asm.sync(EMPTY + slot, ALL)
        rows.copy_rows(kv_ref, slots, 0, latent.at[slot])
        rows.copy_rows(kv_ref, slots, VALUE_DIM, rope.at[slot])
        barriers.open_after_copies(gates, slot)
        return following

    lax.fori_loop(0, query.n_steps, step, load_slots(0))
    _drain(WEIGHT_SLOTS, ALL)


def _drain(n_slots: int, n_threads: int) -> None:
    """Take the last arrivals, so that no barrier is left half full."""
    for slot in range(n_slots):
        asm.sync(EMPTY + slot, n_threads)


def _chunk_rows(query: Query, n_tiles: int) -> list[jax.Array]:
    """Return the rows of P and dS of each tile of 64 heads."""
    first = [(query.local * n_tiles + h) * HEADS for h in range(n_tiles)]
    return [rows.count_slots(row, HEADS) for row in first]


def key_gradient(query: Query, part: jax.Array, refs: Any, smem: Any) -> None:
    """Add P^T dO + dS^T Q of all heads of a query to 256 columns of dKV, in part 1 also dS^T Q to those of the rope.

    The consumers take the steps in turns, so that one's atomic additions run beside the other's products.

    Args:
        query: The query.
        part: Which half of the latent columns.
        refs: q, dO, P, dS, indices as in `weights`; dKV float32 [S, 576], added to.
        smem: Columns of Q, dO and the rope of Q of each tile of heads; P and dS of two steps; gates.
    """
    q_ref, do_ref, p_ref, ds_ref, idx_ref, dkv_ref = refs
    q, d_out, q_rope, p, ds, gates = smem
    n_tiles = q.shape[0]
    wg = lax.axis_index("wg")

    def consume(slot: int, part: int) -> None:
        asm.arrive(EMPTY + slot, PAIR)
        barriers.wait_gate(gates, KEY_SLOTS, 0)

        @pl.loop(0, (query.n_steps + 1 - slot) // 2)
        def _(j: jax.Array) -> None:
            keys = stores.load_keys(idx_ref, query.index, (2 * j + slot) * KEYS)
            barriers.wait_gate(gates, slot, lax.rem(j, jnp.int32(2)))
            accs: list[Any] = [None, None]
            for h in range(n_tiles):
                pairs = [(0, p, d_out), (0, ds, q), (1, ds, q_rope)]
                for i, a, b in pairs if part == 1 else pairs[:2]:
                    accs[i] = products.multiply(
                        accs[i], a.at[slot, h], b.at[h], a_outer_is_k=True, b_outer_is_k=True
                    )
            done = products.settle(0, *accs[: part + 1])
            asm.arrive(EMPTY + slot, PAIR)
            for acc, column in zip(done, (part * HALF, VALUE_DIM), strict=False):
                stores.add_rows(dkv_ref, acc, keys, column)

    def produce() -> None:
        for h in range(n_tiles):
            heads = rows.count_slots(*query.head_rows(q_ref.shape[1], h))
            rows.copy_rows(do_ref, heads, part * HALF, d_out.at[h])
            rows.copy_rows(q_ref, heads, part * HALF, q.at[h])
            rows.copy_rows(q_ref, heads, VALUE_DIM, q_rope.at[h])
        barriers.open_after_copies(gates, KEY_SLOTS)
        from_rows = _chunk_rows(query, n_tiles)

        @pl.loop(0, query.n_steps)
        def _(i: jax.Array) -> None:
            slot, _ = _ring(i, KEY_SLOTS)
            asm.sync(EMPTY + slot, PAIR)
            for h in range(n_tiles):
                rows.copy_rows(p_ref, from_rows[h], i * KEYS, p.at[slot, h])
                rows.copy_rows(ds_ref, from_rows[h], i * KEYS, ds.at[slot, h])
            barriers.open_after_copies(gates, slot)

        _drain(KEY_SLOTS, PAIR)

    _each_part(wg, part, 2, consume)
    _role(wg == 2, produce, consumer=False)


def _each_part(wg: jax.Array, part: jax.Array, n: int, consume: Callable[[int, int], None]) -> None:
    """Run consume(consumer, part) with static numbers."""
    for g in range(n):
        for static in range(2):
            _role((wg == g) & (part == static), functools.partial(consume, g, static))


def query_gradient(query: Query, part: jax.Array, refs: Any, smem: Any) -> None:
    """Sum dS K of a query over 256 latent columns, in part 1 also those of the rope; a consumer has 64 heads.

    Args:
        query: The query.
        part: Which half of the latent columns.
        refs: kv, dS, indices as in `weights`; dQ bf16 [T, H, 576], whose columns are written.
        smem: Latent and rope columns of keys, dS of each tile of heads, of four steps; gates.
    """
    kv_ref, ds_ref, idx_ref, dq_ref = refs
    latent, rope, ds, gates = smem
    n_heads, n_tiles = dq_ref.shape[1], ds.shape[1]
    readers = (1 + n_tiles) * asm.GROUP
    wg = lax.axis_index("wg")

    def consume(g: int, part: int) -> None:
        for slot in range(QUERY_SLOTS):
            asm.arrive(EMPTY + slot, readers)
        columns = [(part * HALF, HALF, latent), (VALUE_DIM, ROPE, rope)][: part + 1]

        def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot, parity = _ring(i, QUERY_SLOTS)
            barriers.wait_gate(gates, slot, parity)
            out = [
                products.multiply(acc, ds.at[slot, g], keys.at[slot], b_outer_is_k=True)
                for acc, (_, _, keys) in zip(accs, columns, strict=True)
            ]
            done = products.settle(0, *out)
            asm.arrive(EMPTY + slot, readers)
            return done

        start = tuple(products.zeros((HEADS, width)) for _, width, _ in columns)
        accs = lax.fori_loop(0, query.n_steps, step, start)
        first, n_left = query.head_rows(n_heads, g)
        for acc, (column, _, _) in zip(accs, columns, strict=True):
            x = products.paired(acc).astype(jnp.bfloat16)
            stores.store_rows(dq_ref, x, first, n_left, column)

    def produce() -> None:
        from_rows = _chunk_rows(query, n_tiles)

        def load_slots(i: int | jax.Array) -> jax.Array:
            return rows.load_slots(idx_ref, query.index, jnp.int32(i * KEYS))

        def step(i: jax.Array, slots: jax.Array) -> jax.Array:
            slot, _ = _ring(i, QUERY_SLOTS)
            following = load_slots(i + 1)
            asm.sync(EMPTY + slot, readers)
            rows.copy_rows(kv_ref, slots, part * HALF, latent.at[slot])

            @pl.when(part == 1)
            def _rope() -> None:
                rows.copy_rows(kv_ref, slots, VALUE_DIM, rope.at[slot])

            for h in range(n_tiles):
                rows.copy_rows(ds_ref, from_rows[h], i * KEYS, ds.at[slot, h])
            barriers.open_after_copies(gates, slot)
            return following

        lax.fori_loop(0, query.n_steps, step, load_slots(0))
        _drain(QUERY_SLOTS, readers)

    _each_part(wg, part, n_tiles, consume)
    _role(wg == 2, produce, consumer=False)
