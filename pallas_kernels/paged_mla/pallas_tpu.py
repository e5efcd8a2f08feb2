"""Attention to listed rows of a paged cache on TPU, in absorbed MQA form: the kernel copies their records by itself.

All of a query's copies are in flight at once, one query ahead of the products; a record is one copy. Slots after the
last valid one are not copied.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_tpu, padding
from pallas_kernels.mosaic_tpu import LANES, Ref
from pallas_kernels.paged_mla import layout
from pallas_kernels.sparse_mla import pallas_tpu as sparse
from pallas_kernels.sparse_mla import pallas_tpu_rows as gathered

GROUP = 32  # slots that are copied, waited for or zeroed together; their rows fill whole tiles of any dtype
LINE_BYTES = layout.LANES * layout.WORD_BYTES
# e4m3 in float32's fields: exponents differ by 120; below 2^-6, where the exponent is 0, values step by 2^-9.
E4M3_EXPONENT, E4M3_NORMAL, E4M3_LEAST = 120 << 23, 1 << 23, 2.0**-6


def check(q_THD: Any, cache: Any, rows_TK: Any) -> None:
    """Raise NotImplementedError, saying why, for what this kernel does not take."""
    if not isinstance(cache, layout.Records):
        raise NotImplementedError("takes a cache in records")
    row = cache.format
    mosaic_tpu.check_floats(q_THD, jax.ShapeDtypeStruct((1,), row.dtype))
    if 0 in (*rows_TK.shape, *cache.words.shape):
        raise NotImplementedError("an axis of length 0")
    n_slots = mosaic_tpu.round_up(rows_TK.shape[-1], GROUP)
    tiles = (row.latent_width + row.rope_width) * jnp.dtype(row.dtype).itemsize
    heads = mosaic_tpu.round_up(q_THD.shape[-2], gathered.HEAD_MULTIPLE)
    # Two queries' records, one's values, its logits and its weights.
    used = n_slots * (2 * row.lines * LINE_BYTES + tiles + 2 * 4 * heads)
    if used > 0.75 * mosaic_tpu.VMEM_LIMIT:
        raise NotImplementedError(f"rows of {rows_TK.shape[-1]} slots take {used} bytes of VMEM")


def _fetch(slots: Ref, next_slots: Ref, words: Ref, records: Ref, arrived: Ref, lines: int) -> Any:
    """Start copying the next query's records and wait for this one's; return the first line of these.

    Groups of slots that are not copied become zeros: what an earlier query left there could be NaN.
    """
    t = pl.program_id(1)
    here, half_lines = t % 2, records.shape[0] // 2
    n_groups = half_lines // (GROUP * lines)

    def start(slots: Ref, half: Any) -> None:
        def start_group(g: Any) -> None:
            @pl.loop(0, GROUP, unroll=gathered.ISSUE_UNROLL)
            def issue(i: Any) -> None:
                slot = g * GROUP + i
                pltpu.make_async_copy(
                    words.at[pl.ds(slots[0, 0, slot], lines)],
                    records.at[pl.ds(half * half_lines + slot * lines, lines)],
                    arrived.at[half],
                ).start()

        @pl.loop(0, n_groups)
        def start_groups(g: Any) -> None:
            pl.when(g < slots[0, 0, n_groups * GROUP])(lambda: start_group(g))

    pl.when(t == 0)(lambda: start(slots, 0))
    pl.when(t + 1 < pl.num_programs(1))(lambda: start(next_slots, 1 - here))

    @pl.loop(0, n_groups)
    def settle(g: Any) -> None:
        first = pl.multiple_of(here * half_lines + g * GROUP * lines, GROUP)
        group = records.at[pl.ds(first, GROUP * lines)]
        copied = g < slots[0, 0, n_groups * GROUP]
        # The semaphore counts bytes: one wait stands for a group's copies, and the last for all of them.
        pl.when(copied)(lambda: pltpu.make_async_copy(group, group, arrived.at[here]).wait())

        @pl.when(jnp.logical_not(copied))
        def clear() -> None:
            group[...] = jnp.zeros_like(group)

    return here * half_lines


def _values(words: Int[Array, "K 128"], place: int, dtype: str) -> Float[Array, "K 128"]:
    """Return, in float32, the values that lie at a place in words, 0 in the lowest bits."""
    size = jnp.dtype(dtype).itemsize
    top = words << (8 * (layout.WORD_BYTES - size * (place + 1)))
    if size > 1:
        kept = top if size == layout.WORD_BYTES else top & -(1 << 16)
        return lax.bitcast_convert_type(kept, jnp.float32)
    # Codes of NaN, which quantisation of finite values never writes, read as 480.
    magnitude = (top >> 4) & (0x7F << 20)
    value = lax.bitcast_convert_type(magnitude + E4M3_EXPONENT, jnp.float32)
    value = jnp.where(magnitude < E4M3_NORMAL, 2 * value - E4M3_LEAST, value)
    return jnp.where(top < 0, -value, value)


def _tiles(records: Ref, first: Any, n_slots: int, row: layout.Format) -> list[Array]:
    """Read one query's records: the latents' tiles of 128 columns, then the rope keys'."""
    found: list[list[Array]] = []
    line = 0
    for dtype, width in row.sections:
        per_word = layout.WORD_BYTES // jnp.dtype(dtype).itemsize
        tiles = []
        for c in range(width // LANES):
            words = records[pl.ds(first + line + c // per_word, n_slots, stride=row.lines), :]
            tiles.append(_values(words, c % per_word, dtype))
        line += -(-width // (LANES * per_word))
        found.append(tiles)
    if not row.quantised:
        return [tile.astype(row.dtype) for tile in found[0]]
    latents, rest = found
    n_rope = row.rope_width // LANES
    scales = [rest[n_rope + c // LANES][:, c % LANES][:, None] for c in range(row.n_scales)]
    latents = [tile * scale for tile, scale in zip(latents, scales, strict=True)]
    return [tile.astype(row.dtype) for tile in (*latents, *rest[:n_rope])]


def _kernel(
    slots: Ref,
    next_slots: Ref,
    words: Ref,
    listed: Ref,
    q: Ref,
    out: Ref,
    lse: Ref,
    records: Ref,
    arrived: Ref,
    *,
    row: layout.Format,
    scale: float,
) -> None:
    """Step t: attend query t to its rows."""
    first = _fetch(slots, next_slots, words, records, arrived, row.lines)
    tiles = _tiles(records, first, listed.shape[2], row)
    sparse.attend(tiles, q, out, lse, scale, listed[0] >= 0)


def _bounded(rows_TK: Int[Array, "T K"], cache: layout.Records) -> tuple[Array, Array]:
    """Return (rows, -1 where invalid) and (first lines of records to copy, then how many groups of them).

    Slots that are copied though they are invalid point at a record that the query lists.
    """
    extra = -rows_TK.shape[1] % GROUP
    rows = jnp.pad(rows_TK.astype(jnp.int32), ((0, 0), (0, extra)), constant_values=-1)
    listed = jnp.where((rows >= 0) & (rows < cache.n_rows), rows, -1)
    some = jnp.maximum(jnp.max(listed, axis=1, keepdims=True), 0)
    place = jnp.arange(1, rows.shape[1] + 1, dtype=jnp.int32)
    last = jnp.max(jnp.where(listed >= 0, place, 0), axis=1, keepdims=True)
    lines = jnp.where(listed >= 0, listed, some) * cache.format.lines
    return listed[:, None], jnp.concatenate([lines, -(-last // GROUP)], axis=1)[:, None]


def paged_mla(
    q_THD: Float[Array, "T H D"],
    cache: layout.Records,
    rows_TK: Int[Array, "T K"],
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attend as `op.paged_mla` does.

    Args:
        q_THD: Absorbed queries, bfloat16 or float32.
        cache: Rows of the same dtype; their latents may be quantised.
        rows_TK: int32 cache rows; slots outside [0, N) are ignored.
        scale: Factor on the logits.

    Returns:
        (attended latents in the dtype of the rope keys, lse float32); a row without valid slots gives 0 and -inf.

    Raises:
        NotImplementedError: As `check`.
    """
    check(q_THD, cache, rows_TK)
    (n_queries, n_heads, _), row = q_THD.shape, cache.format
    heads = -n_heads % gathered.HEAD_MULTIPLE
    q = padding.spread(q_THD, row.latent_dim, (row.latent_width, row.rope_width))
    q = jnp.pad(q, ((0, 0), (0, heads), (0, 0)))
    listed, slots = _bounded(rows_TK, cache)
    (heads, width), n_slots = q.shape[1:], listed.shape[2]
    pairs = n_queries * heads * n_slots
    results = (
        jax.ShapeDtypeStruct((n_queries, heads, row.latent_width), row.dtype),
        jax.ShapeDtypeStruct((n_queries, 1, heads), jnp.float32),
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, row=row, scale=scale),
        grid=gathered.grid_of(n_queries),
        in_specs=[
            *gathered.slot_specs(n_queries, n_slots + 1),
            pl.BlockSpec(memory_space=pl.ANY),
            gathered.query_spec((1, n_slots), n_queries),
            gathered.query_spec((heads, width), n_queries),
        ],
        out_specs=[
            gathered.query_spec((heads, row.latent_width), n_queries),
            gathered.query_spec((1, heads), n_queries),
        ],
        out_shape=results,
        scratch_shapes=[
            pltpu.VMEM((2 * n_slots * row.lines, LANES), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=gathered.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (width + row.latent_width),
            transcendentals=pairs,
            bytes_accessed=n_queries * n_slots * row.lines * LINE_BYTES
            + mosaic_tpu.total_bytes(slots, listed, q, *results),
        ),
        name="paged_mla",
    )(slots, slots, cache.words, listed, q)
    return out[:, :n_heads, : row.latent_dim], lse[:, 0, :n_heads]
