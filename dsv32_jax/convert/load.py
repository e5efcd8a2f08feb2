"""Read an official-layout checkpoint of float32 or bfloat16 safetensors straight into a model."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from dsv32_jax.config import ModelConfig
from dsv32_jax.convert.hf_config import read_config
from dsv32_jax.convert.names import LAYER_NAME, Place, places
from dsv32_jax.model import DeepSeekV32, abstract_model

READABLE_DTYPES = ("F32", "BF16")
INDEX_FILE = "model.safetensors.index.json"


def load_official(folder: Path, cfg: ModelConfig | None = None) -> DeepSeekV32:
    """Load a checkpoint in the official layout, in host memory: meant for small ones and checks.

    Args:
        folder: Holds config.json and safetensors files, with their index where there are several.
        cfg: Overrides the folder's own config, to change what does not alter the parameters (dtype, FP8 options).

    Returns:
        The model, float32 parameters. An MTP layer in the files is loaded if the config declares it, else skipped.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a tensor is missing, unknown, of the wrong shape or in FP8, or a file cannot be read.
    """
    cfg = cfg or read_config(folder)
    graph, state = nnx.split(abstract_model(cfg))
    pure = nnx.to_pure_dict(state)
    table = places(cfg)
    files = _locate(folder)
    _check_names(folder, table, set(files), cfg)
    arrays = {
        place.path: np.empty(_leaf(pure, place.path).shape, np.float32) for place in table.values()
    }
    by_file = defaultdict(list)
    for name in table:
        by_file[files[name]].append(name)
    copies = []
    for path, name, tensor in _read(by_file):
        place = table[name]
        target = arrays[place.path][place.indices]
        value = tensor if place.path == "embed" else tensor.T
        want = _official_shape(place, target)
        if list(tensor.shape) != want:
            raise ValueError(
                f"{path.name}: {name} has shape {list(tensor.shape)}, the config asks for {want}"
            )
        if place.copy:
            copies.append((name, place, value))
        else:
            arrays[place.path][place.indices] = value.reshape(target.shape)
    for name, place, value in copies:
        if not np.array_equal(arrays[place.path], value):
            raise ValueError(
                f"{name} differs from the main model's {place.path}, which it must repeat"
            )
    for dotted, array in arrays.items():
        _set_leaf(pure, dotted, jnp.asarray(array))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state)


def _official_shape(place: Place, target: np.ndarray) -> list[int]:
    """Return the [out, in] shape an official tensor of this parameter has."""
    if place.path == "embed" or target.ndim == 1:
        return list(target.shape)
    n_in = int(np.prod(target.shape[:-1])) if place.path.endswith("attn.wo") else target.shape[0]
    return [target.size // n_in, n_in]


def _locate(folder: Path) -> dict[str, Path]:
    """Map every tensor name to its file, by the index or from the single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        located = {name: folder / file for name, file in _read_index(index).items()}
        missing = sorted({path.name for path in located.values() if not path.is_file()})
        if missing:
            raise FileNotFoundError(
                f"{folder}: {INDEX_FILE} names files that are missing: {missing[:3]}"
            )
        return located
    single = folder / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{folder} has neither {INDEX_FILE} nor model.safetensors")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of every tensor."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        whole = all(isinstance(file, str) for file in weight_map.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path} must hold a weight_map of names to files")
    return weight_map


def _check_names(folder: Path, table: dict[str, Place], names: set[str], cfg: ModelConfig) -> None:
    """Compare the files' tensors with the model's; tensors of an undeclared MTP layer may be there."""
    missing = sorted(table.keys() - names)
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model, first {missing[0]}")

    def beyond(name: str) -> bool:
        match = LAYER_NAME.match(name)
        return not cfg.mtp and match is not None and int(match[1]) >= cfg.n_layers

    unknown = sorted(name for name in names - table.keys() if not beyond(name))
    if any(name.endswith("weight_scale_inv") for name in unknown):
        raise ValueError(
            f"{folder} is an FP8 checkpoint; only float32 and bfloat16 ones can be read directly"
        )
    if unknown:
        raise ValueError(
            f"{folder} has {len(unknown)} tensors the model does not know, first {unknown[0]}"
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="flax")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _read(by_file: dict[Path, list[str]]) -> Iterator[tuple[Path, str, np.ndarray]]:
    """Yield every tensor as float32, file by file."""
    for path, names in sorted(by_file.items()):
        with _open(path) as file:
            held = set(file.keys())
            for name in names:
                if name not in held:
                    raise ValueError(f"{path.name} does not hold {name}, though the index says so")
                dtype = file.get_slice(name).get_dtype()
                if dtype not in READABLE_DTYPES:
                    raise ValueError(
                        f"{path.name}: {name} is {dtype}; only {READABLE_DTYPES} can be read"
                    )
                yield path, name, np.asarray(file.get_tensor(name)).astype(np.float32)


def _leaf(tree: dict, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree[key]
    return tree


def _set_leaf(tree: dict, dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        tree = tree[key]
    tree[last] = value
