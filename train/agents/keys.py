"""A small environment for small policies: numbers behind letters, which only tools tell."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from train.agents.environment import Call, Grade, Split, Task
from train.agents.tools import Tool, ToolError

LETTERS = "abcdefgh"
READ, NEXT = ("get", "see", "val", "look"), ("next", "link", "after", "then")
UNSEEN_READ, UNSEEN_NEXT = ("peek", "tell"), ("succ", "past")
PARAMETERS = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}


class KeysEpisode:
    """An attempt.

    Args:
        data: Of the task: `rows`, letter -> [number, letter that comes next], `tools`, their names, and `answer`.

    Attributes:
        tools: One tells the number of a letter, one the letter that comes next.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Make the tools."""
        self._rows, self._answer = data["rows"], data["answer"]
        read, follow = data["tools"]
        self.tools = [
            Tool(
                name=read,
                description="number of k",
                parameters=PARAMETERS,
                function=lambda k: self._row(k)[0],
            ),
            Tool(
                name=follow,
                description="letter after k",
                parameters=PARAMETERS,
                function=lambda k: self._row(k)[1],
            ),
        ]

    def _row(self, k: str) -> Any:
        if k not in self._rows:
            raise ToolError(f"no {k[:8]}")
        return self._rows[k]

    def grade(self, answer: str) -> Grade:
        """Compare the answer."""
        right = answer.strip() == self._answer
        return Grade(score=float(right), note="" if right else f"the answer is {self._answer}")


class Keys:
    """Numbers behind letters. Held-out tasks have numbers that no task for training has."""

    name = "keys"
    summary = "numbers behind letters, for policies that know bytes"
    names: tuple[tuple[str, ...], tuple[str, ...]] = (READ, NEXT)

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield tasks without end."""
        source = f"{self.name}:held_out" if split == "held_out" else f"{self.name}:train:{seed}"
        for number in itertools.count():
            rng = random.Random(f"{source}:{number}")
            # Numbers tell the splits apart: every ninth is held out, so that each digit stands in others' places.
            numbers = [n for n in range(10, 100) if (n % 9 == 4) == (split == "held_out")]
            rows = {
                k: [str(rng.choice(numbers)), rng.choice(LETTERS.replace(k, ""))] for k in LETTERS
            }
            k, far = rng.choice(LETTERS), rng.random() < 0.25
            yield Task(
                name=f"{source}:{number}",
                environment=self.name,
                prompt=f"after {k}" if far else f"{k}",
                data={
                    "rows": rows,
                    "tools": [rng.choice(names) for names in self.names],
                    "answer": rows[rows[k][1]][0] if far else rows[k][0],
                    "path": [k, rows[k][1]] if far else [k],
                },
                difficulty=int(far),
            )

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[KeysEpisode]:
        """Begin an attempt."""
        yield KeysEpisode(task.data)

    def solve(self, task: Task, call: Call) -> str:
        """Ask for the letter where one comes next, and for its number."""
        read, follow = task.data["tools"]
        k, *further = task.data["path"]
        for _ in further:
            k = call(follow, k=k)
        return str(call(read, k=k))


class UnseenKeys(Keys):
    """The same with tools whose names no task of `Keys` has."""

    name = "unseen_keys"
    summary = "keys, with names of tools that keys does not have"
    names = (UNSEEN_READ, UNSEEN_NEXT)
