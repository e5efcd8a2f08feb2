"""Tasks with tools in reinforcement learning: episodes of one task are a group, the verifier's score the reward."""

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import grain
import numpy as np

from dsv32_jax import encoding
from dsv32_jax.config import require
from dsv32_jax.errors import UsageError
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.tokenizer import Tokenizer
from train.agents.attempt import Job, Limits
from train.agents.context import ContextConfig
from train.agents.environment import Environment, Split, Task
from train.agents.forms import CompactForm, Form, OfficialForm
from train.agents.loop import Loop
from train.agents.trajectory import Trajectory
from train.rl.problems import check_weight
from train.rl.rewards import Scored
from train.rl.rollout import Rollout, check_params
from train.rl.trainer import Asked

ENDLESS = 2**40

FormName = Literal["official", "compact"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentShare:
    """An environment and its share of the tasks.

    Attributes:
        name: `MODULE:NAME`, to be called for one, or a name that `train.agents.environments.catalogue` knows.
        weight: Its share, relative to the others'.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the weight."""
        check_weight(self.name, self.weight)

    @classmethod
    def from_text(cls, text: str) -> "EnvironmentShare":
        """Read one off a command line, `NAME` or `NAME@WEIGHT`."""
        name, at, weight = text.rpartition("@")
        if at and weight.replace(".", "", 1).isdecimal():
            return cls(name=name, weight=float(weight))
        return cls(name=text)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Tasks with tools as a run's policy gets them.

    Attributes:
        environments: Trained on; their held-out tasks are evaluated on.
        unseen: Evaluated on alone, such as environments with other tools.
        form: How conversations are written: "official", or "compact" for policies that know bytes.
        describe: Whether the compact form has descriptions of tools; the official one always has.
        limits: What an episode may take; `row` is the learner's row.
        context: What happens as the window, `max_prompt_tokens` + `max_tokens`, fills; None ends the episode.
        held_out: Tasks of each environment that evaluations draw from.
        workers: Threads that call tools; 0 calls them between the engine's steps: a resumed run then draws the same.
    """

    environments: tuple[EnvironmentShare, ...]
    unseen: tuple[EnvironmentShare, ...] = ()
    form: FormName = "official"
    describe: bool = False
    limits: Limits = Limits()
    context: ContextConfig | None = None
    held_out: int = 64
    workers: int = 0

    def __post_init__(self) -> None:
        """Check ranges."""
        require(bool(self.environments), "agent.environments=() leaves nothing to train on")
        require(self.held_out >= 1, f"agent.held_out={self.held_out} must be at least 1")
        require(self.workers >= 0, f"agent.workers={self.workers} must not be negative")
        require(
            not self.describe or self.form == "compact",
            "agent.describe=true has no effect with form=official",
        )
        require(self.limits.row is None, "agent.limits.row is the learner's row_length, not set")

    def make_form(self, tokenizer: Tokenizer) -> Form:
        """Return the form."""
        if self.form == "official":
            return OfficialForm(tokenizer=tokenizer)
        return CompactForm(tokenizer=tokenizer, describe=self.describe)


def make_environment(name: str) -> Environment:
    """Return an environment.

    Args:
        name: See `EnvironmentShare`.

    Returns:
        The environment.

    Raises:
        UsageError: If there is none.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and "." in module):
        catalogue = importlib.import_module("train.agents.environments.catalogue")
        return catalogue.make(name)
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"there is no environment {name}: {error}") from error
    if not isinstance(made, Environment):
        raise UsageError(f"{name} is no environment, but a {type(made).__name__}")
    return made


class Posed(NamedTuple):
    """A task with its environment.

    Attributes:
        environment: The environment.
        task: The task.
    """

    environment: Environment
    task: Task


class _Stream:
    """An environment's tasks by number, as a source for grain; where they end, they begin anew."""

    def __init__(self, environment: Environment, split: Split, seed: int) -> None:
        self._environment, self._coming = environment, environment.tasks(split, seed)
        self._found: list[Task] = []
        self._ended = False

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Posed:
        while not self._ended and len(self._found) <= index:
            task = next(self._coming, None)
            if task is None:
                self._ended = True
            else:
                self._found.append(task)
        if not self._found:
            raise UsageError(f"the environment {self._environment.name} has no task")
        return Posed(self._environment, self._found[index % len(self._found)])


class AgentSource:
    """The tasks of a config by number, and those that are held out.

    Args:
        cfg: What to ask.
        seed: Of the tasks for training.

    Attributes:
        held_out: Of each environment the first held-out ones, in turns.

    Raises:
        UsageError: If an environment can not be made, or has no task.
    """

    def __init__(self, cfg: AgentConfig, seed: int) -> None:
        """Make the environments; the class docstring has the arguments."""
        known = [make_environment(share.name) for share in cfg.environments]
        unseen = [make_environment(share.name) for share in cfg.unseen]
        self._streams = [_Stream(one, "train", seed) for one in known]
        self._weights = [share.weight for share in cfg.environments]
        sources = [grain.MapDataset.source(stream) for stream in self._streams]
        self._mixed = grain.MapDataset.mix(sources, self._weights)
        kept = [_Stream(one, "held_out", 0) for one in [*known, *unseen]]
        self.held_out: Sequence[Posed] = [stream[i] for i in range(cfg.held_out) for stream in kept]

    def __getitem__(self, index: int) -> Posed:
        """Return the task at an index, from 0 on without end."""
        return self._mixed[index]


class AgentTasks:
    """Implements `trainer.Tasks`, and `trainer.Plays`, on environments.

    Args:
        tasks: By number.
        cfg: How they are posed.
        tokenizer: The policy's.
        row: Tokens that an episode may have over all its contexts.
    """

    def __init__(self, tasks: Any, cfg: AgentConfig, tokenizer: Tokenizer, *, row: int) -> None:
        """Keep what is given."""
        self._tasks, self._cfg, self._tokenizer = tasks, cfg, tokenizer
        self._form = cfg.make_form(tokenizer)
        self._limits = dataclasses.replace(cfg.limits, row=row)
        self.eos_id = encoding.SpecialTokens.from_tokenizer(tokenizer).eos

    def ask(self, number: int) -> Asked:
        """Return the task of a number, the same whenever it is asked for."""
        posed: Posed = self._tasks[number]
        task = posed.task
        system = [{"role": "system", "content": task.system}] if task.system else []
        with posed.environment.open(task) as episode:
            prompt = self._form.encode(
                [*system, {"role": "user", "content": task.prompt}], episode.tools
            )
        name = posed.environment.name
        return Asked(name, prompt.ids.tolist(), posed, name)

    def play(
        self,
        engine: Engine,
        requests: Sequence[tuple[Asked, SamplingParams]],
        *,
        version: int,
    ) -> Iterator[tuple[int, Rollout]]:
        """Play an episode of each task.

        Args:
            engine: Idle.
            requests: The tasks, and how to draw.
            version: Of the engine's weights.

        Yields:
            (place in `requests`, the episode as a rollout).

        Raises:
            ValueError: If tokens are drawn as no policy gradient can follow.
        """
        for _, params in requests:
            check_params(engine, params)
        jobs = [Job(asked.task.environment, asked.task.task, params) for asked, params in requests]
        loop = Loop(
            engine,
            self._form,
            limits=self._limits,
            context=self._cfg.context,
            workers=self._cfg.workers,
        )
        try:
            for place, found in loop.play(jobs, version=version):
                rollout = found.rollout or _nothing(requests[place], version)
                bare = dataclasses.replace(found, rollout=None)
                yield place, dataclasses.replace(rollout, outcome=bare)
        finally:
            loop.close()

    def judge(self, answers: Sequence[tuple[Asked, Rollout]]) -> list[Scored]:
        """Return the verifiers' scores; an episode whose environment failed has none."""
        return [_scored(drawn.outcome) for _, drawn in answers]

    def text(self, tokens: np.ndarray) -> str:
        """Return tokens as text, special ones spelled out."""
        return encoding.decode_text(tokens, self._tokenizer)


def _nothing(request: tuple[Asked, SamplingParams], version: int) -> Rollout:
    """Return the rollout of an episode in which nothing was drawn; no group takes it."""
    asked, params = request
    return Rollout(
        tokens=np.asarray(asked.prompt, np.int32),
        n_prompt=len(asked.prompt),
        log_p=np.zeros(0, np.float32),
        kept=None,
        experts=None,
        temperature=params.temperature,
        reason="length",
        version=version,
    )


def _scored(found: Trajectory) -> Scored:
    if found.grade is None:
        return Scored(None, {}, "sandbox", found.note)
    wrong = sum(call.outcome != "ok" for call in found.calls)
    parts = {
        "correct": found.grade.score,
        "steps": float(found.steps),
        "calls": float(len(found.calls)),
        "wrong_calls": float(wrong),
        "contexts": float(found.resets + 1),
    }
    return Scored(found.grade.score, parts)
