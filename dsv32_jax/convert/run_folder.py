"""Find the checkpoint in the folder of a run or of a conversion, local or in a bucket."""

import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from etils import epath

from dsv32_jax import errors, json_files, manifest
from dsv32_jax.config import ModelConfig
from dsv32_jax.config_json import config_from_json
from dsv32_jax.convert import storage

logger = logging.getLogger(__name__)

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"


class RunFolder(NamedTuple):
    """A checkpoint and what lies beside it.

    Attributes:
        folder: Of the run.
        step: Of the checkpoint.
        cfg: The model.
        tokenizer: Name or path of the one it was trained with, if the config names one.
        meta: Notes kept with the checkpoint.
        digest: Identifies the checkpoint: its manifest's text.
    """

    folder: epath.Path
    step: epath.Path
    cfg: ModelConfig
    tokenizer: str | None
    meta: dict[str, Any]
    digest: str


def find(path: epath.Path, *, checksums: bool = False) -> RunFolder:
    """Find the newest whole checkpoint, passing over damaged ones with a warning.

    Args:
        path: A run's folder, its checkpoints folder, or one step in there.
        checksums: Read all files of a local checkpoint and compare their checksums with the manifest; otherwise only
            presence and size.

    Returns:
        The checkpoint.

    Raises:
        FileNotFoundError: If there is no such folder or no checkpoint.
        WorkFailedError: If no checkpoint is whole, or not the one that was asked for.
        ValueError: If the config cannot be read or is no run's.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}")
    folder = folder_of(path)
    raw = json_files.read_object(folder / CONFIG)
    if "model" not in raw:
        raise ValueError(
            f"{folder / CONFIG} has no model: {folder} is no training run or converted folder"
        )
    cfg = config_from_json(ModelConfig, raw["model"])
    if path == folder or path.name == CHECKPOINTS:
        step = _newest_whole(folder / CHECKPOINTS, checksums=checksums)
    elif damage := _find_damage(path, checksums=checksums):
        raise errors.WorkFailedError(f"checkpoint {path} is damaged: {damage}")
    else:
        step = path
    meta = json_files.read_object(step / "meta" / "metadata")
    digest = (step / manifest.MANIFEST).read_text()
    return RunFolder(folder, step, cfg, tokenizer_name(raw), meta, digest)


def folder_of[P: PurePath](path: P) -> P:
    """Return the folder of the run that a folder belongs to.

    Args:
        path: A run's folder, its checkpoints folder, or one step in there; absolute.

    Returns:
        The run's folder.
    """
    if path.name.isdecimal() and path.parent.name == CHECKPOINTS:
        path = path.parent
    return path.parent if path.name == CHECKPOINTS else path


def tokenizer_name(raw: Mapping[str, Any]) -> str | None:
    """Return the name or path of the tokenizer that a run's config.json names, if any."""
    named = raw.get("data", raw).get("tokenizer")  # of a run of GRPO it stands at the top
    return named if isinstance(named, str) else None


def _newest_whole(folder: epath.Path, *, checksums: bool) -> epath.Path:
    """Return the newest step that agrees with its manifest."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = [path for path in paths if path.name.isdecimal() and path.is_dir()]
    if not steps:
        raise FileNotFoundError(f"{folder} holds no checkpoint")
    reasons = []
    for step in sorted(steps, key=lambda path: int(path.name), reverse=True):
        damage = _find_damage(step, checksums=checksums)
        if damage is None:
            return step
        reasons.append(f"{step.name}: {damage}")
        logger.warning("passing over checkpoint %s: %s", step, damage)
    raise errors.WorkFailedError(f"no checkpoint in {folder} is whole ({'; '.join(reasons)})")


def _find_damage(step: epath.Path, *, checksums: bool) -> str | None:
    if not storage.is_remote(step):
        return manifest.find_damage(Path(step), checksums=checksums)
    return None if (step / manifest.MANIFEST).is_file() else f"{manifest.MANIFEST} is missing"
