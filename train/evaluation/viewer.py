"""A page to look through trajectories: one HTML file that asks nothing of the network.

What a model wrote never becomes markup: the list is JSON without "<", the trajectories are compressed and in base64,
and the page's own script, which its security policy names by hash, shows text as text. A browser unpacks a trajectory
when it is opened, and all of them when text is searched.
"""

import argparse
import base64
import gzip
import hashlib
import html
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dsv32_jax import command_line, json_files
from dsv32_jax.errors import UsageError

FIELDS = ("task", "environment", "policy", "sample", "solved", "score", "end", "steps", "tokens")
PER_CHUNK = 64
SUMMARY = (
    "Write trajectories as one HTML page: a list to filter and search, and each turn's thinking, calls and results. "
    "The page needs no other file and no network."
)
EXAMPLES = """
python -m train.evaluation.viewer runs/evaluate/trajectories.jsonl
python -m train.evaluation.viewer a.jsonl b.jsonl --out both.html --title 'a against b'
"""


def write_page(records: Iterable[Mapping[str, Any]], path: Path, *, title: str) -> int:
    """Write a page of trajectories.

    Args:
        records: Lines of a trajectory file, see `attempts`; of other files those of its fields that they have. They
            are read one by one.
        path: The page.
        title: Its heading.

    Returns:
        How many trajectories it holds.
    """
    rows: list[list[Any]] = []
    data: list[str] = []
    for batch in itertools.batched(records, PER_CHUNK):
        rows += [_row(record) for record in batch]
        packed = gzip.compress(json.dumps([_detail(record) for record in batch]).encode(), mtime=0)
        text = base64.b64encode(packed).decode()
        data.append(f'<script type="text/plain" id="chunk{len(data)}">{text}</script>')
    index = {"fields": FIELDS, "rows": rows, "perChunk": PER_CHUNK}
    listed = json.dumps(json_files.without_non_finite(index)).replace("<", "\\u003c")
    data.insert(0, f'<script type="application/json" id="index">{listed}</script>')
    page = resources.files("train.evaluation").joinpath("page.html").read_text("utf-8")
    script, style = (
        _hash(page, tag) for tag in ("script", "style")
    )  # of the page as it stands: data come after
    # In one pass, so that no text put in is looked at again.
    parts = {
        "PAGE_TITLE": html.escape(title),
        "PAGE_DATA": "\n".join(data),
        "SCRIPT_HASH": script,
        "STYLE_HASH": style,
    }
    filled = re.sub("|".join(parts), lambda found: parts[found.group()], page)
    json_files.replace_text(path, filled)
    return len(rows)


def _hash(page: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found is not None, f"the page has no {tag}"
    return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


def _row(record: Mapping[str, Any]) -> list[Any]:
    """Return what the list shows, in the order of FIELDS."""
    grade = record.get("grade") or {}
    score = grade.get("score")
    text = {name: str(record.get(name) or "") for name in ("task", "environment", "policy", "end")}
    numbers = {name: record.get(name) or 0 for name in ("sample", "steps", "tokens")}
    row = {**text, **numbers, "score": score, "solved": score == 1}
    return [row[name] for name in FIELDS]


def _detail(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of one trajectory."""
    grade = record.get("grade") or {}
    facts = [("checks", f"{name}: {value:g}") for name, value in grade.get("parts", {}).items()]
    facts += [("note", grade["note"])] if grade.get("note") else []
    facts += [
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in record.items()
        if name not in ("grade", "messages", "task") and value not in (None, "", [], {})
    ]
    messages = [
        {"role": str(message.get("role", "?")), "shown": _shown(message)}
        for message in record.get("messages", [])
    ]
    return {"facts": facts, "messages": messages}


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return {
        "thinking": message.get("reasoning_content") or "",
        "content": content if isinstance(content, str) else json.dumps(content, indent=1),
        "calls": [(str(call.get("name", "?")), _arguments(call)) for call in calls],
    }


def _arguments(call: Mapping[str, Any]) -> str:
    """Return a call's arguments, one a line where they can be read, text as it is."""
    given = call.get("arguments", "")
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return str(given)
    if not isinstance(found, dict):
        return str(given)
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in found.items()}
    return "\n".join(f"{name}: {value}" for name, value in values.items())


def read_records(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Read trajectory files line by line.

    Args:
        paths: The files.

    Yields:
        The records; a last line that a crash has torn is left out.

    Raises:
        UsageError: If a file is not there, or a line is no trajectory.
    """
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no file {path}")
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    if not line.endswith("\n"):
                        return
                    raise UsageError(f"{path}, line {number}: not JSON: {error}") from error
                if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
                    raise UsageError(f"{path}, line {number}: no trajectory: it has no messages")
                yield record


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None reads the command line.

    Returns:
        The exit status.
    """
    with command_line.Boundary(resumes=False) as boundary, command_line.sigterm_raises():
        parser = command_line.Parser(
            name="python -m train.evaluation.viewer", summary=SUMMARY, examples=EXAMPLES
        )
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines")
        parser.add_argument(
            "--out", type=Path, help="the page (default: the first file's name with .html)"
        )
        parser.add_argument("--title", help="its heading (default: the first file's folder)")
        args: argparse.Namespace = parser.parse_args(argv)
        out = args.out or args.files[0].with_suffix(".html")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: no folder {out.parent}")
        title = args.title or args.files[0].absolute().parent.name
        n = write_page(read_records(args.files), out, title=title)
        sys.stdout.write(f"{n} trajectories in {out}\n")
    return boundary.status


if __name__ == "__main__":
    sys.exit(main())
