"""Convert an official folder to a sharded Orbax checkpoint, tensor by tensor in bounded memory."""

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dsv32_jax import errors, json_files, manifest
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import (
    hf_config,
    journal,
    lock,
    new_indexer,
    source,
    storage,
    target,
    transfer,
)
from dsv32_jax.convert import slots as slot_table
from dsv32_jax.convert import workers as workers_lib
from dsv32_jax.convert.run_folder import CONFIG
from dsv32_jax.convert.slots import Slot, StoredDtype
from dsv32_jax.convert.source import Found
from dsv32_jax.convert.storage import Written
from dsv32_jax.convert.target import Layout
from dsv32_jax.convert.workers import Items, Workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to make of a source.

    Attributes:
        dtype: What is stored; None for what the source has.
        index_heads: Indexer heads that a model without indexers gets.
        index_head_dim: Their width.
        index_topk: Keys that they select.
        seed: Of new indexers' draw.
    """

    dtype: StoredDtype | None = None
    index_heads: int = 64  # the released model's
    index_head_dim: int = 128
    index_topk: int = 2048
    seed: int = 0


class Job(NamedTuple):
    """A conversion that has been checked and not begun.

    Attributes:
        source: The official folder.
        target: The result.
        options: How.
        raw: The official config, with indexers.
        cfg: The model.
        found: The source's tensors.
        layout: How they are stored.
        identity: What makes the result.
        power_of_two: Whether scales must be powers of two.
    """

    source: epath.Path
    target: epath.Path
    options: Options
    raw: dict[str, Any]
    cfg: ModelConfig
    found: Mapping[str, Found]
    layout: Layout
    identity: dict[str, Any]
    power_of_two: bool

    @property
    def step(self) -> epath.Path:
        """The folder of the checkpoint."""
        return self.target / target.STEP


class Figures(NamedTuple):
    """What a conversion did.

    Attributes:
        tensors: How many there are.
        bytes: Written, over all processes.
        seconds: It took now.
        resumed: Tensors that were done before.
    """

    tensors: int
    bytes: int
    seconds: float
    resumed: int


def check(folder: epath.Path, result: epath.Path, options: Options) -> Job:
    """Read the config and all headers and plan the conversion; nothing is written.

    Args:
        folder: The official folder.
        result: The folder to make.
        options: How.

    Returns:
        What to do.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the folder holds no such model, or not all of it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    raw = hf_config.read_raw(folder)
    has_indexer = raw.get("model_type") != hf_config.V3
    if not has_indexer:
        raw = hf_config.add_indexer(
            raw,
            n_heads=options.index_heads,
            head_dim=options.index_head_dim,
            topk=options.index_topk,
        )
    cfg = hf_config.parse_named(raw, folder)
    scale_format = hf_config.scale_format(raw)
    source.check_counts(folder, cfg)
    table = slot_table.slots(cfg)
    optional = [] if has_indexer else [name for name in table if new_indexer.is_indexer(name)]
    found = source.find_tensors(folder, table, cfg, optional=optional)
    dtype = options.dtype or _source_dtype(found, table)
    layout = target.plan_layout(table, found, dtype)
    identity = {"source": _digest(found), "config": raw, "tensors": len(found), "dtype": dtype}
    if len(found) < len(table):
        identity["seed"] = options.seed
    return Job(folder, result, options, raw, cfg, found, layout, identity, scale_format == "ue8m0")


def _source_dtype(found: Mapping[str, Found], table: Mapping[str, Slot]) -> StoredDtype:
    """Return the narrowest dtype of the matrices that official files quantise."""
    held = {found[name].weight.dtype for name in found if table[name].quantised}
    names: dict[str, StoredDtype] = {"F8_E4M3": "fp8", "BF16": "bf16"}
    return next((names[d] for d in names if d in held), "float32")


def _digest(found: Mapping[str, Found]) -> str:
    """Identify the source by its files' names, sizes, times and what the headers say."""
    digest = hashlib.sha256()
    entries = [e for f in found.values() for e in f if e is not None]
    for path in sorted({entry.file for entry in entries}):
        stat = path.stat()
        digest.update(f"{path.name} {stat.length} {stat.mtime}\n".encode())
    for e in entries:
        digest.update(f"{e.name} {e.file.name} {e.dtype} {e.shape} {e.offset}\n".encode())
    return digest.hexdigest()


def rounding(job: Job) -> str | None:
    """Say what a conversion loses.

    Args:
        job: A conversion.

    Returns:
        A sentence, or None where every weight is kept exactly.
    """
    dtype = job.identity["dtype"]
    held = {f.weight.dtype for n, f in job.found.items() if job.layout.table[n].quantised}
    if dtype == "fp8" and held - {"F8_E4M3"}:
        return "weights are rounded to FP8, with power-of-two scales"
    if dtype == "bf16" and "F32" in held:
        return "float32 weights are rounded to bf16"
    if dtype != "fp8" and "F8_E4M3" in held and not job.power_of_two:
        return f"FP8 weights times scales that need not be powers of two are rounded to {dtype}"
    return None


def convert(job: Job, workers: Workers) -> Figures:
    """Do this process's share of the conversion; the first process also finishes it when all shares are done.

    Args:
        job: What to do.
        workers: This process and its threads.

    Returns:
        Figures.

    Raises:
        UsageError: If the target holds something else, or another conversion is at work in it.
        WorkFailedError: If a value is not allowed, the disk is full, or what was written cannot be read back.
        OSError: If the storage fails.
    """
    notes = journal.Journal(job.target, flush_seconds=workers.flush_seconds)
    items = _items(job)
    if not workers.is_first:
        workers_lib.wait_for(notes.has_begun)
    if (job.step / manifest.MANIFEST).is_file():
        notes.begin(job.identity)
        _verify_finished(job, items, workers)
        return Figures(len(items.sizes), sum(items.sizes.values()), 0.0, len(items.sizes))
    with lock.held(job.target, workers):
        return _convert(job, items, notes, workers)


def _convert(job: Job, items: Items, notes: journal.Journal, workers: Workers) -> Figures:
    begun = time.monotonic()
    notes.begin(job.identity)
    workers_lib.check_space(items, notes.finished()[0])
    if workers.is_first:
        frame = _prepare(job)
    else:
        # The last of the files that hold no tensor.
        workers_lib.wait_for((job.step / manifest.ORBAX_METADATA).is_file)
    resumed = workers_lib.do_share(items, notes, workers)
    if workers.is_first:
        _finish(job, workers_lib.collect(items, notes) | frame)
        notes.clear()
    else:
        workers_lib.wait_for((job.step / manifest.MANIFEST).is_file)
    size = sum(items.sizes.values())
    return Figures(len(items.sizes), size, time.monotonic() - begun, resumed)


def _items(job: Job) -> Items:
    """List the tensors, in the order of the source's files."""

    def at(name: str) -> tuple[str, int]:
        found = job.found.get(name)
        return ("~", 0) if found is None else (found.weight.file.name, found.weight.offset)

    def size(name: str) -> int:  # of what is written, or read where it is only compared
        return sum(job.layout.files(name).values()) or job.found[name].weight.nbytes

    return Items(
        folder=job.step,
        sizes={name: size(name) for name in sorted(job.layout.table, key=at)},
        files=job.layout.files,
        make=lambda name: _convert_tensor(job, job.layout.table[name]),
    )


def _prepare(job: Job) -> dict[str, Written]:
    """Write what is no tensor: folders, metadata, the files that came with the weights."""
    target.carry(job.source, job.target / target.OFFICIAL, _carried(job))
    # With indexers where the source had none, so that the folder describes the weights.
    content = (json.dumps(job.raw, indent=2) + "\n").encode()
    (job.target / target.OFFICIAL).mkdir(parents=True, exist_ok=True)
    storage.write(job.target / target.OFFICIAL / CONFIG, content)
    note = {"folder": str(job.source), "dtype": job.identity["dtype"]}
    target.write_config(job.target, job.cfg, note)
    return target.write_frame(job.step, _frame(job))


def _frame(job: Job) -> dict[str, bytes]:
    kept = any(found.scale is not None for found in job.found.values())
    meta = {
        "stage": None,
        "conversion": job.identity,
        target.POWER_OF_TWO: job.power_of_two or not kept,  # those made here are
    }
    return target.frame(job.layout, meta)


def _carried(job: Job) -> list[str]:
    return [name for name in target.carried_files(job.source) if name != CONFIG]


def _convert_tensor(job: Job, slot: Slot) -> dict[str, Written]:
    """Convert one tensor with its scales; return its files."""
    if slot.place.copy:
        original = slot_table.original(job.layout.table, slot)
        transfer.check_copy(slot, job.found[slot.name].weight, job.found[original.name].weight)
        return {}
    files: dict[str, Written] = {}
    for part, (chunk, chunk_scales) in enumerate(_parts(job, slot)):
        files |= _write(job, slot, job.layout.file(slot, part), chunk)
        if chunk_scales is not None:
            files |= _write(job, slot, job.layout.scale_file(slot, part), chunk_scales)
    return files


def _parts(job: Job, slot: Slot) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield what is stored of a tensor, part by part, with its scales where that is FP8."""
    found, dtype = job.found.get(slot.name), job.layout.dtypes[slot.place.path]
    if found is None:
        drawn = new_indexer.draw(slot, seed=job.options.seed, std=job.cfg.init_std)
        for rows in np.split(drawn, slot.parts):
            yield transfer.store_rows(slot, rows, dtype)
        return
    scales = transfer.read_scales(found, power_of_two=job.power_of_two)
    for part in range(slot.parts):
        yield transfer.read_part(slot, part, found, scales, dtype)


def _write(job: Job, slot: Slot, name: str, array: np.ndarray) -> dict[str, Written]:
    try:
        return {name: storage.write_array(job.step / name, array)}
    except OSError as error:
        raise errors.WorkFailedError(
            f"{slot.name} could not be written to {job.step / name}: {storage.reason(error)}"
        ) from error


def _finish(job: Job, files: Mapping[str, Written]) -> None:
    """When everything is written and verified, make the checkpoint whole."""
    storage.remove_partials(job.target)
    if not storage.is_remote(job.target):
        os.sync()  # so that not even a power failure leaves a manifest without its files
    target.write_manifest(job.step, files)


def _verify_finished(job: Job, items: Items, workers: Workers) -> None:
    """Check a result that is there already: the first process, every file."""
    if not workers.is_first:
        return
    damage = _find_damage(job, items, workers)
    if damage is not None:
        raise errors.WorkFailedError(f"{damage}; remove {job.target} to convert again")


def _find_damage(job: Job, items: Items, workers: Workers) -> str | None:
    """Return what is wrong with a result, if anything."""
    try:
        files = target.read_manifest(job.step)
    except ValueError as error:
        return str(error)
    frame = _frame(job)
    tensors = {name: items.files(name) for name in items.sizes}
    for name in itertools.chain(frame, *tensors.values()):
        if name not in files:
            return f"{job.step / manifest.MANIFEST} lacks {name}"
    for name in frame:
        if damage := storage.find_damage(job.step, name, files[name]):
            return damage
    written = {item: {name: files[name] for name in names} for item, names in tensors.items()}
    damaged = workers_lib.find_damaged(items, written, workers.threads)
    return next(iter(damaged.values()), None) or _find_damage_beside(job)


def _find_damage_beside(job: Job) -> str | None:
    """Check what lies beside the manifest and its files."""
    if not (job.step / manifest.ORBAX_METADATA).is_file():
        return f"{job.step / manifest.ORBAX_METADATA} is missing"
    official = job.target / target.OFFICIAL
    try:
        if json_files.read_object(job.target / CONFIG).get("model") != asdict(job.cfg):
            return f"{job.target / CONFIG} is not of the model that was converted"
        if json_files.read_object(official / CONFIG) != job.raw:
            return f"{official / CONFIG} is not that of the model that was converted"
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return target.find_uncarried(job.source, official, _carried(job))
