"""Convert a training run or a converted folder to official files, part by part in bounded memory.

A converted folder's parts are its chunks. A run's arrays are read through TensorStore, which decodes a whole chunk for
each part of it: one device's shard as it was saved; the two last ones stay in memory.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dsv32_jax import errors, manifest, parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import (
    fp8_blocks,
    hf_config,
    journal,
    lock,
    official_config,
    pool,
    run_folder,
    safetensors_io,
    source,
    storage,
    target,
    transfer,
)
from dsv32_jax.convert import slots as slot_table
from dsv32_jax.convert import workers as workers_lib
from dsv32_jax.convert.from_hf import Figures
from dsv32_jax.convert.names import LAYER_NAME
from dsv32_jax.convert.orbax_arrays import ArrayTree
from dsv32_jax.convert.slots import SCALE_SUFFIX, WIDE, Slot, StoredDtype
from dsv32_jax.convert.storage import Written
from dsv32_jax.convert.workers import Items, Workers
from dsv32_jax.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

SHARD_GB = 4.0  # GiB; the released files are of about this size
METADATA_ENDINGS = (".zarray", "zarr.json", "metadata", "_METADATA")  # small, and read to plan
DTYPE_NAMES = {dtype: name for name, dtype in safetensors_io.DTYPES.items()}
DEFAULT_DTYPE: StoredDtype = "bf16"

Shape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to make of a checkpoint.

    Attributes:
        dtype: Of the matrices that official files quantise; None for what the checkpoint was converted from, or bf16.
        shard_gb: Largest file, in GiB; a larger tensor has a file of its own.
        official: An official folder whose config and other files go with the weights of a run; None for those that
            came with a converted checkpoint, if any.
    """

    dtype: StoredDtype | None = None
    shard_gb: float = SHARD_GB
    official: epath.Path | None = None


class Job(NamedTuple):
    """An export that has been checked and not begun.

    Attributes:
        run: The checkpoint.
        tree: Its arrays.
        target: The result.
        table: Official tensors by name.
        dtypes: Their official dtypes.
        shards: The tensors of each file.
        config: The content of config.json.
        carried: A folder and its files that go with the weights.
        identity: What makes the result.
    """

    run: run_folder.RunFolder
    tree: ArrayTree
    target: epath.Path
    table: Mapping[str, Slot]
    dtypes: Mapping[str, np.dtype]
    shards: Mapping[str, list[str]]
    config: dict[str, Any]
    carried: tuple[epath.Path, list[str]]
    identity: dict[str, Any]


def check(folder: epath.Path, result: epath.Path, options: Options) -> Job:
    """Read the config and the arrays' shapes and plan the export; nothing is written.

    Args:
        folder: A run's or converted folder, its checkpoints, or one step.
        result: The folder to make.
        options: How.

    Returns:
        What to do.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        WorkFailedError: If there is none that is whole.
        ValueError: If the folder is no run or an array does not fit the config.
    """
    run = run_folder.find(folder)
    files = target.read_manifest(run.step)
    for name in sorted(name for name in files if name.endswith(METADATA_ENDINGS)):
        _check_file(run, name, files[name])
    tree = ArrayTree(run.step / manifest.STATE)
    _check_arrays(run, tree)
    table = slot_table.slots(run.cfg)
    conversion = run.meta.get("conversion", {})
    dtype: StoredDtype = options.dtype or conversion.get("dtype", DEFAULT_DTYPE)
    keeps_fp8 = dtype == "fp8" and bool(tree.children((target.SCALES,)))
    dtypes = {n: _official_dtype(s, dtype, tree if keeps_fp8 else None) for n, s in table.items()}
    shards = _plan_shards(table, dtypes, round(options.shard_gb * 2**30))
    beside = options.official or run.folder / target.OFFICIAL
    has_beside = options.official is not None or (beside / "config.json").is_file()
    base = hf_config.read_raw(beside) if has_beside else None
    if base is not None:
        _check_base(base, beside, run.cfg)
    config = official_config.official_config(
        run.cfg,
        dtype,
        base,
        tokenizer=None if base else _tokenizer(run),
        keep_quantisation=keeps_fp8,
        power_of_two=not keeps_fp8 or run.meta.get(target.POWER_OF_TWO, False),
    )
    identity = {
        "checkpoint": hashlib.sha256(run.digest.encode()).hexdigest(),
        "dtype": dtype,
        "shard_gb": options.shard_gb,
        "config": config,
    }
    names = [n for n in target.carried_files(beside) if n != "config.json"] if has_beside else []
    return Job(run, tree, result, table, dtypes, shards, config, (beside, names), identity)


def _tokenizer(run: run_folder.RunFolder) -> Tokenizer | None:
    """Load the tokenizer that a run was trained with, if it is still there."""
    if run.tokenizer is None:
        return None
    try:
        return load_tokenizer(run.tokenizer)
    except FileNotFoundError as error:
        logger.warning("config.json will not say which token ends a text: %s", error)
        return None


def _check_base(base: dict[str, Any], beside: epath.Path, cfg: ModelConfig) -> None:
    """Refuse another model's config beside these weights."""
    if base.get("model_type") == hf_config.V3:
        raise ValueError(f"{beside} is of model_type {hf_config.V3}, which has no indexers")
    theirs = parameters.abstract(hf_config.parse_named(base, beside))
    if theirs != parameters.abstract(cfg):
        raise ValueError(f"{beside / 'config.json'} is of a model of other sizes than the weights")


def _check_arrays(run: run_folder.RunFolder, tree: ArrayTree) -> None:
    """Compare the checkpoint's arrays with the config's, before layers and experts are listed."""
    wanted = {path: x.shape for group in parameters.abstract(run.cfg) for path, x in group.items()}
    for path, shape in wanted.items():
        keys = target.keys_of(path)
        if keys not in tree.names:
            raise ValueError(f"checkpoint {run.step} has no {path}")
        if tree.shape(keys) != shape:
            raise ValueError(
                f"checkpoint {run.step}: {path} has shape {list(tree.shape(keys))}, "
                f"the config asks for {list(shape)}"
            )
        if tree.dtype(keys) == fp8_blocks.E4M3 and (target.SCALES, path) not in tree.names:
            raise ValueError(f"checkpoint {run.step}: {path} is FP8 and has no scales")


def _official_dtype(slot: Slot, dtype: StoredDtype, kept: ArrayTree | None) -> np.dtype:
    """Return a tensor's dtype in the files.

    Args:
        slot: The tensor.
        dtype: Of the export.
        kept: The checkpoint, if it holds what the official files held, to the bit.
    """
    if len(slot.own) == 1 or dtype == "float32":
        return WIDE["float32"]
    if dtype == "fp8" and slot.quantised:
        return fp8_blocks.E4M3
    return WIDE["bf16"] if kept is None else kept.dtype(target.keys_of(slot.place.path))


def _tensors(slot: Slot, dtype: np.dtype) -> dict[str, Shape]:
    """Return the header's entries of a tensor and, for FP8, its scales."""
    entries: dict[str, Shape] = {slot.name: (DTYPE_NAMES[dtype], slot.official)}
    if dtype == fp8_blocks.E4M3:
        entries[slot.name + SCALE_SUFFIX] = ("F32", slot.scale_shape[-2:])
    return entries


def _size(slot: Slot, dtype: np.dtype) -> int:
    entries = _tensors(slot, dtype).values()
    return sum(math.prod(shape) * safetensors_io.DTYPES[name].itemsize for name, shape in entries)


def _plan_shards(
    table: Mapping[str, Slot], dtypes: Mapping[str, np.dtype], limit: int
) -> dict[str, list[str]]:
    """Deal the tensors out to files, layer by layer; a parameter's experts follow each other, as they are stored."""

    def order(name: str) -> tuple[int, str]:
        match = LAYER_NAME.match(name)
        layer = int(match[1]) if match else -1 if name.startswith("model.embed") else 1 << 30
        return (layer, table[name].place.path if match else name)

    groups: list[list[str]] = [[]]
    held = 0
    for name in sorted(table, key=order):
        size = _size(table[name], dtypes[name])
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return {
        f"model-{number:05d}-of-{len(groups):06d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def convert(job: Job, workers: Workers) -> Figures:
    """Do this process's share of the export; the first process also finishes it when all shares are done.

    Args:
        job: What to do.
        workers: This process and its threads.

    Returns:
        Figures; `resumed` counts files here.

    Raises:
        UsageError: If the target holds something else, or another conversion is at work in it.
        WorkFailedError: If a value is not allowed, the disk is full, or what was written cannot be read back.
        OSError: If the storage fails.
    """
    notes = journal.Journal(job.target, flush_seconds=workers.flush_seconds)
    items = _items(job)
    if not notes.has_begun() and (job.target / source.INDEX_FILE).is_file():
        _check_finished(job)
        return Figures(len(job.table), sum(items.sizes.values()), 0.0, len(items.sizes))
    with lock.held(job.target, workers):
        return _convert(job, items, notes, workers)


def _convert(job: Job, items: Items, notes: journal.Journal, workers: Workers) -> Figures:
    begun = time.monotonic()
    if not workers.is_first:
        workers_lib.wait_for(notes.has_begun)
    else:
        _check_content(job, workers.threads)
    notes.begin(job.identity)
    workers_lib.check_space(items, notes.finished()[0])
    resumed = workers_lib.do_share(items, notes, workers)
    if workers.is_first:
        workers_lib.collect(items, notes)
        _finish(job)
        notes.remove()
    else:
        workers_lib.wait_for(lambda: not notes.has_begun())
    size = sum(items.sizes.values())
    return Figures(len(job.table), size, time.monotonic() - begun, resumed)


def _check_content(job: Job, threads: int) -> None:
    """Read the whole checkpoint and compare its checksums with the manifest, where that has them."""
    files = target.read_manifest(job.run.step)
    progress = pool.Progress("checking", storage.sizes(files))

    def check(name: str) -> None:
        _check_file(job.run, name, files[name])
        progress.add(files[name].bytes)

    try:
        pool.run_all(check, list(files), threads=threads)
    finally:
        progress.close()


def _check_file(run: run_folder.RunFolder, name: str, want: Written) -> None:
    damage = storage.find_damage(run.step, name, want)
    if damage is not None:
        raise errors.WorkFailedError(f"checkpoint {run.step} is damaged: {damage}")


def _items(job: Job) -> Items:
    sizes = {}
    for file, names in job.shards.items():
        header = len(safetensors_io.header_bytes(_header(job, file)))
        sizes[file] = header + sum(_size(job.table[n], job.dtypes[n]) for n in names)
    return Items(
        folder=job.target,
        sizes=sizes,
        files=lambda file: {file: sizes[file]},
        make=lambda file: {file: _write_shard(job, file)},
    )


def _header(job: Job, file: str) -> dict[str, Shape]:
    entries: dict[str, Shape] = {}
    for name in job.shards[file]:
        entries |= _tensors(job.table[name], job.dtypes[name])
    return entries


def _write_shard(job: Job, file: str) -> Written:
    path = job.target / file
    try:
        return safetensors_io.write_file(path, _header(job, file), _content(job, file))
    except OSError as error:
        raise errors.WorkFailedError(
            f"{path} could not be written: {storage.reason(error)}"
        ) from error


def _content(job: Job, file: str) -> Iterator[np.ndarray]:
    """Yield a file's tensors part by part, each weight followed by its scales."""
    for name in job.shards[file]:
        slot, dtype = job.table[name], job.dtypes[name]
        keys, made = target.keys_of(slot.place.path), []
        is_fp8 = job.tree.dtype(keys) == fp8_blocks.E4M3
        for part in range(slot.parts):
            scales = None
            if is_fp8:
                chunk = job.tree.read((target.SCALES, slot.place.path), slot.scale_slices(part))
                scales = chunk.reshape(slot.scale_chunks[-2:])
            chunk = job.tree.read(keys, slot.slices(part))
            rows, out_scales = transfer.write_part(slot, chunk, scales, dtype)
            yield rows
            if out_scales is not None:
                made.append(out_scales)
        if made:
            yield np.concatenate(made)


def _index(job: Job) -> dict[str, Any]:
    weight_map = {name: file for file in job.shards for name in _header(job, file)}
    size = sum(_size(job.table[name], job.dtypes[name]) for name in job.table)
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}


def _finish(job: Job) -> None:
    """When all files are written and verified, add what makes the folder loadable."""
    storage.remove_partials(job.target)
    folder, names = job.carried
    target.carry(folder, job.target, names)
    if not storage.is_remote(job.target):
        os.sync()
    index = json.dumps(_index(job), indent=2) + "\n"
    config = json.dumps(job.config, indent=2) + "\n"
    storage.write(job.target / source.INDEX_FILE, index.encode())
    storage.write(job.target / "config.json", config.encode())


def _check_finished(job: Job) -> None:
    """Check a result that is there already by its headers."""
    try:
        whole = json.loads((job.target / source.INDEX_FILE).read_text()) == _index(job)
        whole &= hf_config.read_raw(job.target) == job.config
        source.find_tensors(job.target, job.table, job.run.cfg)
        if damage := target.find_uncarried(job.carried[0], job.target, job.carried[1]):
            raise ValueError(damage)
    except (ValueError, OSError) as error:
        raise errors.WorkFailedError(
            f"{job.target} holds a damaged export: {error}; remove it to convert again"
        ) from error
    if not whole:
        raise errors.UsageError(f"{job.target} holds an export of another checkpoint or options")
