"""A family of reasoning-gym as an environment: one question, a calculator, the family's own scoring."""

import ast
import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments.calling import describe
from train.agents.environments.drawing import split_of
from train.agents.tools import Tool, ToolError
from train.rl import answer as answers
from train.rl import fence, problems, verifiers
from train.rl import tasks as judged
from train.rl.pool import LocalWorkers, Pool, WorkerError
from train.rl.problems import Family

TIMEOUT_S = 10.0  # that scoring may take
MEMORY_MIB = 1024
MAX_CHARS = 500  # of an expression
MAX_BITS = 4_096  # of a whole number
OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class ReasoningEpisode:
    """An attempt at one question.

    Args:
        task: As reasoning-gym's own scoring takes it.

    Attributes:
        tools: `calculate`.
    """

    def __init__(self, task: judged.Task) -> None:
        """Keep the task."""
        self._task = task
        self.tools: Sequence[Tool] = [
            describe(
                calculate, "Work out a sum: numbers, + - * / // % ** and brackets.",
                expression="Such as (12 + 7) * 3.",
            )
        ]  # fmt: skip

    def grade(self, answer: str) -> Grade:
        """Score as the family does; it may give parts of a point."""
        final = answers.read(answer, "chat", cut=False).final
        try:
            score = min(1.0, max(0.0, _judges().call(_score, final, self._task)))
        except WorkerError as error:
            return Grade(score=0.0, note=f"the answer can not be scored: {error}")
        return Grade(score=score, note="" if score == 1 else "not the family's answer")


class Reasoning:
    """One family, fresh questions without end.

    Args:
        family: With its settings.

    Raises:
        UsageError: If reasoning-gym is not installed, or has no such family.
    """

    summary = "a family of reasoning-gym with a calculator"

    def __init__(self, family: Family) -> None:
        """Look whether there is such a family."""
        problems.make_generator(family.name, family.settings)
        settings = "".join(f":{key}={value}" for key, value in family.settings)
        self.name = f"reasoning:{family.name}{settings}"
        self._family = family

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield questions; which split one is in goes by its text."""
        key = seed if split == "train" else 0
        for number in itertools.count():
            found = problems.draw_problem(self._family, "agents", split, key, number)
            if split_of(found.question) == split:
                yield Task(
                    name=f"{split}-{key}-{number}",
                    environment=self.name,
                    prompt=found.question,
                    data={"key": ["agents", split, key, number]},
                )

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[ReasoningEpisode]:
        """Draw the question again."""
        yield ReasoningEpisode(self._problem(task))

    def solve(self, task: Task, call: Call) -> str:
        """Return the family's own answer, which needs no tool.

        Raises:
            NotImplementedError: If the family only checks answers.
        """
        del call
        answer = self._problem(task).answer
        if not answer:
            raise NotImplementedError(f"{self.name} checks answers without knowing one")
        return answer

    def _problem(self, task: Task) -> judged.Task:
        return problems.draw_problem(self._family, *task.data["key"])


@functools.cache
def _judges() -> Pool:
    """Return the process that scores: some families evaluate an answer as Python, which may hang or worse."""
    workers = LocalWorkers(
        timeout_s=TIMEOUT_S, memory_mib=MEMORY_MIB, prepare=_nothing, preload=("reasoning_gym",)
    )
    return Pool(1, workers)


def _nothing() -> None:
    """Prepare nothing: the pool installs the fence itself."""


def _score(answer: str | None, task: judged.Task) -> float:
    with fence.closed():
        return verifiers.verify(answer, task)


def calculate(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: Of numbers, + - * / // % ** and brackets.

    Returns:
        The value.

    Raises:
        ToolError: If it is anything else, divides by zero, or becomes too large.
    """
    try:
        if len(expression) > MAX_CHARS:
            raise ToolError(f"an expression has at most {MAX_CHARS} characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return repr(value)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ToolError(f"{expression!r} is no sum of numbers: {error}") from error
    except ArithmeticError as error:
        raise ToolError(str(error)) from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if not isinstance(node, ast.BinOp):
        raise ToolError(f"{ast.unparse(node)} is no number")
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
        if not -64 <= right <= 64:
            raise ToolError(f"the exponent {right} is not between -64 and 64")
        value = left**right
    elif type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](left, right)
    else:
        raise ToolError(f"{ast.unparse(node)} has an operation that is not among + - * / // % **")
    too_large = isinstance(value, int) and value.bit_length() > MAX_BITS
    if too_large or isinstance(value, complex) or not math.isfinite(value):
        raise ToolError(f"{ast.unparse(node)} is too large, or no real number")
    return value
