"""Questions with a checkable answer as an environment of agents: no tools, one turn."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv32_jax import encoding
from dsv32_jax.encoding import Message, TokenizedMessages, markup
from dsv32_jax.errors import UsageError
from dsv32_jax.tokenizer import Tokenizer
from train.agents.environment import Call, Episode, Grade, Split, Task
from train.agents.forms import Turn
from train.agents.tools import Tool
from train.rl import tasks as rl
from train.rl.problems import Family
from train.rl.rewards import Response, Rewarder
from train.rl.task_source import TaskConfig, TaskFile, TaskSource, is_held_out


class QuestionEnvironment:
    """Implements `Environment` for one family of problems, or a file of tasks.

    Args:
        name: Its name.
        held_out: Its questions of that split.
        training: Returns those of the other, which may be without end.
        rewarder: Judges answers, in processes of its own.
        instruction: Put behind each question.
    """

    def __init__(
        self,
        name: str,
        held_out: Sequence[rl.Task],
        training: Callable[[], Iterator[rl.Task]],
        rewarder: Rewarder,
        *,
        instruction: str = "",
    ) -> None:
        """Keep what is given."""
        self.name, self.summary = name, f"questions of {name}"
        self._held_out, self._training = held_out, training
        self._rewarder, self._instruction = rewarder, instruction

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Return its questions, see `Environment`; those held out end, the others do not."""
        if seed:
            raise UsageError(f"{self.name}: the seed of questions is the config's")
        for question in self._held_out if split == "held_out" else self._training():
            prompt = f"{question.question}\n{self._instruction}".rstrip("\n")
            yield Task(
                name=question.name,
                environment=self.name,
                prompt=prompt,
                data=dataclasses.asdict(question),
            )

    def open(self, task: Task) -> AbstractContextManager[Episode]:
        """Ask a question, see `Environment`."""
        return nullcontext(_Asked(rl.Task(**task.data), self._rewarder))

    def solve(self, task: Task, call: Call) -> str:
        """Return the answer, see `Environment`."""
        del call
        if not task.data["answer"]:
            raise NotImplementedError(f"{task.name} has no answer that could be shown")
        return str(task.data["answer"])


@dataclass
class _Asked:
    """An open question."""

    question: rl.Task
    rewarder: Rewarder
    tools: Sequence[Tool] = ()

    def grade(self, answer: str) -> Grade:
        """Judge the answer by the question's verifier, or its rubric."""
        response = Response(answer + markup.EOS, n_tokens=0, cut=False)
        (scored,) = self.rewarder.score([self.question], [response])
        correct = scored.components.get("correct", scored.total)
        note = f"{scored.fault}: {scored.message}" if scored.fault else ""
        return Grade(score=min(max(correct or 0.0, 0.0), 1.0), parts=scored.components, note=note)


@dataclass(frozen=True, kw_only=True)
class PlainForm:
    """A question and a line break, then the answer: for policies that know no messages, as those of `configs.grpo`.

    Attributes:
        tokenizer: Of the policy.
    """

    tokenizer: Tokenizer

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenizedMessages:
        """Write a question, see `agents.forms.Form`."""
        if tools or [message["role"] for message in messages] != ["user"]:
            raise UsageError(
                "form=plain writes one question and no tools; form=compact writes conversations"
            )
        ids = encoding.encode_text(f"{markup.BOS}{messages[0]['content']}\n", self.tokenizer)
        return TokenizedMessages(np.array(ids, np.int32), np.zeros(len(ids), np.bool_))

    def results(self, results: Sequence[str], sampled: Sequence[int]) -> list[int]:
        """There are no calls, so no results."""
        raise AssertionError("a question has no calls")

    def read(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Turn:
        """Read an answer: all of it, see `agents.forms.Form`."""
        del tools
        text = encoding.decode_text(sampled, self.tokenizer).removesuffix(markup.EOS)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return Turn(message, ())


def of_family(
    family: Family, rewarder: Rewarder, *, held_out: int, instruction: str
) -> QuestionEnvironment:
    """Make an environment of a generator; the questions held out are those that training with it holds out.

    Args:
        family: The generator.
        rewarder: Judges answers.
        held_out: Questions of that split.
        instruction: Put behind each.

    Returns:
        The environment, named as the family.
    """
    source = TaskSource(TaskConfig(families=(family,), held_out=held_out))
    return QuestionEnvironment(
        family.name,
        source.held_out,
        lambda: map(source.__getitem__, itertools.count()),
        rewarder,
        instruction=instruction,
    )


def of_file(
    file: TaskFile, rewarder: Rewarder, *, fraction: float, instruction: str
) -> QuestionEnvironment:
    """Make an environment of a file of tasks.

    Args:
        file: The file.
        rewarder: Judges answers.
        fraction: The share of its questions that training held out; 1 where it was not trained on.
        instruction: Put behind each.

    Returns:
        The environment, named as the file.
    """
    path = Path(file.path)
    sides: dict[bool, list[rl.Task]] = {True: [], False: []}
    for task in rl.read_tasks(path):
        sides[is_held_out(task, fraction)].append(task)
    return QuestionEnvironment(
        path.stem, sides[True], lambda: iter(sides[False]), rewarder, instruction=instruction
    )
