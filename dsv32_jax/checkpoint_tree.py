"""A train state as plain nested dicts of arrays: a checkpoint knows no Flax or Optax type."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import tree_util

# Stored dtypes that become a wanted one without loss: a converted checkpoint may hold them.
WIDENED = {"float32": ("bfloat16", "float8_e4m3fn")}


def to_nested_dict(tree: Any) -> dict[str, Any]:
    """Turn any pytree of arrays into nested dicts with text keys.

    A dict's keys, a named tuple's and a module's fields, and a list's positions all become keys;
    parts without arrays (such as Optax's empty states) disappear.

    Args:
      tree: a pytree whose leaves have a shape and a dtype.

    Returns:
      Nested dicts with the same leaves.

    Raises:
      ValueError: a leaf is no array (named), two leaves have one path, or there is no leaf.
    """
    nested: dict[str, Any] = {}
    leaves, _ = tree_util.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError("the state must hold at least one array")
    seen: set[str] = set()
    for keys, leaf in leaves:
        path = tuple(_key_text(key) for key in keys)
        if not path or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"state {'.'.join(path)} is a {type(leaf).__name__}; must be an array")
        if ".".join(path) in seen:
            raise ValueError(f"two arrays of the state are named {'.'.join(path)}")
        seen.add(".".join(path))
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return nested


def from_nested_dict(nested: Mapping[str, Any], like: Any) -> Any:
    """Put the leaves of nested dicts back into a pytree's own structure.

    Args:
      nested: what `to_nested_dict` gave for a tree of this structure.
      like: the tree whose structure is wanted.

    Returns:
      A tree of the structure of `like` with the leaves of `nested`.
    """
    leaves, structure = tree_util.tree_flatten_with_path(like)
    found = []
    for keys, _ in leaves:
        node: Any = nested
        for key in keys:
            node = node[_key_text(key)]
        found.append(node)
    return tree_util.tree_unflatten(structure, found)


def abstract_of(nested: Any) -> Any:
    """Describe each leaf by shape, dtype and sharding, ready to restore into.

    Args:
      nested: a tree of arrays or `jax.ShapeDtypeStruct`.

    Returns:
      The same tree of `jax.ShapeDtypeStruct`; a leaf without a sharding is put on the first device.
    """
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or first_device
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, nested)


def find_mismatch(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, partial: bool) -> str:
    """Name the first tensor in which a checkpoint and a wanted state differ.

    Args:
      saved: nested dicts of what the checkpoint holds; leaves have a shape and a dtype.
      wanted: nested dicts of what is asked for.
      partial: allow the checkpoint to hold more than is asked for, and in a narrower dtype that widens without loss.

    Returns:
      One line with both shapes, or an empty text where all agree.
    """
    have, want = _described(saved), _described(wanted)
    for name in [*want, *have]:
        if name not in have:
            return f"{name} is {want[name]} here and not in the checkpoint"
        if name not in want:
            if not partial:
                return f"{name} is {have[name]} in the checkpoint and not in the state here"
        elif have[name] != want[name] and not (partial and _widens(have[name], want[name])):
            return f"{name} is {have[name]} in the checkpoint and {want[name]} here"
    return ""


def _widens(have: str, want: str) -> bool:
    """Tell whether a stored array, described as in messages, can be read into a wanted one."""
    (stored, _, had), (asked, _, shape) = have.partition("["), want.partition("[")
    return had == shape and stored in WIDENED.get(asked, ())


def _described(nested: Mapping[str, Any]) -> dict[str, str]:
    described = {}
    for keys, leaf in tree_util.tree_flatten_with_path(nested)[0]:
        name = ".".join(_key_text(key) for key in keys)
        # A random key is stored as the integers that it is made of.
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        described[name] = f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    return described


def _key_text(key: Any) -> str:
    match key:
        case tree_util.DictKey(key=name) | tree_util.FlattenedIndexKey(key=name):
            return str(name)
        case tree_util.SequenceKey(idx=index):
            return str(index)
        case tree_util.GetAttrKey(name=name):
            return name
    raise ValueError(f"a state can not be saved by a path through {key!r}")
