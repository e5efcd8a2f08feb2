"""JSON on disk that survives a crash: whole files by rename, lines with a torn end."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

logger = logging.getLogger(__name__)


def without_non_finite(value: Any) -> Any:
    """Replace each NaN and infinity in a JSON-like value by None.

    JSON has no spelling for them, and other readers refuse what Python writes in their place.

    Args:
      value: nested mappings, sequences and scalars.

    Returns:
      The same value with dicts and lists as containers and None for each non-finite float.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_non_finite(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old file or the new one, never a part.

    Args:
      path: the file; its folder must exist.
      value: what to write; non-finite floats become null.

    Raises:
      OSError: the file system refused; the old file is untouched.
      TypeError: value holds something that JSON has no form for.
    """
    text = json.dumps(without_non_finite(value), indent=2, allow_nan=False) + "\n"
    replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text in one step.

    Args:
      path: the file; its folder must exist.
      text: the new content.

    Raises:
      OSError: the file system refused; the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_object(path: Path | epath.Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
      path: the file, local or in a bucket.

    Returns:
      The object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # broken JSON, broken UTF-8, nested too deeply
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object")
    return raw


def line_of(row: Mapping[str, Any]) -> str:
    """Return one JSON-lines row, newline included, with null for non-finite floats.

    Args:
      row: the row's fields.

    Returns:
      One line of JSON ending in a newline.
    """
    return json.dumps(without_non_finite(row), allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, leaving out what a crash tore.

    A last line that does not parse is left out silently: that is how a killed writer ends.
    One further up is left out with a warning.

    Args:
      path: the file.

    Returns:
      The rows in order; empty where the file does not exist.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            logger.warning("%s line %d is not a JSON object and is left out", path, number)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # covers broken JSON and broken UTF-8
        return None
    return row if isinstance(row, dict) else None
