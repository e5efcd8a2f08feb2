"""A small environment of agents for tests: sums, by a tool that counts how often it was used."""

from contextlib import contextmanager
from dataclasses import dataclass, field

from train.agents.environment import Grade, Task
from train.agents.tools import Tool, ToolError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@dataclass
class Sum:
    """One sum to be done: right with the tool used scores 1, right without it a half."""

    total: int
    used: int = 0
    tools: list[Tool] = field(default_factory=list)

    def __post_init__(self):
        self.tools = [
            Tool(name="add", description="Add.", parameters=SCHEMA, function=self.add),
        ]

    def add(self, a, b):
        if a < 0:
            raise ToolError("a must not be negative")
        self.used += 1
        return a + b

    def grade(self, answer):
        right = answer.strip() == str(self.total)
        score = 1.0 if right and self.used else 0.5 * right
        return Grade(score=score, parts={"right": float(right), "used": float(self.used > 0)})


class Adding:
    name = "adding"
    summary = "sums"

    def tasks(self, split, seed=0):
        for i in range(12):
            a, b = (i, 2) if split == "held_out" else (i, 30)
            yield Task(
                name=f"{split}-{i}",
                environment=self.name,
                prompt=f"{a}+{b}?",
                data={"a": a, "b": b},
            )

    @contextmanager
    def open(self, task):
        yield Sum(task.data["a"] + task.data["b"])

    def solve(self, task, call):
        return str(call("add", a=task.data["a"], b=task.data["b"]))


def make():
    return Adding()


def nothing():
    return 3
