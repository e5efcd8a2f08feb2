"""A checkpoint's list of files with sizes and checksums, by which a damaged one is known."""

import json
import os
import zlib
from concurrent import futures
from pathlib import Path
from typing import Any

from dsv32_jax import json_files
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location

MANIFEST = "manifest.json"
STATE = "state"  # the folder of a checkpoint's arrays
ORBAX_METADATA = "_CHECKPOINT_METADATA"
# Orbax writes these two after it has asked for the manifest; only from a bucket does it restore nothing without the
# second, which stands in the checkpoint's folder and in each folder in it.
ORBAX_COMMIT = "commit_success.txt"
LATER_FILES = frozenset({ORBAX_METADATA, ORBAX_COMMIT})


def write_manifest(folder: Location, *, checksums: bool, metric: float | None) -> None:
    """Write `manifest.json` for every file below a folder, as the last file to go in.

    Args:
      folder: a checkpoint whose other files are complete.
      checksums: also record each file's CRC-32, which reads the whole checkpoint once.
      metric: the figure by which this checkpoint is ranked, lower being better; kept with it.

    Raises:
      OSError: a file can not be read, or the manifest not be written.
    """
    names = sorted(_file_names(folder))
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # zlib lets go of the interpreter lock, so threads do run side by side here.
        sums = list(pool.map(lambda name: _crc32(folder / name) if checksums else None, names))
    files = {
        name: {"bytes": storage.size(folder / name), "crc32": crc}
        for name, crc in zip(names, sums, strict=True)
    }
    json_files.write_json(folder / MANIFEST, {"metric": metric, "files": files})


def find_damage(folder: Location, *, checksums: bool) -> str | None:
    """Compare a checkpoint with its manifest.

    Args:
      folder: the checkpoint.
      checksums: read every file and compare its CRC-32; otherwise only presence and size.

    Returns:
      None where the checkpoint is whole, else what is wrong with the first bad file.
    """
    try:
        entries = read_manifest(folder)["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValueError as error:
        return str(error)
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = storage.size(path)
        if size != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
    if not checksums:
        return None
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        sums = pool.map(lambda name: _crc32(folder / name), entries)
        for (name, entry), crc in zip(entries.items(), sums, strict=True):
            if entry["crc32"] not in (None, crc):
                return f"{name} does not hold what was written (its checksum differs)"
    return None


def read_manifest(folder: Location) -> dict[str, Any]:
    """Read a checkpoint's manifest.

    Args:
      folder: the checkpoint.

    Returns:
      `metric` (a number or None) and `files`, a dict from relative name to `bytes` and `crc32`.

    Raises:
      FileNotFoundError: there is no manifest, so the checkpoint was never finished.
      ValueError: the manifest itself is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        complete = all(entry.keys() >= {"bytes", "crc32"} for entry in content["files"].values())
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        complete = False
    if not complete:
        raise ValueError(f"{MANIFEST} is damaged")
    return content


def _file_names(folder: Location) -> list[str]:
    if isinstance(folder, Path):
        paths = (path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
    else:
        names = storage.file_names(folder)
    return [name for name in names if name not in LATER_FILES and name != MANIFEST]


def _crc32(path: Location) -> int:
    crc = 0
    for chunk in storage.read_chunks(path):
        crc = zlib.crc32(chunk, crc)
    return crc
