"""What synthesis makes: a world (a database and tools), tasks in it, and how each is verified. All of it is data."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args

from train.agents.tools import JsonObject

Returns = Literal["value", "column", "row", "rows"]
Compare = Literal["exact", "number", "set"]
Rows = Sequence[Sequence[Any]]
NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What must hold for a call.

    Attributes:
        sql: A query whose first value is true where it holds; the tool's arguments are `:name`.
        error: What the policy is told where it does not.
    """

    sql: str
    error: str

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        _check(self, sql=str, error=str)


@dataclass(frozen=True, kw_only=True)
class SqlTool:
    """A tool as statements of SQL: it can do nothing but read and change its world.

    Attributes:
        name: Of the tool.
        description: For the policy.
        parameters: Name -> JSON schema; all are needed.
        guards: Looked at in order, before anything is changed.
        steps: Statements that change the world.
        result: A query of what is returned.
        returns: Its first value, its first column, its first row by column names, or all rows so.
    """

    name: str
    description: str
    parameters: Mapping[str, JsonObject] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    steps: tuple[str, ...] = ()
    result: str = "SELECT 'done'"
    returns: Returns = "value"

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        _check(self, name=str, description=str, parameters=dict, result=str)
        texts = (self.name, *self.steps, *self.parameters)
        schemas = all(isinstance(schema, dict) for schema in self.parameters.values())
        if (
            not all(isinstance(text, str) for text in texts)
            or not schemas
            or not NAME.fullmatch(self.name)
        ):
            raise TypeError(f"tool {self.name!r} has a name, a step or a parameter that is none")
        if self.returns not in get_args(Returns):
            raise TypeError(f"returns={self.returns!r} must be one of {get_args(Returns)}")


@dataclass(frozen=True, kw_only=True)
class World:
    """A made environment.

    Attributes:
        name: Unique in its folder.
        category: What it is about.
        script: SQL that makes and fills its tables.
        tools: In it.
        system: Words before the tools.
    """

    name: str
    category: str
    script: str
    tools: tuple[SqlTool, ...]
    system: str = ""

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        _check(self, name=str, category=str, script=str, system=str)
        if len({tool.name for tool in self.tools}) < len(self.tools):
            raise TypeError("two tools share a name")

    @classmethod
    def from_json(cls, text: str) -> "World":
        """Read what `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            The world.

        Raises:
            ValueError: If it has other fields.
        """
        return read_world(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Change:
    """What becomes of one table.

    Attributes:
        added: Rows that must be there in the end and were not before, in any order.
        removed: Rows that must be gone.
    """

    added: Rows = ()
    removed: Rows = ()

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        plain = (str, int, float, NoneType)
        for rows in (self.added, self.removed):
            if not all(
                isinstance(row, list | tuple) and all(isinstance(v, plain) for v in row)
                for row in rows
            ):
                raise TypeError("changes are lists of rows of plain values")


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """How an attempt is judged; it sees the database, which solutions do not.

    Attributes:
        answer: What the answer must be; None where any will do.
        compare: As texts without regard to case and space, as numbers to 1e-6, or as JSON lists without an order.
        changes: Table -> what becomes of it; the others must stay as they are. None leaves the state open.
        checks: Name -> query whose first value is true where the attempt is right. It sees the final tables, those
            `before.` it, and `:answer`.
    """

    answer: str | None = None
    compare: Compare = "exact"
    changes: Mapping[str, Change] | None = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        _check(self, answer=(str, NoneType), changes=(dict, NoneType), checks=dict)
        if self.compare not in get_args(Compare) or not all(
            isinstance(sql, str) for sql in self.checks.values()
        ):
            raise TypeError(f"compare must be one of {get_args(Compare)}, and checks texts")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task with all that belongs to it.

    Attributes:
        prompt: What is asked.
        solution: Python: `def solve(call)`, which returns the answer.
        verifier: Judges attempts.
        difficulty: From 0.
        kind: What sort of task it is, for statistics.
    """

    prompt: str
    solution: str
    verifier: Verifier
    difficulty: int = 0
    kind: str = ""

    def __post_init__(self) -> None:
        """Check types, as a model may have written it."""
        _check(self, prompt=str, solution=str, verifier=Verifier, difficulty=int, kind=str)

    @classmethod
    def from_json(cls, text: str) -> "Draft":
        """Read what `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            The draft.

        Raises:
            ValueError: If it has other fields.
        """
        return read_draft(json.loads(text))


def _check(made: Any, **types: Any) -> None:
    for name, kind in types.items():
        if not isinstance(getattr(made, name), kind):
            raise TypeError(f"{name} of a {type(made).__name__} must be of type {kind}")


def to_json(made: World | Draft) -> str:
    """Write a world or a draft as one line of JSON, the same for equal ones."""
    return json.dumps(dataclasses.asdict(made), sort_keys=True, ensure_ascii=False)


def read_world(data: Any) -> World:
    """Make a world of its JSON.

    Args:
        data: As `to_json` has it.

    Returns:
        The world.

    Raises:
        ValueError: If it has other fields.
    """
    try:
        tools = tuple(
            SqlTool(**{
                **tool,
                "guards": tuple(Guard(**guard) for guard in tool.get("guards", ())),
                "steps": tuple(tool.get("steps", ())),
            })
            for tool in data["tools"]
        )  # fmt: skip
        return World(**{**data, "tools": tools})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no world: {error}") from error


def read_draft(data: Any) -> Draft:
    """Make a draft of its JSON.

    Args:
        data: As `to_json` has it.

    Returns:
        The draft.

    Raises:
        ValueError: If it has other fields.
    """
    try:
        verifier = dict(data["verifier"])
        if verifier.get("changes") is not None:
            changes = verifier["changes"].items()
            verifier["changes"] = {table: Change(**change) for table, change in changes}
        return Draft(**{**data, "verifier": Verifier(**verifier)})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"no task: {error}") from error
