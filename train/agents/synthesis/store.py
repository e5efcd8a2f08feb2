"""The folder that synthesis fills: one SQLite file, so that worlds cost no memory and a stop loses nothing."""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dsv32_jax.errors import UsageError
from train.agents.environment import Split
from train.agents.environments.drawing import split_of
from train.agents.synthesis.procedural import Made
from train.agents.synthesis.worlds import Draft, World, to_json

FILE = "synthetic.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS world (
  name TEXT PRIMARY KEY, number INTEGER UNIQUE, category TEXT, tools_held_out INTEGER, digest TEXT UNIQUE, tools
  INTEGER,
  added INTEGER, json TEXT);
CREATE TABLE IF NOT EXISTS task (
  name TEXT PRIMARY KEY, world TEXT, task_held_out INTEGER, tools_held_out INTEGER, difficulty INTEGER, kind TEXT,
  calls INTEGER, digest TEXT UNIQUE, json TEXT, solution TEXT, attempts INTEGER DEFAULT 0, passed INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS rejected (number INTEGER, reason TEXT, count INTEGER);
CREATE TABLE IF NOT EXISTS finished (number INTEGER PRIMARY KEY);
"""

HeldOut = Literal["both", "tasks", "tools"]
WHERE: Mapping[tuple[Split, HeldOut], str] = {
    ("train", "both"): "NOT task_held_out AND NOT tools_held_out",
    ("train", "tasks"): "NOT task_held_out AND NOT tools_held_out",
    ("train", "tools"): "NOT task_held_out AND NOT tools_held_out",
    ("held_out", "both"): "(task_held_out OR tools_held_out)",
    ("held_out", "tasks"): "task_held_out AND NOT tools_held_out",
    ("held_out", "tools"): "tools_held_out",
}
# Tasks that the policy they were tried with always or never solved teach it nothing.
KEPT = "(attempts = 0 OR (passed > 0 AND passed < attempts))"


class Store:
    """A folder of worlds and tasks; a context manager.

    Args:
        folder: The folder.
        create: Make it where it is not there yet.

    Raises:
        UsageError: If there is none, and none is to be made.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        """Open it."""
        path = folder / FILE
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not path.is_file():
            raise UsageError(
                f"{folder} holds no synthetic environments: it has no {FILE}; see python -m train.synthesize"
            )
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        if create:
            self._db.executescript(SCHEMA)

    def __enter__(self) -> "Store":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._db.close()

    def claim(self, about: Mapping[str, Any]) -> None:
        """Say what fills the folder, so that nothing else does.

        Args:
            about: Author and settings.

        Raises:
            UsageError: If the folder was begun with others: says which.
        """
        with self._db:
            for key, value in about.items():
                text = json.dumps(value)
                self._db.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (key, text))
                (known,) = self._db.execute(
                    "SELECT value FROM about WHERE key = ?", (key,)
                ).fetchone()
                if known != text:
                    raise UsageError(
                        f"the folder was begun with {key}={known}, not {text}; take another folder"
                    )

    def unfinished(self, count: int) -> list[int]:
        """Return the numbers below `count` of worlds that are still to be made."""
        done = {row[0] for row in self._db.execute("SELECT number FROM finished")}
        return [number for number in range(count) if number not in done]

    def add(
        self, number: int, made: Made, held_out_categories: frozenset[str] = frozenset()
    ) -> int:
        """Keep a world, all at once, unless there is one like it already.

        Args:
            number: Of the world.
            made: It and its tasks.
            held_out_categories: Whose worlds are all held out.

        Returns:
            The number of tasks that were kept.
        """
        world, rejected, kept = made.world, made.rejected, 0
        tools_held_out = world.category in held_out_categories or split_of(world.name) == "held_out"
        digest = _digest(world.script, json.dumps([tool.name for tool in world.tools]))
        with self._db:
            self._db.execute("INSERT INTO finished VALUES (?)", (number,))
            known = self._db.execute("SELECT 1 FROM world WHERE digest = ?", (digest,)).fetchone()
            if known:
                rejected["world seen before"] += len(made.tasks)
            elif made.tasks:
                row = (
                    world.name,
                    number,
                    world.category,
                    tools_held_out,
                    digest,
                    len(world.tools),
                    made.added,
                    to_json(world),
                )
                self._db.execute(f"INSERT INTO world VALUES ({', '.join('?' * len(row))})", row)
                for place, (draft, outcome) in enumerate(made.tasks):
                    kept += self._add_task(world, place, draft, outcome, tools_held_out, rejected)
            rows = [(number, reason, count) for reason, count in rejected.items()]
            self._db.executemany("INSERT INTO rejected VALUES (?, ?, ?)", rows)
        return kept

    def _add_task(
        self,
        world: World,
        place: int,
        draft: Draft,
        outcome: Any,
        tools_held_out: bool,
        rejected: Any,
    ) -> int:
        digest = _digest(world.script, draft.prompt)
        calls = [[made.name, dict(made.arguments)] for made in outcome.calls]
        solution = json.dumps({"calls": calls, "answer": outcome.answer})
        held_out = split_of(f"{world.category} {draft.prompt}") == "held_out"
        row = (
            *(f"{world.name}-{place}", world.name, held_out, tools_held_out, draft.difficulty),
            *(draft.kind, len(calls), digest, to_json(draft), solution),
        )
        cursor = self._db.execute(
            "INSERT OR IGNORE INTO task (name, world, task_held_out, tools_held_out, difficulty, kind, calls,"
            " digest, json,"
            f" solution) VALUES ({', '.join('?' * len(row))})",
            row,
        )
        if cursor.rowcount == 0:
            rejected["task seen before"] += 1
        return cursor.rowcount

    def set_rate(self, task: str, attempts: int, passed: int) -> None:
        """Keep how often a policy solved a task."""
        with self._db:
            self._db.execute(
                "UPDATE task SET attempts = ?, passed = ? WHERE name = ?", (attempts, passed, task)
            )

    def names(self, split: Split, held_out: HeldOut, *, all_rates: bool = False) -> list[str]:
        """Return the names of the tasks of a split.

        Args:
            split: Which.
            held_out: What of the held-out ones: tasks in worlds that are trained in, worlds that are not, or both.
            all_rates: Those too that a policy always or never solved.

        Returns:
            Names, in the order that they were made.
        """
        kept = "" if all_rates else f" AND {KEPT}"
        query = f"SELECT name FROM task WHERE {WHERE[split, held_out]}{kept} ORDER BY rowid"
        return [row["name"] for row in self._db.execute(query)]

    def untried(self) -> list[str]:
        """Return the names of tasks that no policy tried."""
        return [
            row["name"]
            for row in self._db.execute("SELECT name FROM task WHERE attempts = 0 ORDER BY rowid")
        ]

    def task(self, name: str) -> tuple[Draft, str, dict[str, Any]]:
        """Return a task.

        Args:
            name: Of it.

        Returns:
            The draft, its world's name, and its solution's calls and answer.

        Raises:
            UsageError: If there is none.
        """
        row = self._db.execute(
            "SELECT json, world, solution FROM task WHERE name = ?", (name,)
        ).fetchone()
        if row is None:
            raise UsageError(f"there is no synthetic task {name!r}")
        return Draft.from_json(row["json"]), row["world"], json.loads(row["solution"])

    def world(self, name: str) -> World:
        """Return a world by its name."""
        (text,) = self._db.execute("SELECT json FROM world WHERE name = ?", (name,)).fetchone()
        return World.from_json(text)

    def count(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query, for the report."""
        return [tuple(row) for row in self._db.execute(query)]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
