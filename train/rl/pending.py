"""Groups that were drawn and not yet learned from, in one file beside a checkpoint."""

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv32_jax.convert.storage import Location
from train.rl.groups import Group
from train.rl.rollout import KeptSets, Rollout

# What numpy and zip files raise over a file that is none, or was cut short.
BROKEN = (
    KeyError,
    IndexError,
    EOFError,
    ValueError,
    OSError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def save(path: Location, drawn: Sequence[Sequence[Group]]) -> None:
    """Write the groups of several draws; the file is whole or not there.

    Args:
        path: An .npz file.
        drawn: Groups of each draw, in order.

    Raises:
        OSError: The disk is full; an older file stays.
    """
    groups = [(i, group) for i, part in enumerate(drawn) for group in part]
    rollouts = [r for _, group in groups for r in group.rollouts]
    arrays: dict[str, Any] = {
        "n_draws": np.asarray(len(drawn)),
        "draw": np.asarray([i for i, _ in groups], np.int32),
        "domain": np.asarray([group.domain for _, group in groups], np.str_),
        "size": np.asarray([len(group.rollouts) for _, group in groups], np.int32),
        "reward": np.asarray([x for _, group in groups for x in group.rewards], np.float64),
        **_columns(rollouts),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    if not isinstance(path, Path):
        path.write_bytes(buffer.getvalue())  # an object of a bucket appears when it is complete
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _columns(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return what the rollouts have, one after the other; ragged fields with their lengths."""

    def join(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

    kept = [r.kept for r in rollouts if r.kept is not None]
    columns = {
        "tokens": join([r.tokens for r in rollouts], np.int32),
        "length": np.asarray([len(r.tokens) for r in rollouts], np.int64),
        "n_prompt": np.asarray([r.n_prompt for r in rollouts], np.int64),
        "log_p": join([r.log_p for r in rollouts], np.float32),
        "temperature": np.asarray([r.temperature for r in rollouts], np.float64),
        "reason": np.asarray([r.reason for r in rollouts], np.str_),
        "version": np.asarray([r.version for r in rollouts], np.int64),
        "has_kept": np.asarray([r.kept is not None for r in rollouts], bool),
        "kept_tokens": join([k.tokens for k in kept], np.int32),
        "kept_ends": join([k.ends for k in kept], np.int64),
        "kept_length": np.asarray([len(k.tokens) for k in kept], np.int64),
        "n_drawn": np.asarray([r.n_drawn for r in rollouts], np.int64),
        "has_trainable": np.asarray([r.trainable is not None for r in rollouts], bool),
        "trainable": join([r.trainable for r in rollouts if r.trainable is not None], bool),
        "starts": join([np.asarray(r.starts) for r in rollouts], np.int64),
        "n_contexts": np.asarray([len(r.starts) for r in rollouts], np.int64),
        "has_experts": np.asarray([r.experts is not None for r in rollouts], bool),
    }
    experts = [r.experts for r in rollouts if r.experts is not None]
    if experts:
        columns["experts"] = np.concatenate(experts, axis=1)
    return columns


def load(path: Location) -> list[list[Group]]:
    """Read what `save` wrote.

    Args:
        path: The file.

    Returns:
        The groups of each draw.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no such file.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content) as file:
            arrays = {name: file[name] for name in file.files}
        rollouts = iter(_rollouts(arrays))
        rewards = iter(arrays["reward"].tolist())
        drawn: list[list[Group]] = [[] for _ in range(int(arrays["n_draws"]))]
        for draw, domain, size in zip(
            arrays["draw"], arrays["domain"], arrays["size"], strict=True
        ):
            members = tuple(next(rollouts) for _ in range(size))
            drawn[draw].append(Group(str(domain), members, tuple(next(rewards) for _ in members)))
    except BROKEN as error:
        raise ValueError(f"{path} holds no pending responses: {error}") from error
    return drawn


def _rollouts(arrays: dict[str, np.ndarray]) -> list[Rollout]:
    """Cut the columns into rollouts again."""
    ends = np.cumsum(arrays["length"])
    tokens = np.split(arrays["tokens"], ends[:-1])
    log_p = np.split(arrays["log_p"], np.cumsum(arrays["n_drawn"])[:-1])
    masked = arrays["has_trainable"]
    trainable = iter(np.split(arrays["trainable"], np.cumsum(arrays["length"][masked])[:-1]))
    starts = np.split(arrays["starts"], np.cumsum(arrays["n_contexts"])[:-1])
    kept = iter(_kept(arrays))
    having, parts = arrays["has_experts"], []
    if having.any():
        parts = np.split(arrays["experts"], np.cumsum(arrays["length"][having])[:-1], axis=1)
    experts = iter(parts)
    return [
        Rollout(
            tokens=tokens[i],
            n_prompt=int(arrays["n_prompt"][i]),
            log_p=log_p[i],
            kept=next(kept) if arrays["has_kept"][i] else None,
            experts=next(experts) if having[i] else None,
            temperature=float(arrays["temperature"][i]),
            reason=str(arrays["reason"][i]),  # type: ignore[arg-type]  # one of FinishReason, as it was written
            version=int(arrays["version"][i]),
            trainable=next(trainable) if masked[i] else None,
            starts=tuple(starts[i].tolist()),
        )
        for i in range(len(arrays["length"]))
    ]


def _kept(arrays: dict[str, np.ndarray]) -> list[KeptSets]:
    drawn = arrays["n_drawn"][arrays["has_kept"]]
    tokens = np.split(arrays["kept_tokens"], np.cumsum(arrays["kept_length"])[:-1])
    ends = np.split(arrays["kept_ends"], np.cumsum(drawn)[:-1])
    return [KeptSets(*pair) for pair in zip(tokens, ends, strict=False)][: len(drawn)]
