"""The attention kernels under the mesh: each device's rows and heads, with every collective written down.

Queries keep their shard of the sequence and keys are gathered along it. Heads are sharded in attention; the indexer and
its loss need all heads of a query, so there the rows are cut finer instead. A batch of fewer rows than it has
shards, as a prompt's piece is, has its queries cut along the batch's axes too.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import pallas_kernels
from dsv32_jax import cache, sharding
from dsv32_jax.indexer import IndexerTensors
from dsv32_jax.sharding import fitted, spec

REPLICATED = spec()


def _whole(row: P) -> bool:
    """Whether a shard has all queries of its rows, at the positions of its keys: later keys can be skipped."""
    axes = row[1] or ()
    return sharding.axis_size(*((axes,) if isinstance(axes, str) else axes)) == 1


def attend_range(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S H D"],
    v: Float[Array, "B S H U"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    selected: Array | None,
    scale: float,
    implementation: str | None,
    *,
    square: bool = True,
) -> tuple[Float[Array, "B T H U"], Float[Array, "B T H"]]:
    """Run `dense_mla` on every device's queries and heads; `square` says that queries are at the keys' positions."""
    query = fitted(q.shape, "batch", "sequence", "heads")
    key = fitted(k.shape, "batch", None, "heads")
    row = P(*query[:2])
    causal = square and _whole(row)

    def local(q: Array, k: Array, v: Array, start: Array, end: Array, *mask: Array) -> tuple:
        return pallas_kernels.dense_mla(
            q,
            k,
            v,
            scale=scale,
            start=start,
            end=end,
            selected=mask[0] if mask else None,
            causal=causal,
            implementation=implementation,
        )

    masks = () if selected is None else (selected,)
    in_specs = (query, key, key, row, row) + (row,) * len(masks)
    run = sharding.shard_map(local, in_specs, (query, query))
    return run(q, k, v, start, end, *masks)


def attend_selected(
    q: Float[Array, "B T H D"],
    kv: Float[Array, "B S D"],
    topk_idx: Int[Array, "B T K"],
    scale: float,
    value_dim: int,
    implementation: str | None,
    deterministic: bool,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Run `sparse_mla` on every device's queries and heads."""

    def local(q: Array, kv: Array, topk_idx: Array) -> tuple[Array, Array]:
        return pallas_kernels.sparse_mla(
            q,
            kv,
            topk_idx,
            scale=scale,
            value_dim=value_dim,
            deterministic=deterministic,
            implementation=implementation,
        )

    query, key = fitted(q.shape, "batch", "sequence", "heads"), fitted(kv.shape, "batch", None)
    run = sharding.shard_map(local, (query, key, P(*query[:2])), (query, query))
    return run(q, kv, topk_idx)


def select_mask(
    index: IndexerTensors,
    topk: int,
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    implementation: str | None,
    *,
    square: bool = True,
) -> Array:
    """Run `indexer_topk_mask` on every device's rows; selection has no gradient."""
    op = pallas_kernels.indexer_topk_mask
    return _select(op, index, topk, (start, end), implementation, square)


def select_indices(
    index: IndexerTensors,
    topk: int,
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    implementation: str | None,
    *,
    square: bool = True,
) -> Int[Array, "B T K"]:
    """Run `indexer_topk` on every device's rows; selection has no gradient."""
    op = pallas_kernels.indexer_topk
    return _select(op, index, topk, (start, end), implementation, square)


def _select(
    op: Callable,
    index: IndexerTensors,
    topk: int,
    bounds: tuple[Array, Array],
    implementation: str | None,
    square: bool,
) -> Array:
    row, key = fitted(index.q.shape, "batch", "rows"), fitted(index.k.shape, "batch", None)
    causal = square and _whole(row)

    def local(q: Array, k: Array, w: Array, start: Array, end: Array) -> Array:
        return op(
            q, k, w, k=topk, start=start, end=end, causal=causal, implementation=implementation
        )

    run = sharding.shard_map(local, (row, key, row, row, row), row)
    return run(*jax.lax.stop_gradient(index), *bounds)


def range_kl(
    index: IndexerTensors,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S H D"],
    lse: Float[Array, "B T H"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    selected: Array | None,
    scale: float,
    implementation: str | None,
) -> Float[Array, "B T"]:
    """Run `indexer_kl` on every device's rows, with all heads."""
    row, key = fitted(q.shape, "batch", "rows"), fitted(k.shape, "batch", None)
    causal = _whole(row)

    def local(*arrays: Array) -> Array:
        *tensors, start, end = arrays[:8]
        mask = arrays[8] if len(arrays) > 8 else None
        return pallas_kernels.indexer_kl(
            *tensors,
            scale=scale,
            start=start,
            end=end,
            selected=mask,
            causal=causal,
            implementation=implementation,
        )

    masks = () if selected is None else (selected,)
    in_specs = (row, key, row, row, key, row, row, row) + (row,) * len(masks)
    return sharding.shard_map(local, in_specs, row)(*index, q, k, lse, start, end, *masks)


def selected_kl(
    index: IndexerTensors,
    q: Float[Array, "B T H D"],
    kv: Float[Array, "B S D"],
    lse: Float[Array, "B T H"],
    topk_idx: Int[Array, "B T K"],
    scale: float,
    implementation: str | None,
    deterministic: bool,
) -> Float[Array, "B T"]:
    """Run `sparse_indexer_kl` on every device's rows, with all heads."""

    def local(*arrays: Array) -> Array:
        return pallas_kernels.sparse_indexer_kl(
            *arrays, scale=scale, deterministic=deterministic, implementation=implementation
        )

    row, key = fitted(q.shape, "batch", "rows"), fitted(kv.shape, "batch", None)
    run = sharding.shard_map(local, (row, key, row, row, key, row, row), row)
    return run(*index, q, kv, lse, topk_idx)


def attend_cached(
    q: Float[Array, "B T H D"],
    layer: cache.LayerCache,
    rows: Int[Array, "B T K"],
    scale: float,
    implementation: str | None,
) -> Float[Array, "B T H C"]:
    """Run `paged_mla` on every device's heads; see `cache.is_cut`."""

    def local(q: Array, rows: Array, attended: cache.Parts | cache.Records) -> Array:
        out, _ = pallas_kernels.paged_mla(
            q, attended, rows, scale=scale, implementation=implementation
        )
        return out

    if cache.is_cut():
        implementation = "reference"
        return local(q, rows, layer.attended)
    heads = spec(None, None, "heads")
    in_specs = (heads, REPLICATED, REPLICATED)
    return sharding.shard_map(local, in_specs, heads)(q, rows, layer.attended)


def select_cached(
    index: IndexerTensors,
    layer: cache.LayerCache,
    view: cache.View,
    topk: int,
    implementation: str | None,
) -> Int[Array, "B T K"]:
    """Run `paged_indexer_topk` on every device alike; see `cache.is_cut`."""

    def local(q: Array, w: Array, table: Array, end: Array, k: Array, *k_scale: Array) -> Array:
        return pallas_kernels.paged_indexer_topk(
            q,
            k,
            w,
            table,
            k=topk,
            page_size=view.page_size,
            end=end,
            k_scale_NG=k_scale[0] if k_scale else None,
            implementation=implementation,
        )

    scales = () if layer.index_scale is None else (layer.index_scale,)
    arrays = (index.q, index.w, view.table, view.end, layer.index, *scales)
    if cache.is_cut():
        implementation = "reference"
        return local(*arrays)
    return sharding.shard_map(local, (REPLICATED,) * len(arrays), REPLICATED)(*arrays)
