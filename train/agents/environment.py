"""What every kind of agent task is made of: an environment, its tools, tasks, and a verifier."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from train.agents.tools import Tool

Split = Literal["train", "held_out"]
Call = Callable[..., Any]  # call(name, **arguments) -> what the tool returned


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to be done in an environment.

    Attributes:
        name: Unique within the environment, the same in every process and run.
        environment: Its environment's name.
        prompt: What the user asks for, the form of the answer included.
        system: Words for the system message before the tools; "" for none.
        data: What the environment needs to open it, as JSON; not shown to the policy.
        difficulty: 0 for the simplest; harder ones count up.
    """

    name: str
    environment: str
    prompt: str
    system: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    difficulty: int = 0


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a verifier found.

    Attributes:
        score: In [0, 1]; 1 is solved.
        parts: Checks by name, each in [0, 1].
        note: Why it is not 1, for a person.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@runtime_checkable  # so that the tests' type checks can look at it
class Episode(Protocol):
    """One attempt at a task, with state of its own: a database, a sandbox, files.

    Attributes:
        tools: That the policy may call here.
    """

    tools: Sequence[Tool]

    def grade(self, answer: str) -> Grade:
        """Judge the final answer, and the state that the calls left.

        Args:
            answer: The text of the last message, without reasoning; "" where the attempt ended without one.

        Returns:
            The grade. Deterministic; never raises for what a policy wrote.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """A kind of task.

    Attributes:
        name: Its name.
        summary: One line for a person.
    """

    name: str
    summary: str

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Make tasks, in a fixed order, no one of one split in the other.

        Args:
            split: Which.
            seed: Of what is generated; held-out tasks do not depend on it.

        Yields:
            Tasks; it may end.
        """
        ...

    def open(self, task: Task) -> AbstractContextManager[Episode]:
        """Begin an attempt.

        Args:
            task: One of this environment's.

        Returns:
            The episode; leaving the context removes all its state.
        """
        ...

    def solve(self, task: Task, call: Call) -> str:
        """Solve a task as its author would, only calling tools and computing.

        Args:
            task: One of this environment's.
            call: Calls a tool of the open episode.

        Returns:
            The final answer, which the verifier gives 1.

        Raises:
            NotImplementedError: If the environment knows tasks without knowing how to solve them.
        """
        ...
