"""An attempt at a task turn by turn: its conversation, its calls, its limits; whoever writes the turns drives it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv32_jax.config import require
from dsv32_jax.encoding import Message
from dsv32_jax.generate.sampling import SamplingParams
from train.agents import schemas
from train.agents.environment import Environment, Episode, Task
from train.agents.forms import UNREADABLE, Turn
from train.agents.tools import by_name
from train.agents.trajectory import CallRecord, EndReason, Trajectory
from train.rl.rollout import Rollout

# What the user says next: called with the conversation that ends with an answer; None ends the episode.
User = Callable[[Sequence[Message]], str | None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an episode may take.

    Attributes:
        steps: Turns of the policy.
        tokens: That the policy writes.
        seconds: From opening on; looked at between turns and while tokens are drawn. Calls are limited by their tools.
        result_chars: Of a result; the middle of a longer one is left out.
        row: Tokens of all contexts together, so that the learner can hold an episode in a row; None for no limit.
    """

    steps: int = 20  # DeepSeek-V3.2 report, table 8: executions in one turn
    tokens: int = 32_768
    seconds: float = 600.0
    result_chars: int = schemas.MAX_CHARS
    row: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("steps", "tokens", "seconds", "result_chars"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        require(self.row is None or self.row > 0, f"row={self.row} must be positive, or None")


class Job(NamedTuple):
    """An attempt to be made.

    Attributes:
        environment: Opens the task.
        task: The task.
        params: How tokens are drawn; `max_tokens` is left to the limits.
        user: What the user says after an answer; None ends the episode with it.
    """

    environment: Environment
    task: Task
    params: SamplingParams = SamplingParams()
    user: User | None = None


class Attempt:
    """An open episode and its conversation; knows nothing of tokens or endpoints.

    Args:
        job: What is attempted.
        episode: It, opened.
        limits: What it may take.

    Attributes:
        messages: The conversation as the policy sees it next.
        history: All that was said.
        calls: All that was called.
        steps: Turns so far.
        tokens: Written by the policy so far.
        resets: Times that the context was begun anew.
        end: Why it is over; None while it is not.
    """

    def __init__(self, job: Job, episode: Episode, limits: Limits) -> None:
        """Begin with the task's messages."""
        self.job, self.episode, self._limits = job, episode, limits
        self.tools = by_name(episode.tools)
        task = job.task
        system = [{"role": "system", "content": task.system}] if task.system else []
        self.messages: list[Message] = [*system, {"role": "user", "content": task.prompt}]
        self.history: list[Message] = list(self.messages)
        self.calls: list[CallRecord] = []
        self.steps = self.tokens = self.resets = 0
        self.end: EndReason | None = None
        self._began = time.monotonic()
        self._answer = ""

    @property
    def seconds(self) -> float:
        """Since it was opened."""
        return time.monotonic() - self._began

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self.seconds > self._limits.seconds

    def count(self, tokens: int) -> None:
        """Count a turn."""
        self.steps += 1
        self.tokens += tokens

    def take(self, turn: Turn) -> list[str] | None:
        """Go on with a turn: make its calls, or hand its answer to the user.

        Args:
            turn: As it was read.

        Returns:
            The results, one for each call and each that could not be read; None where there is none: the episode is
            over, or the last message is a user's.
        """
        message = dict(turn.message)
        broken = [
            {"type": "function", "function": {"name": UNREADABLE, "arguments": "{}"}}
            for _ in turn.problems
        ]
        calls = list(message.get("tool_calls") or ())
        message["tool_calls"] = [*calls, *broken]
        if not message["tool_calls"]:
            del message["tool_calls"]
            self._say(message)
            self._finish_turn(message.get("content") or "")
            return None
        self._say(message)
        results = [self._call(call["function"]) for call in calls]
        results += [self._refuse(problem) for problem in turn.problems]
        for text in results:
            self._say({"role": "tool", "content": text})
        if self.is_late:
            self.end = "seconds"
        elif self.steps >= self._limits.steps:
            self.end = "steps"
        elif self.tokens >= self._limits.tokens:
            self.end = "tokens"
        return results

    def restart(self, messages: Sequence[Message]) -> None:
        """Go on from a shorter conversation."""
        self.messages = list(messages)
        self.resets += 1

    def finish(self, *, rollout: Rollout | None = None, note: str = "") -> Trajectory:
        """Grade what was done.

        Args:
            rollout: Its tokens.
            note: Why it was refused.

        Returns:
            What is left of the episode.
        """
        assert self.end is not None, "it is not over"
        grade = self.episode.grade(self._answer)
        return Trajectory(
            task=self.job.task.name,
            environment=self.job.task.environment,
            messages=tuple(self.history),
            calls=tuple(self.calls),
            end=self.end,
            answer=self._answer,
            steps=self.steps,
            tokens=self.tokens,
            seconds=self.seconds,
            resets=self.resets,
            grade=grade,
            note=note,
            rollout=rollout,
        )

    def _say(self, message: Message) -> None:
        self.messages.append(message)
        self.history.append(message)

    def _finish_turn(self, answer: str) -> None:
        said = None if self.job.user is None else self.job.user(self.messages)
        if said is None:
            self.end, self._answer = "answer", answer
        elif self.steps >= self._limits.steps:
            self.end = "steps"
        else:
            self._say({"role": "user", "content": said})

    def _call(self, function: Mapping[str, str]) -> str:
        name = function["name"]
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            problem = f"the arguments of {name} are no JSON object"
            return self._refuse(problem, name, {"": function["arguments"]})
        tool = self.tools.get(name)
        if tool is None:
            text = f"error: there is no tool {name!r}; there are {', '.join(self.tools) or 'none'}"
            text = schemas.cut(text, self._limits.result_chars)
            found = schemas.Result(outcome="error", text=text)
        else:
            found = schemas.call(tool, arguments, max_chars=self._limits.result_chars)
        self.calls.append(
            CallRecord(
                step=self.steps,
                name=name,
                arguments=arguments,
                outcome="unknown" if tool is None else found.outcome,
                result=found.text,
                seconds=found.seconds,
            )
        )
        return found.text

    def _refuse(
        self, problem: str, name: str = "", arguments: Mapping[str, Any] | None = None
    ) -> str:
        text = schemas.cut(f"error: {problem}", self._limits.result_chars)
        record = CallRecord(
            step=self.steps,
            name=name,
            arguments=arguments or {},
            outcome="unreadable",
            result=text,
        )
        self.calls.append(record)
        return text


def failed(job: Job, error: Exception) -> Trajectory:
    """Return what is left of an episode that could not be opened."""
    return Trajectory(
        task=job.task.name,
        environment=job.task.environment,
        messages=(),
        calls=(),
        end="failed",
        answer="",
        steps=0,
        tokens=0,
        seconds=0.0,
        note=str(error),
    )
