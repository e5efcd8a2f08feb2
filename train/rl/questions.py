"""Tasks as tokens: the prompt that a policy sees, and the judging of what it answers."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dsv32_jax import encoding
from dsv32_jax.encoding import markup
from dsv32_jax.tokenizer import Tokenizer
from train import hosts
from train.rl.answer import CLOSE, OPEN, THINKING_STYLES, Style
from train.rl.rewards import Response, Rewarder, Scored
from train.rl.rollout import Rollout
from train.rl.tasks import Task
from train.rl.trainer import Asked


@runtime_checkable  # so that the tests' type checks can look at it
class Numbered(Protocol):
    """Tasks by number, such as a `TaskSource` or its held-out tasks."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the task of a number."""
        ...


def prompt_text(task: Task, style: Style, instruction: str) -> str:
    """Return what a policy is shown.

    "thinking" and "chat" are the official format of one user message. The others are for models that know no messages:
    the question and a line break.

    Args:
        task: What is asked.
        style: The format.
        instruction: Put behind the question, on a line of its own.

    Returns:
        The text, special tokens spelled out.
    """
    question = f"{task.question}\n{instruction}" if instruction else task.question
    if style in ("thinking", "chat"):
        return encoding.encode_messages(
            [{"role": "user", "content": question}], thinking_mode=style
        )
    return f"{markup.BOS}{question}\n"


def solution_text(task: Task, style: Style, *, thinking: str = "") -> str:
    """Return a task's answer as a response in the format.

    Args:
        task: A task with an answer.
        style: The format.
        thinking: What comes before the answer, in a format that has it.

    Returns:
        The text up to and with the token that ends a turn.

    Raises:
        ValueError: If there is thinking in a format without, or an answer of several lines in one that reads the last.
    """
    if thinking and style not in THINKING_STYLES:
        raise ValueError(f"style={style!r} has no place for thinking; {THINKING_STYLES} have")
    if style == "lines" and "\n" in task.answer:
        raise ValueError(
            f"style='lines' reads the last line, but the answer of {task.name} has several"
        )
    if style == "tags":
        return f"{thinking}{OPEN}{task.answer}{CLOSE}{markup.EOS}"
    closing = markup.THINK_END if style == "thinking" else "\n" if thinking else ""
    return f"{thinking}{closing}{task.answer}{markup.EOS}"


class Questions:
    """Implements `trainer.Tasks` on text.

    Args:
        tasks: By number.
        tokenizer: The policy's.
        rewarder: Judges, on process 0; None on the others.
        style: The format of prompts and responses.
        instruction: See `prompt_text`.
    """

    def __init__(
        self,
        tasks: Numbered,
        tokenizer: Tokenizer,
        rewarder: Rewarder | None,
        *,
        style: Style,
        instruction: str,
    ) -> None:
        """Keep what is given."""
        self._tasks, self._tokenizer, self._rewarder = tasks, tokenizer, rewarder
        self._style, self._instruction = style, instruction
        self.eos_id = encoding.SpecialTokens.from_tokenizer(tokenizer).eos

    def ask(self, number: int) -> Asked:
        """Return the task of a number, the same whenever it is asked for."""
        task = self._tasks[number]
        text = prompt_text(task, self._style, self._instruction)
        source = str(task.data.get("family", task.domain))
        return Asked(task.domain, encoding.encode_text(text, self._tokenizer), task, source)

    def judge(self, answers: Sequence[tuple[Asked, Rollout]]) -> list[Scored]:
        """Return what each response is worth."""
        tasks = [asked.task for asked, _ in answers]
        responses = [
            Response(self.text(drawn.response), drawn.n_drawn, cut=drawn.reason == "length")
            for _, drawn in answers
        ]

        def score() -> list[Scored]:
            assert self._rewarder is not None, "process 0 has a rewarder"
            return self._rewarder.score(tasks, responses)

        scored = hosts.as_process_0(score)
        return [Scored(*one) for one in scored]

    def text(self, tokens: np.ndarray) -> str:
        """Return tokens as text, special ones spelled out."""
        return encoding.decode_text(tokens, self._tokenizer)
