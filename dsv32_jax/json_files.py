"""JSON on disk that survives a crash: whole files by rename, lines with a torn end."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv32_jax.convert.storage import Location

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


def write_json(path: Location, value: Any) -> None:
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


def replace_text(path: Location, text: str) -> None:
    """Replace a file's text in one step.

    Args:
      path: the file; its folder must exist.
      text: the new content.

    Raises:
      OSError: the file system refused; the old file is untouched.
    """
    if not isinstance(path, Path):
        path.write_text(text)  # an object of a bucket appears when it is complete
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_object(path: Location) -> dict[str, Any]:
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


class LineWriter:
    """Appends lines to a file: to a local one at once, to an object of a bucket, which is written whole, at times."""

    def __init__(self, path: Location, *, seconds: float = 60.0) -> None:
        """Open the file.

        Args:
          path: the file; need not exist.
          seconds: between two writings of an object.
        """
        self._path, self._seconds = path, seconds
        self._file = (
            path.open("a", encoding="utf-8", buffering=1) if isinstance(path, Path) else None
        )
        self._text = path.read_text() if self._file is None and path.exists() else ""
        self._written, self._time = self._text, time.monotonic()

    def write(self, line: str) -> None:
        """Append a line.

        Args:
          line: ends in a newline.

        Raises:
          OSError: the storage refused.
        """
        if self._file is not None:
            self._file.write(line)
            return
        self._text += line
        if time.monotonic() - self._time >= self._seconds:
            self.flush()

    def flush(self) -> None:
        """Have every line in the file.

        Raises:
          OSError: the storage refused.
        """
        if self._file is None and self._text != self._written:
            self._path.write_text(self._text)
            self._written, self._time = self._text, time.monotonic()

    def close(self) -> None:
        """Flush and close.

        Raises:
          OSError: the storage refused.
        """
        self.flush()
        if self._file is not None:
            self._file.close()


def read_lines(path: Location) -> list[dict[str, Any]]:
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
