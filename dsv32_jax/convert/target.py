"""The folder that from-hf makes: like a training run at step 0, so that everything that reads a run reads it.

`config.json` {"model", "source"}; `checkpoints/0/` with an Orbax tree in `state/`, `data_state/`, `meta/` and, last of
all, `manifest.json`, without which nothing takes the checkpoint for whole; `official/` with the files that came with
the weights; `conversion/plan.json` with what it was made from.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from etils import epath

from dsv32_jax import json_files, manifest, parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import fp8_blocks, orbax_arrays, source, storage
from dsv32_jax.convert.orbax_arrays import Keys
from dsv32_jax.convert.slots import WIDE, Slot, StoredDtype
from dsv32_jax.convert.source import Found
from dsv32_jax.convert.storage import Written

STEP = "checkpoints/0"
OFFICIAL = "official"
SCALES = "scales"
POWER_OF_TWO = "power_of_two_scales"  # in the notes kept with the checkpoint
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HANDLERS = "orbax.checkpoint._src.handlers"
ITEM_HANDLERS = {
    manifest.STATE: f"{HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "data_state": f"{HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
    "meta": f"{HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model's tensors are stored.

    Attributes:
        table: Official tensors by name.
        dtypes: Stored dtype by parameter.
    """

    table: Mapping[str, Slot]
    dtypes: Mapping[str, np.dtype]

    def files(self, name: str) -> dict[str, int]:
        """Return the sizes of the files that an official tensor fills, by name relative to the step's folder."""
        slot = self.table[name]
        if slot.place.copy:
            return {}
        dtype = self.dtypes[slot.place.path]
        n_bytes = int(np.prod(slot.chunks)) * dtype.itemsize
        files = {self.file(slot, part): n_bytes for part in range(slot.parts)}
        if dtype == fp8_blocks.E4M3:
            scale_bytes = int(np.prod(slot.scale_chunks)) * 4
            files |= {self.scale_file(slot, part): scale_bytes for part in range(slot.parts)}
        return files

    def file(self, slot: Slot, part: int) -> str:
        """Name the file of a part."""
        return f"{manifest.STATE}/{orbax_arrays.chunk_file(keys_of(slot.place.path), slot.index(part))}"

    def scale_file(self, slot: Slot, part: int) -> str:
        """Name the file of a part's scales."""
        keys = (SCALES, slot.place.path)
        return f"{manifest.STATE}/{orbax_arrays.chunk_file(keys, slot.scale_index(part))}"


def plan_layout(
    table: Mapping[str, Slot], found: Mapping[str, Found], dtype: StoredDtype
) -> Layout:
    """Decide how each parameter is stored.

    Vectors are float32. With "fp8", the matrices that official files never quantise keep their source's dtype, the
    widest one where their layers differ; new indexers are bf16 there.

    Args:
        table: The model's tensors.
        found: The source's tensors.
        dtype: What was asked for.

    Returns:
        The layout.
    """
    dtypes: dict[str, np.dtype] = {}
    for name, slot in table.items():
        path = slot.place.path
        if len(slot.own) == 1:
            dtypes[path] = WIDE["float32"]
        elif dtype != "fp8":
            dtypes[path] = WIDE[dtype]
        elif slot.quantised:
            dtypes[path] = fp8_blocks.E4M3
        elif name in found and found[name].weight.dtype == "F32" and not slot.place.copy:
            dtypes[path] = WIDE["float32"]
        else:
            dtypes.setdefault(path, WIDE["bf16"])
    return Layout(table=table, dtypes=dtypes)


def keys_of(path: str) -> Keys:
    """Return a parameter's path in the tree."""
    return ("parameters", parameters.group_of(path), path)


def frame(layout: Layout, meta: Mapping[str, Any]) -> dict[str, bytes]:
    """Return everything that the manifest lists but the arrays' chunks.

    Args:
        layout: How the tensors are stored.
        meta: Notes that are kept with the checkpoint.

    Returns:
        Content by name relative to the step's folder.
    """
    shapes: dict[Keys, tuple[int, ...]] = {}
    files = {}
    for slot in layout.table.values():
        path = slot.place.path
        keys, dtype = keys_of(path), layout.dtypes[path]
        if keys in shapes:
            continue
        shapes[keys] = slot.shape
        files[f"{manifest.STATE}/{orbax_arrays.array_folder(keys)}/.zarray"] = (
            orbax_arrays.zarr_metadata(slot.shape, slot.chunks, dtype)
        )
        if dtype == fp8_blocks.E4M3:
            keys = (SCALES, path)
            shapes[keys] = slot.scale_shape
            files[f"{manifest.STATE}/{orbax_arrays.array_folder(keys)}/.zarray"] = (
                orbax_arrays.zarr_metadata(slot.scale_shape, slot.scale_chunks, WIDE["float32"])
            )
    files[f"{manifest.STATE}/{orbax_arrays.TREE_METADATA}"] = orbax_arrays.tree_metadata(shapes)
    files["data_state/metadata"] = b"{}"
    files["meta/metadata"] = json.dumps(meta).encode()
    return files


def write_frame(folder: epath.Path, files: Mapping[str, bytes]) -> dict[str, Written]:
    """Write everything of the step but the arrays' chunks and the manifest.

    Args:
        folder: The step's folder.
        files: What `frame` returns.

    Returns:
        The files, by name relative to the folder.

    Raises:
        OSError: If the storage refuses.
    """
    written = {}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written[name] = storage.write_array(path, np.frombuffer(content, np.uint8))
    # Orbax adds this file after the manifest in a run's checkpoints, so it is not in the list here either.
    note = {"item_handlers": ITEM_HANDLERS, "metrics": {}, "custom_metadata": {}}
    storage.write(folder / manifest.ORBAX_METADATA, json.dumps(note).encode())
    return written


def write_config(target: epath.Path, cfg: ModelConfig, note: Mapping[str, Any]) -> None:
    """Write the config.json of a run.

    Args:
        target: The converted folder.
        cfg: The model.
        note: Where the weights are from.
    """
    content = {"model": asdict(cfg), "source": dict(note)}
    storage.write(target / "config.json", (json.dumps(content, indent=2) + "\n").encode())


def write_manifest(folder: epath.Path, files: Mapping[str, Written]) -> None:
    """Write Orbax's marks, without which it reads nothing from a bucket, and the list of files that makes a step whole.

    Args:
        folder: The step's folder.
        files: All its files.
    """
    for marked in (folder, *(folder / item for item in ITEM_HANDLERS)):
        storage.write(marked / manifest.ORBAX_COMMIT, b"")
    content = {"metric": None, "files": {name: files[name]._asdict() for name in sorted(files)}}
    storage.write(folder / manifest.MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder: epath.Path) -> dict[str, Written]:
    """Read the list of files that makes the checkpoint whole; it may lie in a bucket.

    Args:
        folder: The step's folder.

    Returns:
        All its files.

    Raises:
        ValueError: If it is damaged.
    """
    path = folder / manifest.MANIFEST
    raw = json_files.read_object(path)
    try:
        files = {name: Written(e["bytes"], e["crc32"]) for name, e in raw["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged") from error
    return files


def carry(folder: epath.Path, target: epath.Path, names: Iterable[str]) -> None:
    """Copy the files that come with the weights.

    Args:
        folder: Where they are.
        target: Where they go.
        names: Which, relative to the folder.
    """
    for name in names:
        storage.copy(folder / name, target / name)


def find_uncarried(folder: epath.Path, target: epath.Path, names: Iterable[str]) -> str | None:
    """Compare the sizes of the files that came with the weights with their source's.

    Args:
        folder: Where they were.
        target: Where they went.
        names: Which, relative to the folder.

    Returns:
        What is wrong with the first bad file, or None.
    """
    for name in names:
        path = target / name
        if not path.is_file():
            return f"{path} is missing"
        size, want = path.stat().length, (folder / name).stat().length
        if size != want:
            return f"{path} has {size} bytes instead of {want}"
    return None


def carried_files(folder: epath.Path) -> list[str]:
    """List the files of an official folder that are no weights: tokenizer, generation settings, encoding."""
    names = storage.file_names(folder)
    return [n for n in names if not n.endswith(WEIGHT_ENDINGS) and n != source.INDEX_FILE]
