"""Draw, score, learn: the steps of a GRPO run on one mesh, with the sampler beside the learner."""

import collections
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dsv32_jax import parameters
from dsv32_jax.cache import CacheConfig
from dsv32_jax.config import ModelConfig
from dsv32_jax.errors import WorkFailedError
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.parameters import Arrays, Parameters
from train.optimizer import group_norm, rates_at
from train.rl import groups as grouping
from train.rl import learner, packing, policy, rollout
from train.rl.groups import Group, Lessons
from train.rl.learner import Sums, Targets
from train.rl.packing import Packed
from train.rl.rollout import Rollout
from train.rl.settings import LearnerConfig, RolloutConfig
from train.stage import INDEXER_TRAINS
from train.state import TrainState

MAX_TRIES = 100  # tasks looked at for each that fits
_group_norm = jax.jit(group_norm, static_argnames="group")


class Asked(NamedTuple):
    """A prompt with what its responses are judged by.

    Attributes:
        domain: Of the task.
        prompt: Its ids.
        task: Handed on to the judge.
    """

    domain: str
    prompt: Sequence[int]
    task: Any


@runtime_checkable  # so that the tests' type checks can look at it
class Tasks(Protocol):
    """What is asked, and how answers are judged."""

    eos_id: int

    def ask(self, number: int) -> Asked:
        """Return the task of a number, the same whenever it is asked for."""
        ...

    def judge(self, answers: Sequence[tuple[Asked, Rollout]]) -> list[float | None]:
        """Return a reward for each response, None where there is none."""
        ...


class Drawn(NamedTuple):
    """What a step learns from.

    Attributes:
        groups: Groups with rewards.
        figures: Means and counts for the log.
    """

    groups: tuple[Group, ...]
    figures: dict[str, float]


def make_engine(
    cfg: ModelConfig, rollouts: RolloutConfig, eos_id: int, params: Parameters
) -> Engine:
    """Return an engine that reports what the learner needs.

    Args:
        cfg: The model.
        rollouts: How responses are drawn.
        eos_id: Ends a response.
        params: The policy.

    Returns:
        The engine.
    """
    pages = -(-(rollouts.max_len + 1) // rollouts.page_size)
    cache = CacheConfig(
        n_pages=rollouts.slots * pages, page_size=rollouts.page_size, keep_experts=True
    )
    settings = EngineConfig(
        n_slots=rollouts.slots,
        max_len=rollouts.max_len,
        prefill_chunk=min(256, rollouts.max_prompt_tokens),
        max_waiting=max(256, rollouts.slots),
        cache=cache,
        keep_sets=rollouts.cuts,
    )
    return Engine(parameters.assemble(cfg, params), settings, eos_id=eos_id)


class Sampler:
    """Draws groups of responses, task after task, with weights that are pushed to it."""

    def __init__(self, cfg: ModelConfig, rollouts: RolloutConfig, tasks: Tasks, *, seed: int):
        """Begin with the first task and no weights.

        Args:
            cfg: The model.
            rollouts: How responses are drawn.
            tasks: What is asked, and how answers are judged.
            seed: Of the draws.
        """
        self._cfg, self._rollouts, self._tasks, self._seed = cfg, rollouts, tasks, seed
        self._engine: Engine | None = None
        self._version = -1
        self.next_task = 0  # where a resumed run goes on

    def push(self, params: Parameters, version: int) -> None:
        """Sample with these weights from now on."""
        if version == self._version:
            return
        if self._engine is None:
            self._engine = make_engine(self._cfg, self._rollouts, self._tasks.eos_id, params)
        else:
            self._engine.replace_model(parameters.assemble(self._cfg, params))
        self._version = version

    def draw(self) -> Drawn:
        """Draw the responses of a step and have them judged.

        Returns:
            The groups; fewer than asked for where too many taught nothing or had no reward.
        """
        cfg, began = self._rollouts, time.monotonic()
        groups: list[Group] = []
        judged: list[tuple[Rollout, float | None]] = []
        counts: collections.Counter[str] = collections.Counter()
        for _ in range(cfg.rounds):
            asked = self._next_tasks(cfg.prompts - len(groups), counts)
            each = [task for task in asked for _ in range(cfg.group_size)]
            drawn = self.respond(each)
            rewards = self._tasks.judge(list(zip(each, drawn, strict=True)))
            judged += zip(drawn, rewards, strict=True)
            for i, task in enumerate(asked):
                part = slice(i * cfg.group_size, (i + 1) * cfg.group_size)
                group = grouping.make_group(task.domain, drawn[part], rewards[part])
                counts["without_group"] += group is None
                if group is not None:
                    counts["degenerate"] += group.is_degenerate
                    if cfg.rounds == 1 or not group.is_degenerate:
                        groups.append(group)
            if len(groups) >= cfg.prompts:
                break
        return Drawn(tuple(groups), _describe(judged, counts, time.monotonic() - began))

    def _next_tasks(self, n: int, counts: collections.Counter[str]) -> list[Asked]:
        """Return the next n tasks whose prompts fit."""
        asked: list[Asked] = []
        for _ in range(MAX_TRIES * n):
            task = self._tasks.ask(self.next_task)
            self.next_task += 1
            if 0 < len(task.prompt) <= self._rollouts.max_prompt_tokens:
                asked.append(task)
            else:
                counts["prompts_too_long"] += 1
            if len(asked) == n:
                return asked
        raise WorkFailedError(
            f"of {MAX_TRIES * n} tasks fewer than {n} have prompts of at most"
            f" max_prompt_tokens={self._rollouts.max_prompt_tokens} tokens"
        )

    def respond(self, asked: Sequence[Asked], *, selection: bool = False) -> list[Rollout]:
        """Draw one response to each task; seeds follow from the run's, the weights' version and the place.

        Args:
            asked: The tasks.
            selection: Have the keys that each token selected reported too, at the cost of
                `Engine.report_selection`, until the next call without.

        Returns:
            A response to each.
        """
        assert self._engine is not None, "weights come first"
        sequence = np.random.SeedSequence([self._seed, self._version, self.next_task])
        seeds = sequence.generate_state(len(asked), np.uint32)
        requests = [
            (task.prompt, self._rollouts.params(seed=int(seed)))
            for task, seed in zip(asked, seeds, strict=True)
        ]
        self._engine.report_selection(selection)  # also forgets: a resumed run draws the same
        found = dict(rollout.sample(self._engine, requests, version=self._version))
        return [found[i] for i in range(len(asked))]


def _describe(
    judged: Sequence[tuple[Rollout, float | None]], counts: collections.Counter[str], seconds: float
) -> dict[str, float]:
    """Return the figures of a step's responses."""
    rewards = [reward for _, reward in judged if reward is not None]
    n_tokens = sum(drawn.n_drawn for drawn, _ in judged)
    return {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "length": n_tokens / len(judged),
        "responses": float(len(judged)),
        "without_reward": float(len(judged) - len(rewards)),
        "at_limit": float(sum(drawn.reason == "length" for drawn, _ in judged)),
        **{
            name: float(counts[name])
            for name in ("without_group", "degenerate", "prompts_too_long")
        },
        "tokens_per_s/rollout": n_tokens / max(seconds, 1e-9),
    }


class Learner:
    """Learns from groups of responses; holds the policy, its moments and the reference."""

    def __init__(
        self,
        cfg: ModelConfig,
        settings: LearnerConfig,
        *,
        kl_strength: Mapping[str, float],
        max_tokens: int,
    ):
        """Compile nothing yet.

        Args:
            cfg: The model.
            settings: How it learns.
            kl_strength: Of the domains that have one of their own.
            max_tokens: Longest response.
        """
        self._settings, self._kl_strength, self._max_tokens = settings, kl_strength, max_tokens
        how = {"replay": settings.keep_routing, "kept": settings.keep_sampling_mask}
        self._score = policy.make_score(cfg, **how)
        self._trains_indexer = settings.stage in INDEXER_TRAINS
        self._gradients = learner.make_gradients(
            cfg,
            settings.objective,
            **how,
            indexer_kl=settings.indexer_kl if self._trains_indexer else None,
        )
        self._update = learner.make_update(settings.optimizer.adam)

    @property
    def uses_reference(self) -> bool:
        """Whether any domain has a KL."""
        strengths = (self._settings.objective.kl_strength, *self._kl_strength.values())
        return any(strength > 0 for strength in strengths)

    def step(
        self, state: TrainState, reference: Parameters | None, groups: Sequence[Group], step: int
    ) -> tuple[TrainState, dict[str, float]]:
        """Learn from a step's groups, a minibatch after the other.

        Args:
            state: The policy; donated.
            reference: What the KL is taken from; None where no domain has one.
            groups: The step's groups, at least one.
            step: Counted from 0, for the learning rate.

        Returns:
            (the state after, figures).

        Raises:
            WorkFailedError: If a gradient is no number; the state is as before that minibatch.
        """
        began = time.monotonic()
        rates = rates_at(self._settings.optimizer, step)
        # All are scored before the first update: the ratio's denominator must not move within the step.
        parts = [
            [
                (packed, self._targets(state.parameters, reference, packed, lessons))
                for packed, lessons in self._pack(part)
            ]
            for part in grouping.split_minibatches(groups, self._settings.minibatches)
        ]
        total: Sums | None = None
        norms: list[dict[str, float]] = []
        for part in parts:
            grads, sums = functools.reduce(
                lambda a, b: jax.tree.map(jnp.add, a, b),
                (self._gradients(state.parameters, *one) for one in part),
            )
            state, norm = self._update(state, grads, rates)
            if not np.isfinite(norm):
                raise WorkFailedError(
                    f"the gradient is {norm} at step {step + 1}; nothing was learned from it"
                )
            norms.append(self._norms(grads, norm))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None, "a step has a group"
        seconds = time.monotonic() - began
        n_tokens = sum(len(r.tokens) for g in groups for r in g.rollouts)
        values = _figures(total, len(parts)) | {
            name: float(np.mean([each[name] for each in norms])) for name in norms[0]
        }
        if self._trains_indexer:
            values["indexer_kl"] = float(total.indexer_kl) / n_tokens
            values["indexer_lr"] = float(rates.indexer)
        values |= {"lr": float(rates.main), "tokens_per_s/train": n_tokens / max(seconds, 1e-9)}
        return state, values

    def _norms(self, grads: Arrays, whole: Array) -> dict[str, float]:
        """Return the norm of each group's gradients, which are clipped apart."""
        if not self._trains_indexer:
            return {"grad_norm": float(whole)}
        names = {"grad_norm": "main", "indexer_grad_norm": "indexer"}
        return {name: float(_group_norm(grads, group)) for name, group in names.items()}

    def _pack(self, groups: Sequence[Group]) -> Iterator[tuple[Packed, Lessons]]:
        """Lay a minibatch out as microbatches."""
        cfg = self._settings
        lessons = grouping.make_lessons(
            groups, cfg.objective, self._kl_strength, max_tokens=self._max_tokens
        )
        rows = packing.plan_rows([len(r.tokens) for r in lessons.rollouts], cfg.row_length)
        for first in range(0, len(rows), cfg.rows):
            part = rows[first : first + cfg.rows]
            packed = packing.pack(
                lessons.rollouts,
                part,
                n_rows=cfg.rows,
                row_length=cfg.row_length,
                max_tokens=self._max_tokens,
            )
            yield packed, lessons

    def _targets(
        self, params: Parameters, reference: Parameters | None, packed: Packed, lessons: Lessons
    ) -> Targets:
        log_p_old = jnp.asarray(packed.log_p)
        if self._settings.ratio_against == "learner":
            log_p_old = self._score(params, packed).log_p
        advantages, weight, strength = (
            jnp.asarray(learner.place_by_rollout(values, packed))
            for values in (lessons.advantages, lessons.weight, lessons.kl_strength)
        )
        log_p_ref = None if reference is None else self._score(reference, packed).log_p
        n_tokens = None
        if self._trains_indexer:
            n_tokens = jnp.float32(sum(len(r.tokens) for r in lessons.rollouts))
        return Targets(log_p_old, log_p_ref, advantages, weight, strength, n_tokens)


def _figures(sums: Sums, n_updates: int) -> dict[str, float]:
    """Turn the sums of a step into the means that are logged."""
    figures = jax.tree.map(float, sums.figures)
    tokens, responses = max(figures.tokens, 1.0), max(figures.responses, 1.0)
    return {
        "loss": float(sums.loss) / n_updates,
        "kl": figures.kl / tokens,
        "ratio/mean": figures.ratio / tokens,
        "clip_fraction": figures.clipped / tokens,
        "masked_fraction": figures.masked / responses,
        "masked_fraction_of_negative": figures.masked / max(figures.negative, 1.0),
        "entropy": float(sums.entropy) / tokens,
        "rerouted": float(sums.rerouted),
    }
