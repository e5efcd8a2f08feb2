"""Threads and processes that share a conversion: who does what, that all of it is done, and that it is on the disk."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from dsv32_jax import errors
from dsv32_jax.convert import journal, pool, storage
from dsv32_jax.convert.storage import Written

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ATTEMPTS = 2  # to write a file that can be read back


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What works on a conversion.

    Attributes:
        threads: Tensors or files at a time, in this process.
        process_index: Number of this process.
        process_count: Processes that share the work, over one file system.
        flush_seconds: Work that a killed process may lose.
    """

    threads: int = min(8, os.cpu_count() or 1)
    process_index: int = 0
    process_count: int = 1
    flush_seconds: float = journal.FLUSH_SECONDS

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.process_index == 0


@dataclass(frozen=True, kw_only=True)
class Items:
    """Pieces of work that fill files.

    Attributes:
        folder: What the files' names are relative to.
        sizes: Bytes of each item, for the progress line; the order is that of the work.
        files: Names and sizes of the files that an item fills.
        make: Does an item; returns its files.
    """

    folder: epath.Path
    sizes: Mapping[str, int]
    files: Callable[[str], Mapping[str, int]]
    make: Callable[[str], Mapping[str, Written]]

    def share(self, workers: Workers) -> list[str]:
        """Return this process's items: neighbours, of an equal part of the bytes."""
        total, before, share = sum(self.sizes.values()), 0, []
        for name, size in self.sizes.items():
            if before * workers.process_count // max(total, 1) == workers.process_index:
                share.append(name)
            before += size
        return share


def check_space(items: Items, done: Container[str]) -> None:
    """Refuse at once what cannot fit on a local disk.

    Args:
        items: The work.
        done: Items whose files are there.

    Raises:
        WorkFailedError: If less is free than the rest needs.
    """
    if storage.is_remote(items.folder):
        return
    there = next(path for path in (items.folder, *items.folder.parents) if path.is_dir())
    left = sum(size for name, size in items.sizes.items() if name not in done)
    free = shutil.disk_usage(Path(there)).free
    if left > free:
        raise errors.WorkFailedError(
            f"the disk of {there} is full: {left / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free"
        )


def do_share(items: Items, notes: journal.Journal, workers: Workers) -> int:
    """Do this process's share of the items that are not done yet, and read all files again.

    Args:
        items: The work.
        notes: What is done.
        workers: This process.

    Returns:
        How many items of the share were done before.

    Raises:
        WorkFailedError: If a file twice does not hold what was written.
    """
    share = items.share(workers)
    files, verified = notes.finished()
    left = [name for name in share if name not in files]
    if len(left) < len(share):
        logger.info("going on: %d of %d parts were done before", len(share) - len(left), len(share))
    _make(items, notes, workers, left)
    unsure = [name for name in share if name not in verified]
    for attempt in range(ATTEMPTS):
        files, _ = notes.finished()
        damaged = find_damaged(items, {name: files[name] for name in unsure}, workers.threads)
        for name, damage in damaged.items():
            if attempt + 1 == ATTEMPTS:
                raise errors.WorkFailedError(f"{name}: {damage}, though it was written twice")
            logger.warning("converting %s again: %s", name, damage)
        notes.add_verified(name for name in unsure if name not in damaged)
        if not damaged:
            break
        unsure = list(damaged)
        _make(items, notes, workers, unsure)
    return len(share) - len(left)


def _make(items: Items, notes: journal.Journal, workers: Workers, names: Sequence[str]) -> None:
    progress = pool.Progress("converting", sum(items.sizes[name] for name in names))

    def work(name: str) -> None:
        notes.add(name, items.make(name))
        progress.add(items.sizes[name])

    try:
        pool.run_all(work, names, threads=workers.threads)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk has been told of
            notes.flush()
        raise
    finally:
        progress.close()
    notes.flush()


def find_damaged(
    items: Items, written: Mapping[str, Mapping[str, Written]], threads: int
) -> dict[str, str]:
    """Read files again.

    Args:
        items: The work.
        written: Each item's files with what they must hold.
        threads: How many at a time.

    Returns:
        What is wrong, by item in the order given; empty where all is well.
    """
    damaged: dict[str, str] = {}
    progress = pool.Progress("verifying", sum(map(storage.sizes, written.values())))

    def work(name: str) -> None:
        sizes = {file: entry.bytes for file, entry in written[name].items()}
        if sizes != items.files(name):
            damaged[name] = f"files {sizes} were written instead of {items.files(name)}"
        for file, entry in written[name].items():
            damage = storage.find_damage(items.folder, file, entry)
            if damage is not None:
                damaged[name] = damage
            progress.add(entry.bytes)

    try:
        pool.run_all(work, list(written), threads=threads)
    finally:
        progress.close()
    return {name: damaged[name] for name in written if name in damaged}


def collect(items: Items, notes: journal.Journal) -> dict[str, Written]:
    """Wait until every process's share is done and verified.

    Args:
        items: The work.
        notes: What is done.

    Returns:
        All files, by name.
    """
    wait_for(lambda: items.sizes.keys() <= notes.finished()[1])
    files, _ = notes.finished()
    return merge(files[name] for name in items.sizes)


def merge(files: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
    """Put the files of several items together."""
    return {name: entry for part in files for name, entry in part.items()}


def wait_for(is_there: Callable[[], bool]) -> None:
    """Wait for other processes; where one of them dies, jax.distributed ends this one too.

    Args:
        is_there: Whether what is waited for has come.
    """
    while not is_there():
        time.sleep(POLL_SECONDS)
