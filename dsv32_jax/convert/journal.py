"""What a conversion has finished, in files beside its result, so that an interrupted one goes on where it was.

Each process writes its own files, a new one every few seconds because objects in a bucket cannot be appended to. A line
is written after the files that it speaks of; so at worst the last seconds' work is done again.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from dsv32_jax import errors, json_files
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Written

FOLDER = "conversion"
PLAN = "plan.json"
FLUSH_SECONDS = 2.0


class Journal:
    """The finished items of one conversion: each item's files with their sizes and checksums."""

    def __init__(self, target: epath.Path, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        """Look after a conversion's notes.

        Args:
            target: The conversion's result.
            flush_seconds: How much work may be lost.
        """
        self._folder = target / FOLDER
        self._flush_seconds = flush_seconds
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._prefix = f"{time.time_ns()}-{os.getpid()}"
        self._count = 0

    def has_begun(self) -> bool:
        """Tell whether the first process has written down what is converted."""
        return (self._folder / PLAN).is_file()

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Bind the result to a source and options; the first process writes them down, all compare.

        Args:
            identity: What makes the result, as JSON.

        Raises:
            UsageError: If the folder holds another conversion, or something else.
            WorkFailedError: If the notes of what is converted are damaged.
        """
        path = self._folder / PLAN
        if not path.is_file():
            target = self._folder.parent
            if target.is_dir() and any(p.name != FOLDER for p in target.iterdir()):
                raise errors.UsageError(
                    f"{target} is not empty and holds no conversion to go on with"
                )
            self._folder.mkdir(parents=True, exist_ok=True)
            storage.write(path, json.dumps(identity, indent=2).encode())
            return
        try:
            before = json_files.read_object(path)
        except ValueError as error:
            raise errors.WorkFailedError(
                f"{error}; remove {self._folder.parent} to convert again"
            ) from error
        changed = sorted(
            k for k in before.keys() | identity.keys() if before.get(k) != identity.get(k)
        )
        if changed:
            raise errors.UsageError(
                f"{self._folder.parent} was begun from another source or with other options "
                f"({', '.join(changed)} changed); give another folder, or remove this one"
            )

    def finished(self) -> tuple[dict[str, dict[str, Written]], set[str]]:
        """Read all processes' notes.

        Returns:
            The files by finished item, of the last time where it was done again, and the items that are verified too.

        Raises:
            WorkFailedError: If a note is damaged.
        """
        files: dict[str, dict[str, Written]] = {}
        verified: set[str] = set()
        if not self._folder.is_dir():
            return files, verified
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name):
            if not path.name.endswith(".jsonl"):
                continue
            try:
                self._read(path, files, verified)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise errors.WorkFailedError(
                    f"{path} is damaged; remove {self._folder.parent} to convert again"
                ) from error
        return files, verified

    def _read(
        self, path: epath.Path, files: dict[str, dict[str, Written]], verified: set[str]
    ) -> None:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "verified" in row:
                verified.update(row["verified"])
            else:
                files[row["item"]] = {n: Written(*entry) for n, entry in row["files"].items()}

    def add(self, item: str, files: Mapping[str, Written]) -> None:
        """Note that an item's files are complete.

        Args:
            item: The item.
            files: Its files.
        """
        self._append({"item": item, "files": files})

    def add_verified(self, items: Iterable[str]) -> None:
        """Note that items' files have been read again and are right, at once."""
        self._append({"verified": sorted(items)})
        self.flush()

    def _append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._lines.append(json.dumps(row) + "\n")
            due = time.monotonic() - self._flushed >= self._flush_seconds
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        with self._lock:
            if self._lines:
                path = self._folder / f"{self._prefix}-{self._count:08d}.jsonl"
                storage.write(path, "".join(self._lines).encode())
                self._count += 1
            self._lines = []
            self._flushed = time.monotonic()

    def remove(self) -> None:
        """Remove all notes."""
        self._folder.rmtree()

    def clear(self) -> None:
        """Remove the notes of a conversion that is whole, but for what it was made from."""
        for path in self._folder.iterdir():
            if path.name.endswith(".jsonl"):
                path.unlink()
