"""Draw, score, learn: the steps of a GRPO run on one mesh, with the sampler beside the learner."""

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv32_jax import parameters, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.config import ModelConfig
from dsv32_jax.errors import WorkFailedError
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.parameters import Parameters
from train.optimizer import rates_at
from train.rl import groups as grouping
from train.rl import learner, packing, policy, rollout
from train.rl.groups import Group
from train.rl.learner import Norms, Sums, Targets, Work
from train.rl.rewards import Scored, summarise
from train.rl.rollout import Rollout
from train.rl.settings import LearnerConfig, RolloutConfig
from train.stage import INDEXER_TRAINS
from train.state import TrainState

MAX_TRIES = 100  # tasks looked at for each that fits


class Asked(NamedTuple):
    """A prompt with what its responses are judged by.

    Attributes:
        domain: Of the task.
        prompt: Its ids.
        task: Handed on to the judge.
        source: Where it comes from: evaluations count each source's on its own.
    """

    domain: str
    prompt: Sequence[int]
    task: Any
    source: str


@runtime_checkable  # so that the tests' type checks can look at it
class Tasks(Protocol):
    """What is asked, and how answers are judged."""

    eos_id: int

    def ask(self, number: int) -> Asked:
        """Return the task of a number, the same whenever it is asked for."""
        ...

    def judge(self, answers: Sequence[tuple[Asked, Rollout]]) -> list[Scored]:
        """Return what each response is worth."""
        ...


@runtime_checkable
class Plays(Protocol):
    """Tasks that are answered in several turns, and draw those themselves."""

    def play(
        self,
        engine: Engine,
        requests: Sequence[tuple[Asked, SamplingParams]],
        *,
        version: int,
    ) -> Iterator[tuple[int, Rollout]]:
        """Draw a response to each request, as `rollout.sample` does."""
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
        n_pages=rollouts.slots * pages,
        page_size=rollouts.page_size,
        dtype=rollouts.cache_dtype,
        keep_experts=True,
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

    def __init__(
        self,
        cfg: ModelConfig,
        rollouts: RolloutConfig,
        tasks: Tasks,
        *,
        seed: int,
        mesh: Mesh | None = None,
    ):
        """Begin with the first task and no weights.

        Args:
            cfg: The model.
            rollouts: How responses are drawn.
            tasks: What is asked, and how answers are judged.
            seed: Of the draws.
            mesh: Where weights are copied to when they are pushed, and responses drawn; None draws with the weights
                that are pushed, where they lie.
        """
        self._cfg, self._rollouts, self._tasks, self._seed = cfg, rollouts, tasks, seed
        self._mesh = mesh
        self._engine: Engine | None = None
        self._version = -1
        self.next_task = 0  # where a resumed run goes on

    def push(self, params: Parameters, version: int) -> None:
        """Sample with these weights from now on."""
        if version == self._version:
            return
        if self._mesh is not None:
            params = _copied(params, parameters.shardings(self._cfg, self._mesh))
        if self._engine is None:
            with sharding.on_mesh(self._mesh):
                self._engine = make_engine(self._cfg, self._rollouts, self._tasks.eos_id, params)
        else:
            self._engine.replace_model(parameters.assemble(self._cfg, params))
        self._version = version

    def draw(self) -> Drawn:
        """Draw the responses of a step and have them judged; where that fails, the next draw asks the same tasks.

        Returns:
            The groups; fewer than asked for where too many taught nothing or had no reward.
        """
        first = self.next_task
        try:
            return self._draw()
        except BaseException:
            self.next_task = first
            raise

    def _draw(self) -> Drawn:
        cfg = self._rollouts
        sampling = judging = 0.0
        groups: list[Group] = []
        every: list[Rollout] = []
        judged: list[list[Scored]] = []
        counts: collections.Counter[str] = collections.Counter()
        for _ in range(cfg.rounds):
            asked = self._next_tasks(cfg.prompts - len(groups), counts)
            each = [task for task in asked for _ in range(cfg.group_size)]
            began = time.monotonic()
            drawn = self.respond(each)
            answered = time.monotonic()
            scored = self._tasks.judge(list(zip(each, drawn, strict=True)))
            sampling += answered - began
            judging += time.monotonic() - answered
            every += drawn
            for i, task in enumerate(asked):
                part = slice(i * cfg.group_size, (i + 1) * cfg.group_size)
                judged.append(scored[part])
                rewards = [one.total for one in scored[part]]
                group = grouping.make_group(task.domain, drawn[part], rewards)
                counts["without_group"] += group is None
                if group is not None and (cfg.rounds == 1 or not group.is_degenerate):
                    groups.append(group)
            if len(groups) >= cfg.prompts:
                break
        figures = _describe(every, judged, counts, sampling)
        return Drawn(tuple(groups), figures | {"seconds/rewards": judging})

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
            (task, self._rollouts.params(seed=int(seed)))
            for task, seed in zip(asked, seeds, strict=True)
        ]
        self._engine.report_selection(selection)  # also forgets: a resumed run draws the same
        if isinstance(self._tasks, Plays):
            drawing = self._tasks.play(self._engine, requests, version=self._version)
        else:
            prompts = [(task.prompt, params) for task, params in requests]
            drawing = rollout.sample(self._engine, prompts, version=self._version)
        found = dict(drawing)
        return [found[i] for i in range(len(asked))]


def _copied(params: Parameters, layout: Any) -> Parameters:
    """Return arrays of their own under another layout, on the same devices or on others; waits for them."""
    here = {device for leaf in jax.tree.leaves(params) for device in leaf.sharding.device_set}
    there = {device for leaf in jax.tree.leaves(layout) for device in leaf.device_set}
    if here == there:  # by collectives, whatever process holds them
        copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=layout)(params)
    else:
        copied = jax.device_put(params, layout, may_alias=False)
    return jax.block_until_ready(copied)


def _describe(
    drawn: Sequence[Rollout],
    judged: Sequence[Sequence[Scored]],
    counts: collections.Counter[str],
    seconds: float,
) -> dict[str, float]:
    """Return the figures of a step's responses."""
    n_tokens = sum(one.n_drawn for one in drawn)
    return summarise(judged) | {
        "length": n_tokens / len(drawn),
        "responses": float(len(drawn)),
        "at_limit": float(sum(one.reason == "length" for one in drawn)),
        **{name: float(counts[name]) for name in ("without_group", "prompts_too_long")},
        "seconds/rollout": seconds,
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
        self._step = learner.make_step(
            cfg,
            settings.objective,
            settings.optimizer.adam,
            **how,
            indexer_kl=settings.indexer_kl if self._trains_indexer else None,
        )

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
            self._work(state.parameters, part)
            for part in grouping.split_minibatches(groups, self._settings.minibatches)
        ]
        total: Sums | None = None
        norms: list[Norms] = []
        for work in parts:
            state, sums, norm = self._step(state, reference, work, rates)
            if not np.isfinite(norm.whole):
                raise WorkFailedError(
                    f"the gradient is {norm.whole} at step {step + 1}; nothing was learned from it"
                )
            norms.append(norm)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None, "a step has a group"
        seconds = time.monotonic() - began
        n_tokens = sum(len(r.tokens) for g in groups for r in g.rollouts)
        values = _figures(total, len(parts)) | {
            "grad_norm": float(np.mean([norm.main for norm in norms])),
            "lr": float(rates.main),
            "seconds/train": seconds,
            "tokens_per_s/train": n_tokens / max(seconds, 1e-9),
        }
        if self._trains_indexer:
            values |= {
                "indexer_kl": float(total.indexer_kl) / n_tokens,
                "indexer_lr": float(rates.indexer),
                "indexer_grad_norm": float(np.mean([norm.indexer for norm in norms])),
            }
        return state, values

    def _work(self, params: Parameters, groups: Sequence[Group]) -> Work:
        """Lay a minibatch out as stacked microbatches on the mesh."""
        cfg = self._settings
        lessons = grouping.make_lessons(
            groups, cfg.objective, self._kl_strength, max_tokens=self._max_tokens
        )
        rows = packing.plan_rows([len(r.tokens) for r in lessons.rollouts], cfg.row_length)
        n_microbatches = -(-len(rows) // cfg.rows)
        stacked = packing.round_up(n_microbatches)
        packed = packing.pack(
            lessons.rollouts,
            rows,
            n_rows=cfg.rows * stacked,
            row_length=cfg.row_length,
            max_tokens=self._max_tokens,
        )
        packed = packing.stack(packed, stacked)
        advantages, weight, strength = (
            packing.place_by_axes(
                learner.place_by_rollout(values, packed), cfg.rows, None, "batch", None
            )
            for values in (lessons.advantages, lessons.weight, lessons.kl_strength)
        )
        packed = packing.on_mesh(packed, cfg.rows)
        log_p_old = packed.log_p
        if cfg.ratio_against == "learner":
            used = (jax.tree.map(lambda x, i=i: x[i], packed) for i in range(n_microbatches))
            found = [self._score(params, micro).log_p for micro in used]
            log_p_old = jnp.stack(found + found[:1] * (stacked - n_microbatches))
        n_tokens = None
        if self._trains_indexer:
            n_tokens = jnp.full(stacked, sum(len(r.tokens) for r in lessons.rollouts), jnp.float32)
        targets = Targets(log_p_old, None, advantages, weight, strength, n_tokens)
        return Work(packed, targets, np.int32(n_microbatches))


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
