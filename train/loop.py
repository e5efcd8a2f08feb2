"""Train one stage from its start, or from its last checkpoint, to its end."""

import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsv32_jax import json_files, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UserError
from dsv32_jax.parameters import Parameters
from train import hosts, overrides, progress
from train import state as states
from train.checkpoint import CheckpointConfig, Checkpoints
from train.data import loader
from train.data.config import DataConfig
from train.data.corpus import Corpus
from train.divergence import DivergedError, LossGuard, LossGuardConfig
from train.losses import Batch
from train.metrics import MetricsConfig, RunMetrics
from train.optimizer import make_optimizer, rates_at
from train.run_config import StageConfig
from train.signals import StopOnSignal
from train.stage import INDEXER_TRAINS, MAIN_TRAINS, Stage, train_flops
from train.state import TrainState
from train.step import StepMetrics, make_step

logger = logging.getLogger(__name__)


class Leg(NamedTuple):
    """One stage, or one control, as it is to be run.

    Attributes:
        name: For people: "dense", "warmup", "sparse", "dense_control", "window_control".
        stage: What trains, under which attention.
        config: Steps, optimizer, losses.
        data: The text.
        folder: Where metrics and checkpoints go.
    """

    name: str
    stage: Stage
    config: StageConfig
    data: DataConfig
    folder: Location


@runtime_checkable  # so that the tests' type checks can look at it
class Trains(Protocol):
    """What the config of any run of legs says of all of them; the whole of it is written beside them.

    Attributes:
        model: The model.
        checkpoint: When to save and what to keep.
        metrics: Where numbers go.
        guard: When the loss counts as diverged.
    """

    @property
    def model(self) -> ModelConfig: ...  # noqa: D102
    @property
    def checkpoint(self) -> CheckpointConfig: ...  # noqa: D102
    @property
    def metrics(self) -> MetricsConfig: ...  # noqa: D102
    @property
    def guard(self) -> LossGuardConfig: ...  # noqa: D102


class LegResult(NamedTuple):
    """What a finished leg leaves.

    Attributes:
        tokens_per_s: Tokens over all devices per second, compilation and checkpoints left out.
        seconds: Training time, of all processes that worked on it.
        seconds_before: The part of it before this process.
    """

    tokens_per_s: float
    seconds: float
    seconds_before: float


class StoppedError(UserError):
    """A signal stopped the run and its state is saved; it goes on when the command is run again.

    Exit status 0 after SIGTERM, by which schedulers take machines back: there is no failure to look into. 130 after
    SIGINT, so that a script that a person interrupts ends too.
    """

    def __init__(self, number: int, message: str):
        """Keep the message; `number` is the signal's."""
        super().__init__(message)
        self.goes_on = number == signal.SIGTERM
        self.exit_status = 0 if self.goes_on else 128 + number


def run_leg(
    cfg: Trains, leg: Leg, mesh: Mesh, corpora: Sequence[Corpus], start: Callable[[], Parameters]
) -> LegResult:
    """Train a leg to its end; resume it where a checkpoint says.

    Args:
        cfg: The run.
        leg: What to train.
        mesh: The mesh, also set as the context's.
        corpora: The opened text.
        start: Returns the parameters to begin with; called only when there is no checkpoint yet.

    Returns:
        The result.

    Raises:
        DivergedError: The loss is no longer finite or stays far above its median.
        StoppedError: A signal asked to stop; the state is saved.
        CheckpointError: A checkpoint could not be written, or none can be trusted.
        ValueError: The folder's checkpoint is of another model or another data configuration.
    """
    leg.folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:  # so that the folder can be loaded, and started from, on its own
        json_files.write_json(leg.folder / "config.json", overrides.to_json_dict(cfg))
    checkpoints = Checkpoints(leg.folder / "checkpoints", cfg.checkpoint)
    newest = checkpoints.newest_meta()
    meta = {} if newest is None else newest[1]
    if newest is not None:
        _check_resumable(leg, *newest)
        if newest[0] == leg.config.steps:
            logger.info("%s: finished, %d steps", leg.name, leg.config.steps)
            return LegResult(meta["tokens_per_s"], meta["seconds"], meta["seconds"])
    trainer = _Trainer(cfg, leg, mesh, checkpoints, _open_data(cfg, leg, corpora), meta)
    try:
        trainer.run(trainer.restore() if newest is not None else trainer.create(start()))
    finally:
        checkpoints.close()
    return LegResult(trainer.tokens_per_s, trainer.seconds, meta.get("seconds", 0.0))


def _open_data(cfg: Trains, leg: Leg, corpora: Sequence[Corpus]) -> loader.Loader:
    return loader.make_loader(
        leg.data,
        host=jax.process_index(),
        n_hosts=jax.process_count(),
        split="train",
        vocab_size=cfg.model.vocab_size,
        opened=corpora,
    )


def _check_resumable(leg: Leg, step: int, meta: dict[str, Any]) -> None:
    """Refuse a checkpoint of another stage, or one beyond the steps asked for."""
    if meta["stage"] != leg.name:
        raise ValueError(f"{leg.folder} holds the stage {meta['stage']}, not {leg.name}")
    if step > leg.config.steps:
        raise ValueError(f"{leg.folder} is at step {step} already, beyond steps={leg.config.steps}")


class _Trainer:
    """The loop of one leg: batches in, steps, numbers out, checkpoints."""

    def __init__(
        self,
        cfg: Trains,
        leg: Leg,
        mesh: Mesh,
        checkpoints: Checkpoints,
        batches: loader.Loader,
        meta: dict[str, Any],
    ):
        self._cfg, self._leg, self._mesh = cfg, leg, mesh
        self._checkpoints, self._batches = checkpoints, batches
        self._before, self._began = meta.get("seconds", 0.0), time.monotonic()
        self._speed_before = meta.get("tokens_per_s", 0.0)
        self._optimizer = make_optimizer(leg.config.optimizer.adam)
        self._layout = states.shardings(cfg.model, self._optimizer, leg.stage, mesh)
        self._guard = LossGuard(cfg.guard)
        self._speeds: list[float] = []

    @property
    def seconds(self) -> float:
        """Time spent on the leg, in this process and those before it."""
        return self._before + time.monotonic() - self._began

    @property
    def tokens_per_s(self) -> float:
        """Median over this process's steps; before its second, the figure of the process before it, or 0."""
        return float(np.median(self._speeds)) if self._speeds else self._speed_before

    def create(self, params: Parameters) -> TrainState:
        """Begin with given parameters and fresh moments."""
        return states.create(params, self._optimizer, self._leg.stage, self._layout)

    def restore(self) -> TrainState:
        """Go on from the newest checkpoint."""
        shapes = states.abstract(self._cfg.model, self._optimizer, self._leg.stage)
        found = self._checkpoints.restore_latest(states.on_devices(shapes, self._layout))
        assert found is not None, "the checkpoint vanished since it was checked"
        self._batches.restore(found.data_state)
        self._guard.restore(found.meta["guard"])
        logger.info("%s: resumed at step %d", self._leg.name, found.step)
        return found.state

    def run(self, state: TrainState) -> None:
        """Train to the last step; the last checkpoint is the result."""
        leg, step = self._leg, int(state.step)
        steps, optimizer = leg.config.steps, leg.config.optimizer
        step_fn = make_step(
            self._cfg.model, leg.config.loss, optimizer.adam, leg.stage, leg.config.microbatches
        )
        log = RunMetrics(leg.folder, self._cfg.metrics, self._work(), start_step=step)
        with log, StopOnSignal() as stop:
            for batch in itertools.islice(self._device_batches(), steps - step):
                rates = rates_at(optimizer, step)
                state, numbers = step_fn(state, batch, rates)
                step += 1
                self._record(log, step, numbers, rates)
                self._checkpoints.poll()
                # Read once: a signal during the save is the next step's, on every process alike.
                stopping = hosts.largest(stop.requested)
                if stopping or step == steps or self._checkpoints.is_due(step):
                    log.flush()  # so that the run that goes on from here finds every line
                    self._save(step, state, numbers)
                if stopping:  # at the last step too: there is more to come than this leg
                    self._checkpoints.wait()
                    whose = "" if stop.requested else " to another process"
                    raise StoppedError(
                        stopping,
                        f"{signal.Signals(stopping).name}{whose} at step {step} of {leg.name}: saved in "
                        f"{self._checkpoints.last_good_path}; run the same command to go on",
                    )

    def _work(self) -> progress.Work:
        """What there is to do, in tokens and FLOPs."""
        data = self._leg.data
        peak = progress.peak_flops(jax.devices()[0])
        return progress.Work(
            total_steps=self._leg.config.steps,
            tokens_per_step=data.batch_size * data.seq_len,
            flops_per_token=train_flops(self._cfg.model, data.seq_len, self._leg.stage),
            peak_flops=peak and peak * self._mesh.size,
        )

    def _device_batches(self) -> Iterator[Batch]:
        """Put each batch on the mesh; every process holds its own rows of it."""
        where = NamedSharding(self._mesh, sharding.spec("batch", "sequence"))
        for rows in self._batches:
            yield Batch(
                **{
                    name: jax.make_array_from_process_local_data(where, value)
                    for name, value in rows.items()
                }
            )

    def _record(self, metrics: RunMetrics, step: int, numbers: StepMetrics, rates: Any) -> None:
        """Log a step and stop the run if its loss has diverged."""
        values = {name: float(np.asarray(value)) for name, value in numbers._asdict().items()}
        values = {
            name: value for name, value in values.items() if name in _reported(self._leg.stage)
        }
        if self._leg.stage in MAIN_TRAINS:
            values["lr"] = float(rates.main)
        if self._leg.stage in INDEXER_TRAINS:
            values["indexer_lr"] = float(rates.indexer)
        recorded = metrics.log(step, values)
        if "tokens_per_second" in recorded:
            self._speeds.append(recorded["tokens_per_second"])
        try:
            self._check(step, values)
        except DivergedError as error:
            self._checkpoints.wait()
            good = self._checkpoints.last_good_path
            rest = (
                f"the last good checkpoint is {good}" if good else "no checkpoint was saved before"
            )
            raise DivergedError(f"{self._leg.name}: {error}; {rest}") from error

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        """Look for divergence; a gradient that is no number has spoilt the weights a step before the loss shows it."""
        self._guard.check(step, values["loss"])
        for name in ("grad_norm", "indexer_grad_norm"):
            if not math.isfinite(values.get(name, 0.0)):
                raise DivergedError(f"the {name} is {values[name]} at step {step}")

    def _save(self, step: int, state: TrainState, numbers: StepMetrics) -> None:
        meta = {
            "stage": self._leg.name,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "guard": self._guard.state(),
        }
        self._checkpoints.save(
            step,
            state,
            data_state=self._batches.state(),
            meta=meta,
            metric=float(np.asarray(numbers.loss)),
            force=True,
        )


def _reported(stage: Stage) -> frozenset[str]:
    """Return the metrics that mean something in a stage."""
    names = {"loss", "max_load", "max_device_load"}
    if stage in MAIN_TRAINS:
        names |= {"lm", "mtp", "balance", "grad_norm"}
    if stage in INDEXER_TRAINS:
        names |= {"kl", "indexer_grad_norm"}
    return frozenset(names)


def held_out_batches(rows: dict[str, np.ndarray], size: int, mesh: Mesh) -> Iterator[Batch]:
    """Cut held-out rows into batches on the mesh.

    Args:
        rows: tokens and segment ids, [N, T]; the same on every process.
        size: Rows per batch; divides N.
        mesh: The mesh.

    Yields:
        Batches in order.
    """
    where = NamedSharding(mesh, sharding.spec("batch", "sequence"))
    for first in range(0, len(rows["tokens"]), size):
        part = {name: value[first : first + size] for name, value in rows.items()}
        yield Batch(
            **{
                name: jax.make_array_from_callback(value.shape, where, value.__getitem__)
                for name, value in part.items()
            }
        )
