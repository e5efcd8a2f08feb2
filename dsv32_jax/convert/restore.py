"""Restore parameters that are stored as FP8 with scales: each device's shard is read and dequantised by itself."""

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from dsv32_jax.convert import fp8_blocks, slots, storage, target
from dsv32_jax.convert.orbax_arrays import ArrayTree, Keys

Index = tuple[slice, ...]


def is_quantised(saved: Mapping[str, Any]) -> bool:
    """Tell whether a saved tree holds FP8 weights.

    Args:
        saved: Nested dicts of what a checkpoint holds.

    Returns:
        True for FP8 weights with scales beside them.
    """
    return target.SCALES in saved


def restore(folder: str | os.PathLike, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays of a tree with FP8 weights.

    Args:
        folder: The tree's folder.
        wanted: Nested dicts of `jax.ShapeDtypeStruct` with shardings; each must be in the tree.

    Returns:
        The same dicts of arrays; FP8 weights times their scales.
    """
    tree = ArrayTree(storage.as_path(folder))

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        keys = tuple(str(key.key) for key in path)

        def shard(index: Index | None) -> np.ndarray:
            whole = index if index is not None else (slice(None),) * len(leaf.shape)
            return _read(tree, keys, whole, np.dtype(leaf.dtype))

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.tree_util.tree_map_with_path(read, dict(wanted))


def _read(tree: ArrayTree, keys: Keys, index: Index, dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Read a slice of an array in the wanted dtype."""
    shape = tree.shape(keys)
    index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
    if tree.dtype(keys) != fp8_blocks.E4M3:
        return tree.read(keys, index).astype(dtype, copy=False)
    scales = (target.SCALES, keys[-1])
    n_stack = len(tree.shape(scales)) - 2
    out = np.empty([s.stop - s.start for s in index], dtype)
    stack = [range(s.start, s.stop) for s in index[:n_stack]]
    everything = (slice(None), slice(None))
    for at in itertools.product(*stack):  # one layer's expert at a time, to bound the memory
        here = tuple(slice(i, i + 1) for i in at)
        own_scales = tree.read(scales, (*here, *everything)).reshape(tree.shape(scales)[-2:])
        values = tree.read(keys, (*here, *index[n_stack:]))
        place = tuple(i - s.start for i, s in zip(at, index, strict=False))
        values = values.reshape(out[place].shape)
        out[place] = _dequantise(values, own_scales, keys[-1], shape[n_stack:], index[n_stack:])
    return out


def _dequantise(
    values: Shaped[np.ndarray, "..."],
    scales: Float[np.ndarray, "o i"],
    path: str,
    own: tuple[int, ...],
    index: Index,
) -> Float[np.ndarray, "..."]:
    """Multiply any slice of a parameter by its official block scales."""
    n_in_axes = slots.input_axes(path, own)
    in_rows = _flat_positions(own[:n_in_axes], index[:n_in_axes])
    out_rows = _flat_positions(own[n_in_axes:], index[n_in_axes:])
    product = fp8_blocks.values_of(values).reshape(len(in_rows), len(out_rows))
    by_column = scales[out_rows // fp8_blocks.BLOCK]
    for block in np.unique(in_rows // fp8_blocks.BLOCK):
        product[in_rows // fp8_blocks.BLOCK == block] *= by_column[:, block]
    return product.reshape(values.shape)


def _flat_positions(shape: tuple[int, ...], index: Index) -> np.ndarray:
    """Return the positions of a slice's entries among all entries of a flattened shape."""
    return np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1)
