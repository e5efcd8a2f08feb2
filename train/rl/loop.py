"""The run of reinforcement learning: gate, draws, steps, evaluations, checkpoints; resumed where it was stopped."""

import contextlib
import hashlib
import json
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dsv32_jax import command_line, json_files, parameters, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import WorkFailedError
from dsv32_jax.parameters import Parameters
from dsv32_jax.sharding import MeshConfig
from train import hosts, progress
from train import state as states
from train.checkpoint import CheckpointConfig, Checkpoints
from train.loop import StoppedError
from train.metrics import MetricsConfig, RunMetrics
from train.optimizer import make_optimizer
from train.rl import agreement, pending, policy
from train.rl.draws import Draws
from train.rl.groups import Group
from train.rl.settings import RlConfig
from train.rl.trainer import Drawn, Learner, Sampler, Tasks
from train.signals import StopOnSignal
from train.state import TrainState

logger = logging.getLogger(__name__)

SAMPLES_FILE, SAMPLES_TEXT = "samples.jsonl", "samples.md"
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

    def __init__(self, setting: Setting, folder: Location, mesh: Mesh):
        """Open the folder; nothing is drawn yet.

        Args:
            setting: The run.
            folder: Where it lies.
            mesh: The devices, also set as the context's mesh.
        """
        self._setting, self._folder, self._mesh = setting, folder, mesh
        rl = setting.rl
        self._checkpoints = Checkpoints(folder / "checkpoints", setting.checkpoint)
        self._sampler = Sampler(
            setting.model,
            rl.rollouts,
            setting.tasks,
            seed=setting.seed,
            mesh=_sampler_mesh(rl, mesh),
        )
        self._draws = Draws(self._sampler, rl.rollouts)
        self._learner = Learner(
            setting.model,
            rl.learner,
            kl_strength=setting.kl_strength,
            max_tokens=rl.rollouts.max_tokens,
        )
        self._figures: dict[str, float] = {}
        self._n_empty = 0

    def run(self, start: Callable[[], Parameters], stop: StopOnSignal) -> dict[str, float]:
        """Train to the last step.

        Args:
            start: Returns the policy to begin with; called only where there is no checkpoint.
            stop: Listens for signals.

        Returns:
            The figures of the run, for its summary.

        Raises:
            StoppedError: A signal asked to stop; the state is saved.
            WorkFailedError: Sampler and learner disagree, nothing can be learned, or a gradient is no number.
        """
        rl = self._setting.rl
        with _ended_by(stop, "before the first step: nothing is lost"):
            state, step = self._begin(start)
        # Tokens differ from step to step; the rates of rollouts and training are logged on their own.
        log = RunMetrics(
            self._folder,
            self._setting.metrics,
            progress.Work(total_steps=rl.steps),
            start_step=step,
        )
        with log:
            if self._is_due(step) and self._figures.get("step/after") != step:
                log.log(step, self._evaluate_after(state, step))  # what a signal had cut short
            while step < rl.steps:
                try:
                    state, values = self._step(state, step)
                    step += 1
                    try:
                        values |= self._evaluate_after(state, step)
                    finally:
                        log.log(step, values)
                except WorkFailedError:
                    if not stop.requested:  # else a signal ended a wait for rewards
                        raise
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

    def _is_due(self, step: int) -> bool:
        rl = self._setting.rl
        return step > 0 and (step % rl.evaluate_every == 0 or step == rl.steps)

    def _evaluate_after(self, state: RlState, step: int) -> dict[str, float]:
        """Return the figures of an evaluation, where one is due."""
        if not self._is_due(step):
            return {}
        self._draws.collect()  # it draws with older weights
        self._sampler.push(state.parameters, step)
        found = self._evaluate()
        self._figures |= {f"{name}/after": value for name, value in found.items()}
        self._figures["step/after"] = step
        return found

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
            before = self._evaluate()
            self._figures |= {f"{name}/before": value for name, value in before.items()}
            logger.info("held-out accuracy before: %.3f", before["accuracy"])
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
        groups, values = self._draws.next(state.parameters, step)
        if step % rl.samples_every == 0:
            self._write_samples(step, groups)
        self._n_empty = 0 if groups else self._n_empty + 1
        if self._n_empty >= MAX_EMPTY:
            raise WorkFailedError(
                f"{MAX_EMPTY} draws in a row had no group to learn from: {json.dumps(values)}"
            )
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
            [drawn for drawn in self._sampler.respond(asked) if drawn.n_drawn],
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
            [drawn for drawn in self._sampler.respond(asked, selection=True) if drawn.n_drawn],
            n_rows=rl.learner.rows,
            row_length=rl.learner.row_length,
        )
        logger.info("%s", found.describe())
        for name in ("sets", "differ", "keys"):
            self._figures[f"gate/selection_{name}"] = float(getattr(found, name))

    def _evaluate(self) -> dict[str, float]:
        """Return the share of held-out tasks that one response each gets wholly right, over all and by source.

        Where a task has no verifier its reward counts instead; a response without a reward counts 0.
        """
        tasks = self._setting.held_out
        asked = [tasks.ask(i) for i in range(self._setting.rl.evaluate_tasks)]
        scored = tasks.judge(list(zip(asked, self._sampler.respond(asked), strict=True)))
        by_source: dict[str, list[float]] = {}
        for task, one in zip(asked, scored, strict=True):
            correct = one.components.get("correct")
            value = (one.total or 0.0) if correct is None else float(correct == 1)
            by_source.setdefault(task.source, []).append(value)
        found = {f"accuracy/{source}": float(np.mean(v)) for source, v in by_source.items()}
        return {
            "accuracy": float(np.mean([v for part in by_source.values() for v in part]))
        } | found

    def _write_samples(self, step: int, groups: tuple[Group, ...]) -> None:
        """Write the responses of the first group, for programs and for people."""
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
        path = self._folder / SAMPLES_FILE
        # A run that was cut off comes by this step a second time.
        rows = [one for one in json_files.read_lines(path) if one.get("step", step) < step] + [row]
        json_files.replace_text(path, "".join(map(json_files.line_of, rows)))
        shown = "\n".join(map(samples_text, rows))
        json_files.replace_text(self._folder / SAMPLES_TEXT, shown)

    def _pending_path(self, step: int) -> Location:
        return self._folder / f"pending-{step}.npz"

    def _save(self, step: int, state: RlState) -> None:
        """Save arrays, where the tasks stand, and what is drawn and not yet learned from."""
        self._draws.collect()
        digest = None
        if self._draws.waiting:
            path = self._pending_path(step)
            if command_line.process_index() == 0:
                pending.save(path, [groups for groups, _ in self._draws.waiting])
            multihost_utils.sync_global_devices("pending responses")
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        data_state = {
            "next_task": self._sampler.next_task,
            "pending": digest,
            "pending_figures": [figures for _, figures in self._draws.waiting],
        }
        meta = {"stage": self._setting.rl.learner.stage, "figures": self._figures, "rl_step": step}
        self._checkpoints.save(step, state, data_state=data_state, meta=meta, force=True)
        self._remove_old_pending(step)

    def _remove_old_pending(self, step: int) -> None:
        """Remove what belongs to checkpoints that are gone."""
        if command_line.process_index():
            return
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
            self._draws.waiting.extend(
                Drawn(tuple(groups), dict(f)) for groups, f in zip(drawn, figures, strict=True)
            )
        return found.state, found.step


def _sampler_mesh(rl: RlConfig, mesh: Mesh) -> Mesh | None:
    """Return where responses are drawn; None where the learner's weights themselves do."""
    cfg = rl.rollouts
    if cfg.devices:
        apart = [device for device in jax.devices() if device not in set(mesh.devices.flat)]
        return sharding.make_mesh(cfg.mesh or MeshConfig(), apart)
    if cfg.mesh is not None:
        return sharding.make_mesh(cfg.mesh, list(mesh.devices.flat))
    return mesh if cfg.overlap else None


@contextlib.contextmanager
def _ended_by(stop: StopOnSignal, when: str) -> Iterator[None]:
    """Name the signal that ended a wait for rewards, rather than the wait."""
    try:
        yield
    except WorkFailedError as error:
        if not stop.requested:
            raise
        name = signal.Signals(stop.requested).name
        raise StoppedError(stop.requested, f"{name} {when}") from error


def samples_text(row: Mapping[str, Any]) -> str:
    """Lay a group of responses out for a person to read.

    Args:
        row: A line of `samples.jsonl`.

    Returns:
        Markdown: the prompt, then each response with its reward.
    """
    lines = [f"## Step {row['step']}, {row['domain']}", *_quoted(row["prompt"]), ""]
    for response in row["responses"]:
        cut = ", cut at the limit of tokens" if response["end"] == "length" else ""
        lines += [f"Reward {response['reward']:.3f}{cut}:", *_quoted(response["text"]), ""]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
