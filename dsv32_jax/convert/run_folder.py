"""Find the checkpoint in the folder of a run or of a conversion, local or in a bucket."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from dsv32_jax import errors, manifest
from dsv32_jax.config import ModelConfig
from dsv32_jax.config_json import config_from_json
from dsv32_jax.convert import storage

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


def find(path: epath.Path) -> RunFolder:
    """Find the newest whole checkpoint.

    Args:
        path: A run's folder, its checkpoints folder, or one step in there.

    Returns:
        The checkpoint. Files' presence and sizes have been compared with the manifest; checksums have not, because
        that would read everything once more than the conversion does.

    Raises:
        FileNotFoundError: If there is no such folder or no checkpoint.
        WorkFailedError: If no checkpoint is whole.
        ValueError: If the config cannot be read or is no run's.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}")
    if path.name.isdecimal() and path.parent.name == CHECKPOINTS:
        steps, folder = [path], path.parent.parent
    else:
        folder = path.parent if path.name == CHECKPOINTS else path
        steps = _steps(folder / CHECKPOINTS)
    raw = _read_config(folder)
    cfg = config_from_json(ModelConfig, raw["model"])
    reasons = []
    for step in steps:
        damage = _find_damage(step)
        if damage is None:
            meta = json.loads((step / "meta" / "metadata").read_text())
            digest = (step / manifest.MANIFEST).read_text()
            return RunFolder(folder, step, cfg, tokenizer_name(raw), meta, digest)
        reasons.append(f"{step.name}: {damage}")
    if not reasons:
        raise FileNotFoundError(f"{folder / CHECKPOINTS} holds no checkpoint")
    raise errors.WorkFailedError(
        f"no checkpoint in {folder / CHECKPOINTS} is whole ({'; '.join(reasons)})"
    )


def tokenizer_name(raw: Mapping[str, Any]) -> str | None:
    """Return the name or path of the tokenizer that a run's config.json names, if any."""
    named = raw.get("data", {}).get("tokenizer")
    return named if isinstance(named, str) else None


def _steps(folder: epath.Path) -> list[epath.Path]:
    """Return the steps' folders, newest first."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if path.name.isdecimal()]
    return sorted(steps, key=lambda path: int(path.name), reverse=True)


def _find_damage(step: epath.Path) -> str | None:
    if not storage.is_remote(step):
        return manifest.find_damage(Path(step), checksums=False)
    return None if (step / manifest.MANIFEST).is_file() else f"{manifest.MANIFEST} is missing"


def _read_config(folder: epath.Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or "model" not in raw:
        raise ValueError(f"{path} has no model: {folder} is no training run or converted folder")
    return raw
