"""A world as it runs: SQLite in memory, fenced so that SQL a model wrote can only read and change its own tables."""

import collections
import functools
import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from train.agents.environment import Grade
from train.agents.synthesis.worlds import Change, SqlTool, Verifier, World
from train.agents.tools import Tool, ToolError

MAX_STEPS = 10_000  # of a thousand instructions of SQLite each, for one call
MAX_BYTES = 2**16  # of a text and a row
MAX_SCRIPT = 2**20
MAX_ROWS = 2_000  # that a tool returns
MAX_PAGES = 4_096  # of 4 KiB each
# Everything that differs from one time to the next, or leads out.
FORBIDDEN = {
    "random", "randomblob", "load_extension", "date", "time", "datetime", "julianday", "strftime",
    "unixepoch", "timediff", "current_date", "current_time", "current_timestamp", "changes",
    "total_changes", "readfile", "writefile", "zeroblob", "sqlite_version", "sqlite_source_id",
    "fts3_tokenizer",
}  # fmt: skip
READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
CREATES = {
    sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_TRANSACTION,
}  # fmt: skip
TOLERANCE = 1e-6


class WorldError(Exception):
    """A world, or a verifier in it, that does not work: says why, for its author to mend."""


class Database:
    """A world's tables, as an attempt changes them; a context manager.

    Args:
        world: The world.

    Raises:
        WorldError: If its script or tools do not work.
    """

    def __init__(self, world: World) -> None:
        """Build the tables, and a copy of them as they are before."""
        self._world = world
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.deserialize(build(world.script))
        self._db.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        self._db.execute("ATTACH ':memory:' AS before")
        self._db.deserialize(build(world.script), name="before")
        self.tables = [
            row[0]
            for row in self._db.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'")
        ]
        self._start_clock = _limit(self._db, READS | WRITES | {sqlite3.SQLITE_SAVEPOINT})

    def __enter__(self) -> "Database":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Forget it."""
        self.close()

    def close(self) -> None:
        """Forget it."""
        self._db.close()

    def tools(self) -> list[Tool]:
        """Return the world's tools, on these tables."""
        return [
            Tool(
                name=tool.name,
                description=tool.description,
                parameters={
                    "type": "object",
                    "properties": {key: dict(schema) for key, schema in tool.parameters.items()},
                    "required": list(tool.parameters),
                },
                function=functools.partial(self._run, tool),
            )
            for tool in self._world.tools
        ]

    def rows(self, table: str, schema: str = "main") -> list[tuple[Any, ...]]:
        """Return a table's rows.

        Args:
            table: Its name.
            schema: "before" for what they were.

        Returns:
            The rows, in no order that means anything.
        """
        return self._db.execute(f'SELECT * FROM {schema}."{table}"').fetchall()

    def state(self) -> str:
        """Return all that the tables hold as a text, the same for equal tables."""
        return json.dumps({table: sorted(self.rows(table), key=repr) for table in self.tables})

    def grade(self, verifier: Verifier, answer: str) -> Grade:
        """Judge an attempt.

        Args:
            verifier: The task's.
            answer: The final answer.

        Returns:
            1 if all holds, else 0.

        Raises:
            WorldError: If the verifier itself does not work.
        """
        self._start_clock()
        parts = {}
        if verifier.answer is not None:
            parts["answer"] = is_same(answer, verifier.answer, verifier.compare)
        if verifier.changes is not None:
            unknown = set(verifier.changes) - set(self.tables)
            if unknown:
                raise WorldError(f"the verifier names tables that are not there: {sorted(unknown)}")
            parts["state"] = all(
                self._change(table) == _counted(verifier.changes.get(table, Change()))
                for table in self.tables
            )
        for name, sql in verifier.checks.items():
            try:
                found = self._db.execute(sql, {"answer": answer}).fetchone()
            except (sqlite3.OperationalError, sqlite3.DataError) as error:
                # `:answer` need not be what the query takes it for, JSON for one.
                if "malformed JSON" not in str(error):
                    raise WorldError(f"check {name!r} does not work: {error}") from error
                found = None
            except (sqlite3.Error, sqlite3.Warning) as error:
                raise WorldError(f"check {name!r} does not work: {error}") from error
            parts[name] = bool(found and found[0])
        if not parts:
            raise WorldError("the verifier looks at nothing")
        failed = [name for name, held in parts.items() if not held]
        shown = {name: float(held) for name, held in parts.items()}
        note = f"wrong: {', '.join(failed)}" if failed else ""
        return Grade(score=float(not failed), parts=shown, note=note)

    def _change(self, table: str) -> tuple[Any, Any]:
        now, before = (
            collections.Counter(self.rows(table, schema)) for schema in ("main", "before")
        )
        return now - before, before - now

    def _run(self, tool: SqlTool, **arguments: Any) -> Any:
        for value in arguments.values():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ToolError(f"{tool.name}: {value} is too large")
        self._start_clock()
        try:
            for guard in tool.guards:
                found = self._db.execute(guard.sql, arguments).fetchone()
                if not (found and found[0]):
                    raise ToolError(guard.error)
            self._db.execute("SAVEPOINT call")
            try:
                for step in tool.steps:
                    self._db.execute(step, arguments)
                result = self._result(tool, arguments)
            except BaseException:
                self._db.execute("ROLLBACK TO call")
                raise
            finally:
                self._db.execute("RELEASE call")
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ToolError(f"{tool.name} does not work so: {error}") from error
        return result

    def _result(self, tool: SqlTool, arguments: Mapping[str, Any]) -> Any:
        cursor = self._db.execute(tool.result, arguments)
        rows = cursor.fetchmany(MAX_ROWS)
        if tool.returns == "column":
            return [row[0] for row in rows]
        names = [column[0] for column in cursor.description]
        if tool.returns == "rows":
            return [dict(zip(names, row, strict=True)) for row in rows]
        if not rows:
            raise ToolError(f"{tool.name}: nothing is found")
        return rows[0][0] if tool.returns == "value" else dict(zip(names, rows[0], strict=True))


@functools.lru_cache(maxsize=8)
def build(script: str) -> bytes:
    """Make a world's tables.

    Args:
        script: SQL.

    Returns:
        They, as SQLite keeps them.

    Raises:
        WorldError: If the script fails, or does what it may not.
    """
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        _limit(db, READS | WRITES | CREATES)
        db.executescript(script)
        db.set_authorizer(None)
        return db.serialize()
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise WorldError(f"the script fails: {error}") from error
    finally:
        db.close()


def _limit(db: sqlite3.Connection, allowed: set[int]) -> Callable[[], None]:
    """Allow some actions only, on `before` reading alone, and bound computing until what is returned is called."""
    steps = 0

    def may(
        action: int, first: str | None, second: str | None, schema: str | None, _: str | None
    ) -> int:
        if action not in allowed:
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN:
            return sqlite3.SQLITE_DENY
        if action in WRITES and schema == "before":
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def is_too_long() -> bool:
        nonlocal steps
        steps += 1
        return steps > MAX_STEPS

    def start_again() -> None:
        nonlocal steps
        steps = 0

    db.set_authorizer(may)
    db.set_progress_handler(is_too_long, 1_000)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SCRIPT)
    return start_again


def is_same(answer: str, reference: str, compare: str) -> bool:
    """Compare an answer with a reference.

    Args:
        answer: What a policy wrote.
        reference: The right answer.
        compare: As `Verifier.compare`.

    Returns:
        Whether they are the same.
    """
    if compare == "number":
        try:
            return abs(float(answer) - float(reference)) <= TOLERANCE
        except ValueError:
            return False
    if compare == "set":
        return _as_set(answer) == _as_set(reference) is not None
    return _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".")


def _as_set(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return sorted(_plain(str(item)) for item in found) if isinstance(found, list) else None


def _counted(change: Change) -> tuple[Any, Any]:
    added, removed = (
        collections.Counter(map(tuple, rows)) for rows in (change.added, change.removed)
    )
    return added, removed
