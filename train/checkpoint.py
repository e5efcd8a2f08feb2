"""Checkpoints of a run: saved in the background, committed at once, verified before they are used.

Layout: `<folder>/<step>/` with `state/` (an Orbax tree of arrays), `data_state/` and `meta/`
(JSON), and `manifest.json`. Orbax fills `<step>.orbax-checkpoint-tmp`; process 0 then adds the
manifest, and one rename makes the step visible. A bucket has no such rename: there Orbax fills
`<step>/` itself. So a step without a manifest, or one that differs from its manifest, is not whole
and is never restored.

Written for many processes on one shared file system; run here with one process only.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_utils

from dsv32_jax import checkpoint_tree, errors, manifest
from dsv32_jax.convert import restore, storage
from dsv32_jax.convert.storage import Location
from train import retention

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".orbax-checkpoint-tmp"
DAMAGED_SUFFIX = ".damaged"
# What Orbax and TensorStore raise when storage fails them; a full disk comes as a ValueError.
STORAGE_ERRORS = (OSError, RuntimeError, ValueError)
NO_STEP, NO_GOOD_STEP = -1, -2


class CheckpointError(errors.WorkFailedError):
    """A checkpoint could not be written, or none could be trusted."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are made, which stay, and how they are checked.

    Attributes:
      every_steps: save at each multiple of this.
      keep_last: how many of the newest stay; at least 1.
      keep_best: how many with the lowest metric stay besides; 0 keeps none for its metric.
      async_save: write in the background while training goes on.
      verify: "checksum" reads each checkpoint once after writing and once before restoring;
        "size" only looks at the files' sizes, for checkpoints too large to be read by one process.
    """

    every_steps: int = 1000
    keep_last: int = 2
    keep_best: int = 1
    async_save: bool = True
    verify: Literal["checksum", "size"] = "checksum"

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps} must be at least 1")
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last} must be at least 1")
        if self.keep_best < 0:
            raise ValueError(f"keep_best={self.keep_best} must be at least 0")


class Restored(NamedTuple):
    """One restored checkpoint."""

    step: int
    state: Any
    data_state: dict[str, Any]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder.

    Reading changes nothing on disk and makes no folder; the first save removes what an earlier
    process left half-written and renames damaged steps to `<step>.damaged`.
    """

    def __init__(self, folder: Location, cfg: CheckpointConfig) -> None:
        """Look after a folder.

        Args:
          folder: `<workdir>/checkpoints`; need not exist yet.
          cfg: when to save and what to keep.
        """
        self._folder = storage.absolute(folder)
        self._cfg = cfg
        self._manager: ocp.CheckpointManager | None = None
        self._prepared = False
        self._pending: int | None = None
        self._known: set[int] = set()  # saved or restored by this object
        self._damaged: set[int] = set()
        self._metrics: dict[int, float | None] = {}

    def steps(self) -> list[int]:
        """List the steps on disk, whole or not, in order.

        Returns:
          Step numbers, ascending.
        """
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def last_good_path(self) -> Location | None:
        """The newest finished checkpoint, or None; its content is not read again here."""
        for step in reversed(self.steps()):
            if step not in self._damaged and self._is_finished(step):
                return self._path(step)
        return None

    def is_due(self, step: int) -> bool:
        """Tell whether a step is saved without being forced.

        Args:
          step: the number of finished steps.
        """
        return step % self._cfg.every_steps == 0

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_state: dict[str, Any],
        meta: dict[str, Any],
        metric: float | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step, in the background unless the config says otherwise.

        The arrays are copied from the devices before this returns, so they may be donated at once.
        A step that this object has saved or restored already is not saved again.

        Args:
          step: the number of finished steps.
          state: any pytree of arrays.
          data_state: where the data stands, as JSON; the same on every process.
          meta: anything else, as JSON.
          metric: what `keep_best` ranks by, lower being better.
          force: save although the step is no multiple of `every_steps`.

        Returns:
          Whether a save was begun.

        Raises:
          CheckpointError: this save, or the one before it in the background, failed.
          ValueError: an argument is not JSON or no array, or the folder has that step from a
            longer run.
        """
        if not (force or self.is_due(step)):
            return False
        self.wait()
        if step in self._known:
            return False
        items = {
            manifest.STATE: ocp.args.PyTreeSave(checkpoint_tree.to_nested_dict(state)),
            "data_state": ocp.args.JsonSave(_checked_json("data_state", data_state)),
            "meta": ocp.args.JsonSave(_checked_json("meta", meta)),
        }
        with self._failing_clearly(step):
            self._prepare()
        if step in self.steps():
            raise ValueError(
                f"step {step} is in {self._folder} already, from a run that went further; "
                "resume from it or use another folder"
            )
        self._metrics[step] = metric
        self._pending = step
        with self._failing_clearly(step):
            self._open().save(step, args=ocp.args.Composite(**items), force=True)
        if not self._cfg.async_save:
            self.wait()
        return True

    def poll(self) -> None:
        """Raise at once if a save in the background has failed; never wait.

        Raises:
          CheckpointError: it failed.
        """
        if self._pending is not None and not self._open().is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in the background, if any, is on disk.

        Raises:
          CheckpointError: it failed; the checkpoints before it are untouched.
        """
        if self._pending is None:
            return
        step = self._pending
        with self._failing_clearly(step):
            self._open().wait_until_finished()
        self._pending = None
        self._known.add(step)
        logger.info("saved checkpoint %s", self._path(step))

    def close(self) -> None:
        """Wait, then release Orbax's threads.

        Raises:
          CheckpointError: the save in the background failed.
        """
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore_latest(self, abstract_state: Any, *, partial: bool = False) -> Restored | None:
        """Restore the newest checkpoint that is whole, passing over damaged ones with a warning.

        Args:
          abstract_state: arrays or `jax.ShapeDtypeStruct` in the wanted structure; their shardings
            say where each array goes, on however many devices there are now.
          partial: allow the checkpoint to hold more than is asked for, such as when only the
            parameters are.

        Returns:
          The checkpoint, or None where none was ever finished.

        Raises:
          CheckpointError: there are checkpoints and none is whole.
          ValueError: the checkpoint is of another model; names the first differing tensor.
        """
        step = self._newest_good_step()
        return None if step is None else self._restore(step, abstract_state, partial)

    def newest_meta(self) -> tuple[int, dict[str, Any]] | None:
        """Read the notes of the newest checkpoint that is whole, without its arrays.

        Returns:
          (step, meta), or None where none was ever finished.

        Raises:
          CheckpointError: there are checkpoints and none is whole.
        """
        step = self._newest_good_step()
        if step is None:
            return None
        return step, ocp.JsonCheckpointHandler().restore(self._path(step) / "meta")

    def restore_step(self, step: int, abstract_state: Any, *, partial: bool = False) -> Restored:
        """Restore one particular step.

        Args:
          step: which.
          abstract_state: as for `restore_latest`.
          partial: as for `restore_latest`.

        Returns:
          The checkpoint.

        Raises:
          CheckpointError: the checkpoint is damaged.
          FileNotFoundError: there is no such step; names those that there are.
          ValueError: the checkpoint is of another model; names the first differing tensor.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise FileNotFoundError(f"no checkpoint {self._path(step)}; steps there: {there}")
        damage = self._find_damage(step)
        if damage:
            raise CheckpointError(f"checkpoint {self._path(step)} is damaged: {damage}")
        return self._restore(step, abstract_state, partial)

    def _path(self, step: int) -> Location:
        return self._folder / str(step)

    def _unfinished(self, step: int) -> Location:
        """Where a step is while it is written."""
        remote = storage.is_remote(self._folder)
        return self._path(step) if remote else self._folder / f"{step}{PARTIAL_SUFFIX}"

    def _is_finished(self, step: int) -> bool:
        return (self._path(step) / manifest.MANIFEST).is_file()

    def _open(self) -> ocp.CheckpointManager:
        """Return the Orbax manager, made when first needed."""
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=retention.LastAndBest(
                    self._metrics, keep_last=self._cfg.keep_last, keep_best=self._cfg.keep_best
                ),
                # Called on process 0 when all files are written and before the rename.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._commit_manifest),
                lightweight_initialize=True,
            )
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        return self._manager

    def _commit_manifest(self) -> None:
        step = self._pending
        assert step is not None, "Orbax committed a step that nobody asked for"
        manifest.write_manifest(
            self._unfinished(step),
            checksums=self._cfg.verify == "checksum",
            metric=self._metrics[step],
        )

    def _prepare(self) -> None:
        """Before the first save: clear half-written steps, move damaged ones out of the way."""
        if self._prepared:
            return
        for step in self.steps():
            try:
                self._metrics[step] = manifest.read_manifest(self._path(step))["metric"]
            except (FileNotFoundError, ValueError):
                self._damaged.add(step)
        if jax.process_index() == 0:
            for path in self._folder.glob(f"*{PARTIAL_SUFFIX}"):
                storage.remove_folder(path)
            for step in sorted(self._damaged):
                if self._unfinished(step) == self._path(step) and not self._is_finished(step):
                    storage.remove_folder(self._path(step))
                else:
                    self._set_aside(step)
        multihost_utils.sync_global_devices("checkpoints prepared")
        for step in self._damaged:
            self._metrics.pop(step, None)
        self._damaged.clear()
        self._open().reload()
        self._prepared = True

    def _set_aside(self, step: int) -> None:
        target = self._folder / f"{step}{DAMAGED_SUFFIX}"
        storage.remove_folder(target)
        self._path(step).rename(target)
        logger.warning("moved the damaged checkpoint %s to %s", self._path(step), target.name)

    @contextlib.contextmanager
    def _failing_clearly(self, step: int) -> Iterator[None]:
        """Turn a storage failure into one line, and leave no part of the step behind."""
        try:
            yield
        except STORAGE_ERRORS as error:
            good = self.last_good_path
            rest = f"the last good checkpoint is {good}" if good else "there is none before it"
            self._abandon(step)
            raise CheckpointError(
                f"step {step} could not be saved in {self._folder}: {_reason(error)}; {rest}"
            ) from error

    def _abandon(self, step: int) -> None:
        """Forget a failed save, with the manager, which would raise its error once more."""
        self._pending = None
        self._metrics.pop(step, None)
        if self._manager is not None:
            with contextlib.suppress(*STORAGE_ERRORS):
                self._manager.close()
            self._manager = None
        if jax.process_index() == 0:
            with contextlib.suppress(*STORAGE_ERRORS):
                storage.remove_folder(self._unfinished(step))

    def _find_damage(self, step: int) -> str | None:
        return manifest.find_damage(self._path(step), checksums=self._cfg.verify == "checksum")

    def _newest_good_step(self) -> int | None:
        """Verify from the newest step back, on process 0, and tell the others."""
        found, reasons = NO_STEP, []
        if jax.process_index() == 0:
            for step in reversed(self.steps()):
                damage = self._find_damage(step)
                if damage is None:
                    found = step
                    break
                found = NO_GOOD_STEP
                reasons.append(f"{step}: {damage}")
                self._damaged.add(step)
                logger.warning("passing over checkpoint %s: %s", self._path(step), damage)
        if jax.process_count() > 1:
            found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if found == NO_GOOD_STEP:
            raise CheckpointError(
                f"no checkpoint in {self._folder} is whole ({'; '.join(reasons)}); "
                "to start from the beginning, move that folder away"
            )
        return None if found == NO_STEP else found

    def _restore(self, step: int, abstract_state: Any, partial: bool) -> Restored:
        wanted = checkpoint_tree.abstract_of(checkpoint_tree.to_nested_dict(abstract_state))
        saved = ocp.PyTreeCheckpointHandler().metadata(self._path(step) / manifest.STATE)
        mismatch = checkpoint_tree.find_mismatch(saved.tree, wanted, partial=partial)
        if mismatch:
            raise ValueError(f"checkpoint {self._path(step)} is of another model: {mismatch}")
        if restore.is_quantised(saved.tree):
            return self._restore_quantised(step, wanted, abstract_state)
        arrays = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=checkpoint_utils.construct_restore_args(wanted),
            partial_restore=partial,
        )
        items = self._open().restore(
            step,
            args=ocp.args.Composite(
                state=arrays, data_state=ocp.args.JsonRestore(), meta=ocp.args.JsonRestore()
            ),
        )
        self._known.add(step)
        logger.info("restored checkpoint %s", self._path(step))
        state = checkpoint_tree.from_nested_dict(items[manifest.STATE], abstract_state)
        return Restored(step, state, items["data_state"], items["meta"])

    def _restore_quantised(self, step: int, wanted: Any, abstract_state: Any) -> Restored:
        """Restore a converted checkpoint whose weights are FP8 with scales."""
        nested = restore.restore(self._path(step) / manifest.STATE, wanted)
        data_state, meta = (
            ocp.JsonCheckpointHandler().restore(self._path(step) / item)
            for item in ("data_state", "meta")
        )
        logger.info("restored checkpoint %s", self._path(step))
        state = checkpoint_tree.from_nested_dict(nested, abstract_state)
        return Restored(step, state, data_state, meta)


def _checked_json(name: str, value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from error
    return value


def _reason(error: BaseException) -> str:
    """Return the first line of why storage failed, with a full disk in plain words."""
    text = str(error)
    full = isinstance(error, OSError) and error.errno in storage.FULL_DISK
    if full or "No space left" in text or "quota exceeded" in text:
        return "the disk is full"
    return (text.splitlines() or [type(error).__name__])[0][:300]
