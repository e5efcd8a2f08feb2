"""What a folder holds, in figures: `summary.json` for programs, `report.md` for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.agents.synthesis.store import KEPT, Store

Rows = Sequence[Sequence[Any]]


def write_report(folder: Path, store: Store, seconds: float) -> dict[str, Any]:
    """Write both files.

    Args:
        folder: Where to.
        store: What is told about.
        seconds: That this start of the command took.

    Returns:
        The summary.
    """
    one = {name: store.count(query)[0][0] for name, query in SINGLES.items()}
    tables = {title: (heads, store.count(query)) for title, (heads, query) in TABLES.items()}
    summary = {**one, "seconds_of_last_start": round(seconds, 1)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    parts = ["# Synthetic environments\n", _table(("figure", "value"), list(summary.items()))]
    parts += [f"## {title}\n\n{_table(heads, rows)}" for title, (heads, rows) in tables.items()]
    samples = store.count(
        "SELECT name, difficulty, kind, json FROM task GROUP BY kind ORDER BY difficulty, kind"
    )
    parts.append("## One task of each kind\n")
    for name, difficulty, kind, text in samples:
        draft = json.loads(text)
        parts.append(
            f"**{kind}** ({name}, difficulty {difficulty}): {draft['prompt']}\n\n```python\n{draft['solution']}```\n"
        )
    (folder / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return summary


SINGLES = {
    "worlds": "SELECT count(*) FROM world",
    "tasks": "SELECT count(*) FROM task",
    "tasks_train": "SELECT count(*) FROM task WHERE NOT task_held_out AND NOT tools_held_out",
    "tasks_held_out": "SELECT count(*) FROM task WHERE task_held_out AND NOT tools_held_out",
    "tasks_held_out_tools": "SELECT count(*) FROM task WHERE tools_held_out",
    "rejected": "SELECT coalesce(sum(count), 0) FROM rejected",
    "tools_per_world": "SELECT round(avg(tools), 2) FROM world",
    "tools_added_by_harder_tasks": "SELECT coalesce(sum(added), 0) FROM world",
    "calls_per_solution": "SELECT round(avg(calls), 2) FROM task",
    "tried_with_a_policy": "SELECT count(*) FROM task WHERE attempts > 0",
    "kept_after_trial": f"SELECT count(*) FROM task WHERE attempts > 0 AND {KEPT}",
}
TABLES = {
    "Categories": (
        ("category", "worlds", "tasks", "mean tools"),
        "SELECT w.category, count(DISTINCT w.name), count(t.name), round(avg(w.tools), 1) FROM world w JOIN task t"
        " ON t.world = w.name GROUP BY w.category ORDER BY 1",
    ),
    "Difficulties": (
        ("difficulty", "tasks", "mean calls", "most calls", "attempts", "passed"),
        "SELECT difficulty, count(*), round(avg(calls), 1), max(calls), sum(attempts), sum(passed) FROM task"
        " GROUP BY 1 ORDER BY 1",
    ),
    "Kinds of tasks": (
        ("kind", "difficulty", "tasks", "mean calls"),
        "SELECT kind, min(difficulty), count(*), round(avg(calls), 1) FROM task GROUP BY 1 ORDER BY 2, 1",
    ),
    "Why drafts were not kept": (
        ("reason", "drafts"),
        "SELECT reason, sum(count) FROM rejected GROUP BY 1 ORDER BY 2 DESC",
    ),
}  # fmt: skip


def _table(heads: Sequence[str], rows: Rows) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
