"""An official folder's tensors, found in its files and checked against the model before anything is converted."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent import futures
from pathlib import PurePosixPath
from typing import NamedTuple

from etils import epath

from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import safetensors_io
from dsv32_jax.convert.names import PROJECTIONS
from dsv32_jax.convert.safetensors_io import Entry
from dsv32_jax.convert.slots import SCALE_SUFFIX, Slot

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_THREADS = 16
MTP_NAME = (
    "eh_proj.weight"  # of the MTP layer alone; a main layer beyond the config's count has none
)


class Found(NamedTuple):
    """Where an official tensor is.

    Attributes:
        weight: The tensor.
        scale: Its block scales, maybe in another file; None unless the tensor is FP8.
    """

    weight: Entry
    scale: Entry | None


def locate(folder: epath.Path) -> dict[str, epath.Path]:
    """Map every tensor's name to its file, by the index or from the single file.

    Args:
        folder: Holds safetensors files.

    Returns:
        Files by tensor.

    Raises:
        FileNotFoundError: If there is neither an index nor a single file, or a file of the index is missing.
        ValueError: If the index or the single file is malformed.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        located = {name: folder / file for name, file in _read_index(index).items()}
        missing = sorted({path.name for path in set(located.values()) if not path.is_file()})
        if missing:
            raise FileNotFoundError(
                f"{folder}: {INDEX_FILE} names files that are missing: {missing[:3]}"
            )
        return located
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise FileNotFoundError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")
    return dict.fromkeys(safetensors_io.read_header(single), single)


def check_counts(folder: epath.Path, cfg: ModelConfig) -> None:
    """Refuse more layers and experts than the files can hold, before they are listed.

    Args:
        folder: An official folder.
        cfg: The model.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there are fewer tensors than layers and their experts' matrices.
    """
    held = len(locate(folder))
    if cfg.n_layers + cfg.n_moe_layers * cfg.moe.n_experts * len(PROJECTIONS) > held:
        raise ValueError(
            f"{folder} holds {held} tensors, too few for config.json's num_hidden_layers={cfg.n_layers} and "
            f"n_routed_experts={cfg.moe.n_experts}"
        )


def _read_index(path: epath.Path) -> dict[str, str]:
    """Return the file of every tensor."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        whole = all(isinstance(file, str) for file in weight_map.values())
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path} must hold a weight_map of names to files")
    for file in sorted(set(weight_map.values())):
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{path} names {file!r}, which is outside its folder")
    return weight_map


def find_tensors(
    folder: epath.Path, table: Mapping[str, Slot], cfg: ModelConfig, *, optional: Iterable[str] = ()
) -> dict[str, Found]:
    """Find the model's tensors and check names, files, dtypes and shapes, reading headers only.

    Args:
        folder: An official folder.
        table: The model's tensors.
        cfg: The model; tensors of an MTP layer that it does not have are passed over.
        optional: Names that need not be there.

    Returns:
        What was found, by name, in the table's order.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a tensor or a scale is missing, unknown, or of another shape or dtype; names tensor and file.
    """
    files = locate(folder)
    entries = _read_entries(files)
    optional = set(optional)
    missing = sorted(set(table) - set(files) - optional)
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model, first {missing[0]}")
    found = {name: _find(folder, table[name], entries) for name in table if name in entries}
    used = set(found) | {f.scale.name for f in found.values() if f.scale is not None}
    unknown = sorted(set(files) - used - _passed_over(files, cfg))
    if unknown:
        raise ValueError(
            f"{folder} has {len(unknown)} tensors the model does not know, first {unknown[0]} "
            f"in {files[unknown[0]].name}"
        )
    return found


def _read_entries(files: Mapping[str, epath.Path]) -> dict[str, Entry]:
    """Read all headers and check that the index and they agree."""
    names = defaultdict(list)
    for name, path in files.items():
        names[path].append(name)
    with futures.ThreadPoolExecutor(HEADER_THREADS) as pool:
        headers = pool.map(safetensors_io.read_header, names)
        entries = {}
        for path, header in zip(names, headers, strict=True):
            for name in names[path]:
                if name not in header:
                    raise ValueError(f"{path.name} does not hold {name}, though the index says so")
                entries[name] = header[name]
            extra = sorted(header.keys() - names[path])
            if extra:
                raise ValueError(f"{path} holds {extra[0]}, which the index does not place there")
    return entries


def _find(folder: epath.Path, slot: Slot, entries: Mapping[str, Entry]) -> Found:
    """Check one tensor and, for FP8, its scale."""
    entry = entries[slot.name]
    _check_shape(entry, slot.official)
    scale_name = slot.name + SCALE_SUFFIX
    scale = entries.get(scale_name)
    if entry.dtype != "F8_E4M3":
        if scale is not None:
            raise ValueError(
                f"{scale.file}: {scale_name} is there, but {slot.name} is {entry.dtype}"
            )
        return Found(entry, None)
    if not slot.quantised:
        raise ValueError(f"{entry.file}: {slot.name} is F8_E4M3; this tensor is never quantised")
    if scale is None:
        raise ValueError(f"{folder} lacks {scale_name}, the scale of {slot.name} in {entry.file}")
    if scale.dtype != "F32":
        raise ValueError(f"{scale.file}: {scale_name} is {scale.dtype} instead of F32")
    _check_shape(scale, slot.scale_shape[-2:])
    return Found(entry, scale)


def _check_shape(entry: Entry, want: tuple[int, ...]) -> None:
    if entry.shape != want:
        raise ValueError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the config asks for {list(want)}"
        )


def _passed_over(files: Collection[str], cfg: ModelConfig) -> set[str]:
    """Return the tensors of an MTP layer that the config does not declare."""
    prefix = f"model.layers.{cfg.n_layers}."
    if cfg.mtp or prefix + MTP_NAME not in files:
        return set()
    return {name for name in files if name.startswith(prefix)}
