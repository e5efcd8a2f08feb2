"""Where a run begins: a new model, or the parameters that another run ended with."""

import json
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from jax.sharding import Mesh

from dsv32_jax import parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.config_json import config_from_json
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from dsv32_jax.parameters import Parameters
from train import overrides
from train import state as states
from train.checkpoint import CheckpointConfig, Checkpoints
from train.stage import Stage

logger = logging.getLogger(__name__)


@runtime_checkable  # so that the tests' type checks can look at it
class Begins(Protocol):
    """What the config of any run says of its beginning.

    Attributes:
        model: The model.
        init_from: The run that it goes on from; None for a new model.
        seed: Of the weights' draw.
        checkpoint: How checkpoints are checked.
    """

    @property
    def model(self) -> ModelConfig: ...  # noqa: D102
    @property
    def init_from(self) -> str | None: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def checkpoint(self) -> CheckpointConfig: ...  # noqa: D102


class Start(NamedTuple):
    """The beginning of a run.

    Attributes:
        done: The stage the parameters have been through; None for a new model, or one that no run here has made.
        load: Returns the parameters.
    """

    done: Stage | None
    load: Callable[[], Parameters]


def find_start(cfg: Begins, mesh: Mesh) -> Start:
    """Return where the run begins; nothing is drawn or read yet but the other run's notes.

    Args:
        cfg: The run.
        mesh: Where the parameters go.

    Returns:
        The start.

    Raises:
        FileNotFoundError: If `init_from` has no checkpoint.
        CheckpointError: If none of its checkpoints can be trusted.
        ValueError: When loading, if its model is another one.
    """
    if cfg.init_from is None:
        return Start(None, lambda: parameters.initialise(cfg.model, cfg.seed, mesh))
    folder = storage.locate(cfg.init_from)
    if not folder.is_dir():
        raise FileNotFoundError(f"init_from={folder}: no such folder")
    if folder.name.isdecimal() and folder.parent.name == "checkpoints":
        raise ValueError(
            f"init_from={folder} is one step; give the run's folder {folder.parent.parent}"
        )
    _check_model(cfg, folder)
    newest = Checkpoints(folder / "checkpoints", cfg.checkpoint).newest_meta()
    if newest is None:
        raise FileNotFoundError(f"init_from={folder} holds no finished checkpoint in checkpoints/")
    stage = newest[1].get("stage")
    done = None if stage is None else stage.removesuffix("_control")
    return Start(done, lambda: restore_parameters(cfg, folder, mesh))


def _check_model(cfg: Begins, folder: Location) -> None:
    """Refuse another model's run before anything is read, naming the fields that differ."""
    path = folder / "config.json"
    if not path.is_file():
        return  # the arrays' shapes are compared when they are read
    before = json.loads(path.read_text()).get("model", {})
    now = json.loads(json.dumps(overrides.to_json_dict(cfg.model)))
    other = config_from_json(ModelConfig, before)
    if parameters.abstract(other) != parameters.abstract(cfg.model):
        changed = "; ".join(f"model.{line}" for line in overrides.config_diff(before, now))
        raise ValueError(f"init_from={folder} is of another model ({changed})")


def restore_parameters(cfg: Begins, folder: Location, mesh: Mesh) -> Parameters:
    """Read the parameters of a folder's newest whole checkpoint, without its moments.

    Args:
        cfg: The run.
        folder: The folder that holds `checkpoints/`.
        mesh: Where the parameters go.

    Returns:
        The parameters.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        CheckpointError: If none can be trusted.
        ValueError: If the checkpoint is of another model.
    """
    wanted = states.on_devices(
        parameters.abstract(cfg.model), parameters.shardings(cfg.model, mesh)
    )
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    found = checkpoints.restore_latest({"parameters": wanted}, partial=True)
    checkpoints.close()
    if found is None:
        raise FileNotFoundError(f"{folder} holds no finished checkpoint in checkpoints/")
    logger.info("starting from %s, step %d", folder, found.step)
    return found.state["parameters"]
