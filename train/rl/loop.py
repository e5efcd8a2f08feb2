"""The run of reinforcement learning: gate, draws, steps, evaluations, checkpoints; resumed where it was stopped."""

import collections
import hashlib
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv32_jax import json_files, parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.errors import WorkFailedError
from dsv32_jax.parameters import Parameters
from train import hosts, progress
from train import state as states
from train.checkpoint import CheckpointConfig, Checkpoints
from train.loop import StoppedError
from train.metrics import MetricsConfig, RunMetrics
from train.optimizer import make_optimizer
from train.rl import agreement, pending, policy
from train.rl.groups import Group
from train.rl.settings import RlConfig
from train.rl.trainer import Learner, Sampler, Tasks
from train.signals import StopOnSignal
from train.state import TrainState

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
MAX_EMPTY = 5  # draws in a row from which nothing can be learned


class Setting(NamedTuple):
    """All that a run needs beside its folder.

    Attributes:
        model: The model.
        rl: The run.
        kl_strength: Of the domains that have one of their own.
        tasks: What is asked in training.
        held_out: What is asked in evaluations: tasks 0 to `evaluate_tasks`.
        text: Returns a response's or a prompt's text, for people.
        checkpoint: When to save.
        metrics: Where numbers go.
        seed: Of the draws.
    """

    model: ModelConfig
    rl: RlConfig
    kl_strength: dict[str, float]
    tasks: Tasks
    held_out: Tasks
    text: Callable[[np.ndarray], str]
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    seed: int


class RlState(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        parameters: The policy's.
        opt_state: Its moments.
        step: int32, optimizer steps.
        reference: The reference's parameters, empty where there is no KL.
    """

    parameters: Parameters
    opt_state: Any
    step: Any
    reference: Any


class Run:
    """One run in its folder."""

    def __init__(self, setting: Setting, folder: Path, mesh: Mesh):
        """Open the folder; nothing is drawn yet.

        Args:
            setting: The run.
            folder: Where it lies.
            mesh: The devices, also set as the context's mesh.
        """
        self._setting, self._folder, self._mesh = setting, folder, mesh
        rl = setting.rl
        self._checkpoints = Checkpoints(folder / "checkpoints", setting.checkpoint)
        self._sampler = Sampler(setting.model, rl.rollouts, setting.tasks, seed=setting.seed)
        self._learner = Learner(
            setting.model,
            rl.learner,
            kl_strength=setting.kl_strength,
            max_tokens=rl.rollouts.max_tokens,
        )
        self._queue: collections.deque[tuple[tuple[Group, ...], dict[str, float]]]
        self._queue = collections.deque()
        self._figures: dict[str, float] = {}
        self._n_empty = 0

    def run(self, start: Callable[[], Parameters]) -> dict[str, float]:
        """Train to the last step.

        Args:
            start: Returns the policy to begin with; called only where there is no checkpoint.

        Returns:
            The figures of the run, for its summary.

        Raises:
            StoppedError: A signal asked to stop; the state is saved.
            WorkFailedError: Sampler and learner disagree, nothing can be learned, or a gradient is no number.
        """
        state, step = self._begin(start)
        rl = self._setting.rl
        # Tokens differ from step to step; the rates of rollouts and training are logged on their own.
        log = RunMetrics(
            self._folder,
            self._setting.metrics,
            progress.Work(total_steps=rl.steps),
            start_step=step,
        )
        with log, StopOnSignal() as stop:
            while step < rl.steps:
                state, values = self._step(state, step)
                step += 1
                if step % rl.evaluate_every == 0 or step == rl.steps:
                    self._sampler.push(state.parameters, step)
                    values["accuracy"] = self._evaluate()
                    self._figures["accuracy/after"] = values["accuracy"]
                log.log(step, values)
                self._checkpoints.poll()
                # Read once: a signal during the save is the next step's, on every process alike.
                stopping = hosts.largest(stop.requested)
                if stopping or step == rl.steps or self._checkpoints.is_due(step):
                    log.flush()  # so that the run that goes on from here finds every line
                    self._save(step, state)
                if stopping and step < rl.steps:
                    self._checkpoints.wait()
                    name = signal.Signals(stopping).name
                    raise StoppedError(
                        stopping, f"{name} at step {step}: saved; run the same command to go on"
                    )
        self._checkpoints.close()
        self._remove_old_pending(step)
        return self._figures

    def _begin(self, start: Callable[[], Parameters]) -> tuple[RlState, int]:
        """Restore, or start anew; check that sampler and learner agree."""
        found = self._restore()
        if found is None:
            state, step = self._create(start()), 0
        else:
            state, step = found
            logger.info("resumed at step %d", step)
        self._sampler.push(state.parameters, step)
        self._check_agreement(state.parameters)
        self._count_selection(state.parameters)
        if step == 0:
            self._figures["accuracy/before"] = self._evaluate()
            logger.info("held-out accuracy before: %.3f", self._figures["accuracy/before"])
        return state, step

    def _create(self, params: Parameters) -> RlState:
        adam = self._setting.rl.learner.optimizer.adam
        stage = self._setting.rl.learner.stage
        layout = states.shardings(self._setting.model, make_optimizer(adam), stage, self._mesh)
        fresh = states.create(params, make_optimizer(adam), stage, layout)
        return RlState(*fresh, self._copy(params))

    def _copy(self, params: Parameters) -> Any:
        """Return a reference: the policy is donated step by step, so it is a copy."""
        return jax.tree.map(jnp.copy, params) if self._learner.uses_reference else {}

    def _step(self, state: RlState, step: int) -> tuple[RlState, dict[str, float]]:
        """Draw what is missing, learn from the oldest draw."""
        rl = self._setting.rl
        while len(self._queue) <= rl.rollouts.staleness:
            self._sampler.push(state.parameters, step)
            drawn = self._sampler.draw()
            self._queue.append((drawn.groups, drawn.figures))
            if len(self._queue) == 1 and step % rl.samples_every == 0:
                self._write_samples(step, drawn.groups)
        groups, figures = self._queue.popleft()
        self._n_empty = 0 if groups else self._n_empty + 1
        if self._n_empty >= MAX_EMPTY:
            raise WorkFailedError(
                f"{MAX_EMPTY} draws in a row had no group to learn from: {json.dumps(figures)}"
            )
        values = dict(figures)
        if groups:
            reference = state.reference or None
            trained, learned = self._learner.step(TrainState(*state[:3]), reference, groups, step)
            state = RlState(*trained, state.reference)
            values |= learned
        every = rl.learner.reference_every
        if every is not None and (step + 1) % every == 0:
            state = state._replace(reference=self._copy(state.parameters))
        return state, values

    def _check_agreement(self, params: Parameters) -> None:
        """Compare sampler and learner on fresh responses; stop the run where they are not one policy."""
        rl, gate = self._setting.rl, self._setting.rl.gate
        asked = [self._setting.held_out.ask(i) for i in range(gate.prompts)]
        how = {"replay": rl.learner.keep_routing, "kept": rl.learner.keep_sampling_mask}
        found = agreement.compare(
            policy.make_score(self._setting.model, **how),
            params,
            self._sampler.respond(asked),
            n_rows=rl.learner.rows,
            row_length=rl.learner.row_length,
            tolerance=gate.tolerance,
        )
        logger.info(
            "sampler and learner: %d tokens, mean ratio %.6f, largest difference %.2g nats",
            found.tokens, found.ratio_mean, found.largest,
        )  # fmt: skip
        agreement.require_agreement(found, tolerance=gate.tolerance, share=gate.share)
        self._figures["gate/ratio_mean"] = found.ratio_mean
        self._figures["gate/largest_difference"] = found.largest

    def _count_selection(self, params: Parameters) -> None:
        """Count what sampler and learner select otherwise on fresh responses; it is told, and stops nothing."""
        rl, gate, topk = self._setting.rl, self._setting.rl.gate, self._setting.model.indexer.topk
        if not gate.selection:
            return
        longest = rl.rollouts.max_len - 1  # the sampler does not run a response's last token
        if longest <= topk:
            logger.info("selection: top %d of %d keys is all, nothing to compare", topk, longest)
            return
        asked = [self._setting.held_out.ask(i) for i in range(gate.prompts)]
        how = {"replay": rl.learner.keep_routing, "kept": rl.learner.keep_sampling_mask}
        found = agreement.compare_selection(
            policy.make_score(self._setting.model, **how, selection=True),
            params,
            self._sampler.respond(asked, selection=True),
            n_rows=rl.learner.rows,
            row_length=rl.learner.row_length,
        )
        logger.info("%s", found.describe())
        for name in ("sets", "differ", "keys"):
            self._figures[f"gate/selection_{name}"] = float(getattr(found, name))

    def _evaluate(self) -> float:
        """Return the mean reward of one response to each held-out task; responses without one count 0."""
        tasks = self._setting.held_out
        asked = [tasks.ask(i) for i in range(self._setting.rl.evaluate_tasks)]
        answers = list(zip(asked, self._sampler.respond(asked), strict=True))
        return float(np.mean([reward or 0.0 for reward in tasks.judge(answers)]))

    def _write_samples(self, step: int, groups: tuple[Group, ...]) -> None:
        """Write the responses of the first group for a person to read."""
        if not groups or jax.process_index():
            return
        text, group = self._setting.text, groups[0]
        first = group.rollouts[0]
        row = {
            "step": step,
            "domain": group.domain,
            "prompt": text(first.tokens[: first.n_prompt]),
            "responses": [
                {"text": text(r.response), "reward": reward, "end": r.reason}
                for r, reward in zip(group.rollouts, group.rewards, strict=True)
            ],
        }
        with (self._folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(json_files.line_of(row))

    def _pending_path(self, step: int) -> Path:
        return self._folder / f"pending-{step}.npz"

    def _save(self, step: int, state: RlState) -> None:
        """Save arrays, where the tasks stand, and what is drawn and not yet learned from."""
        digest = None
        if self._queue:
            path = self._pending_path(step)
            pending.save(path, [groups for groups, _ in self._queue])
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        data_state = {
            "next_task": self._sampler.next_task,
            "pending": digest,
            "pending_figures": [figures for _, figures in self._queue],
        }
        meta = {"stage": self._setting.rl.learner.stage, "figures": self._figures, "rl_step": step}
        self._checkpoints.save(step, state, data_state=data_state, meta=meta, force=True)
        self._remove_old_pending(step)

    def _remove_old_pending(self, step: int) -> None:
        """Remove what belongs to checkpoints that are gone."""
        kept = {*self._checkpoints.steps(), step}
        for path in self._folder.glob("pending-*.npz"):
            if int(path.stem.removeprefix("pending-")) not in kept:
                path.unlink()

    def _restore(self) -> tuple[RlState, int] | None:
        cfg, adam = self._setting.model, self._setting.rl.learner.optimizer.adam
        optimizer, stage = make_optimizer(adam), self._setting.rl.learner.stage
        newest = self._checkpoints.newest_meta()
        if newest is not None and newest[1]["stage"] != stage:
            raise ValueError(
                f"{self._folder} holds the stage {newest[1]['stage']}, not {stage}: learner.optimizer.indexer must be"
                " given, or not, from a run's first step on"
            )
        shapes = states.on_devices(
            states.abstract(cfg, optimizer, stage),
            states.shardings(cfg, optimizer, stage, self._mesh),
        )
        reference: Any = {}
        if self._learner.uses_reference:
            reference = states.on_devices(
                parameters.abstract(cfg), parameters.shardings(cfg, self._mesh)
            )
        wanted = RlState(shapes.parameters, shapes.opt_state, shapes.step, reference)
        found = self._checkpoints.restore_latest(wanted)
        if found is None:
            return None
        self._sampler.next_task = found.data_state["next_task"]
        self._figures = dict(found.meta["figures"])
        if found.data_state["pending"] is not None:
            path = self._pending_path(found.step)
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != found.data_state["pending"]:
                raise WorkFailedError(f"{path} is not what checkpoint {found.step} was saved with")
            drawn = pending.load(path)
            figures = found.data_state["pending_figures"]
            self._queue.extend(
                (tuple(groups), dict(f)) for groups, f in zip(drawn, figures, strict=True)
            )
        return found.state, found.step
