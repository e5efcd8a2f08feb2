"""Files and folders, local or gs://, through one kind of path; what is written is whole or not there."""

import errno
import importlib.util
import logging
import os
import shutil
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from etils import epath

from dsv32_jax import errors

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
REMOTE_DRIVERS = {"gs://": "gcs", "s3://": "s3"}
REMOTE_PACKAGES = {"gs://": ("gcsfs", "dsv32-jax[gcs]"), "s3://": ("s3fs", "s3fs")}
EMULATOR = (
    "STORAGE_EMULATOR_HOST"  # a server that stands for Cloud Storage and asks for no credentials
)
PROBE_S = 30.0
PARTIAL_SUFFIX = ".partial"
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
# A path of this machine, or of a bucket. `Path("gs://x")` would be a folder gs: here, so texts go through `locate`.
type Location = Path | epath.Path


class Written(NamedTuple):
    """What a file must hold.

    Attributes:
        bytes: Its size.
        crc32: Of its content; None where it was not kept.
    """

    bytes: int
    crc32: int | None


def as_path(text: str | os.PathLike) -> epath.Path:
    """Return a path; a local one is made absolute.

    Args:
        text: A local path, or a URL such as gs://bucket/folder, which needs the package gcsfs.

    Returns:
        The path.

    Raises:
        UsageError: If the package for the URL is not installed.
    """
    text = os.fspath(text)
    for prefix, (package, install) in REMOTE_PACKAGES.items():
        if text.startswith(prefix) and not is_installed(package):
            raise errors.UsageError(f"{text} needs the package {package}: pip install '{install}'")
    return epath.Path(text) if is_remote(text) else epath.Path(Path(text).absolute())


def locate(text: str | os.PathLike) -> Location:
    """Return a path as people write it: one of this machine as it is, or a bucket's.

    Args:
        text: A local path, or a URL such as gs://bucket/folder, which needs the package gcsfs.

    Returns:
        The path.

    Raises:
        UsageError: If the package for the URL is not installed.
    """
    return as_path(text) if is_remote(text) else Path(text)


def absolute(path: Location) -> Location:
    """Return a path that does not depend on the working directory; epath's own takes a bucket's for a relative one."""
    return path.absolute() if isinstance(path, Path) else path


def size(path: Location) -> int:
    """Return a file's bytes."""
    return path.stat().st_size if isinstance(path, Path) else path.stat().length


def remove_folder(path: Location) -> None:
    """Remove a folder and all in it, if it is there."""
    if not isinstance(path, Path):
        path.rmtree(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def writing_problem(folder: str | os.PathLike, *, timeout_s: float = PROBE_S) -> str | None:
    """Write, read and delete a small file; return what is wrong, or None.

    Args:
        folder: Made if need be.
        timeout_s: Seconds to wait for the storage: a bucket's client tries again for minutes where there is no network,
            and a folder of a host that is gone may never answer.

    Raises:
        UsageError: If the package for a URL is not installed.
    """
    probe = as_path(folder) / f".probe.{uuid.uuid4().hex}"
    answer: list[str | None] = []
    thread = threading.Thread(target=lambda: answer.append(_try_writing(probe)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    problem = answer[0] if answer else f"no answer within {timeout_s:g} s"
    return problem and f"{folder} cannot be written: {problem}"


def _try_writing(probe: epath.Path) -> str | None:
    try:
        if os.fspath(probe).startswith("gs://") and not os.environ.get(EMULATOR):
            # gcsfs would go on without any, as nobody, and TensorStore would not.
            import google.auth  # of the extra gcs, as gcsfs is

            google.auth.default()
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        read = probe.read_text()
        probe.unlink()
    except Exception as error:  # noqa: BLE001  each kind of storage has its own errors
        why = reason(error) if isinstance(error, OSError) else str(error)
        return " ".join(why.split())[:300]
    return None if read == "x" else "it gave back something else than was written"


def real_path(text: str | os.PathLike) -> epath.Path:
    """Return a path as `as_path` does, a local one without symbolic links."""
    path = as_path(text)
    return path if is_remote(path) else epath.Path(os.path.realpath(path))


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def is_remote(path: str | os.PathLike) -> bool:
    """Tell a bucket's URL from a path of this machine."""
    return os.fspath(path).startswith(tuple(REMOTE_DRIVERS))


def kvstore(path: epath.Path) -> dict[str, Any]:
    """Say to TensorStore where a folder is.

    Args:
        path: A folder.

    Returns:
        Spec of its key-value store, a key being a file's name in the folder.
    """
    text = os.fspath(path)
    for prefix, driver in REMOTE_DRIVERS.items():
        if text.startswith(prefix):
            bucket, _, key = text.removeprefix(prefix).partition("/")
            return {"driver": driver, "bucket": bucket, "path": f"{key.strip('/')}/".lstrip("/")}
    return {"driver": "file", "path": f"{text.rstrip('/')}/"}


def partial_name(path: epath.Path) -> epath.Path:
    """Return the name that a local file has while it is written."""
    return path.parent / f".{path.name}{PARTIAL_SUFFIX}"


def remove_partials(folder: epath.Path) -> None:
    """Remove what processes that were killed left half-written below a local folder; nobody may be writing there.

    Args:
        folder: The folder.
    """
    if not is_remote(folder):
        for path in Path(folder).rglob(f".*{PARTIAL_SUFFIX}"):
            path.unlink(missing_ok=True)


def write(path: epath.Path, data: bytes | memoryview) -> None:
    """Write a file in one step: by renaming a local one; an object of a bucket appears when it is complete.

    Args:
        path: The file; its folder must exist.
        data: The content.

    Raises:
        OSError: If the storage refuses.
    """
    if is_remote(path):
        path.write_bytes(cast(bytes, data))
        return
    partial = Path(partial_name(path))
    try:
        with partial.open("wb") as file:
            file.write(data)
        partial.replace(Path(path))
    finally:
        partial.unlink(missing_ok=True)


def write_array(path: epath.Path, array: np.ndarray) -> Written:
    """Write an array's bytes, row by row, as a file.

    Args:
        path: The file; its folder must exist.
        array: The array.

    Returns:
        Size and checksum.

    Raises:
        OSError: If the storage refuses.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    write(path, data)
    return Written(data.nbytes, zlib.crc32(data))


def measure(path: epath.Path) -> Written:
    """Read a file once.

    Args:
        path: The file.

    Returns:
        Size and checksum of what it holds.

    Raises:
        OSError: If it cannot be read.
    """
    size = crc = 0
    for chunk in read_chunks(path):
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return Written(size, crc)


def find_damage(folder: epath.Path, name: str, want: Written) -> str | None:
    """Read a file and compare it with what it must hold.

    Args:
        folder: The folder that names are relative to.
        name: The file.
        want: Size and checksum.

    Returns:
        What is wrong, or None.
    """
    try:
        found = measure(folder / name)
    except FileNotFoundError:
        return f"{folder / name} is missing"
    if found.bytes != want.bytes:
        return f"{folder / name} has {found.bytes} bytes instead of {want.bytes}"
    if want.crc32 not in (None, found.crc32):
        return f"{folder / name} does not hold what was written (its checksum differs)"
    return None


def read_chunks(path: Location) -> Iterator[bytes]:
    """Yield a file's content in pieces of a few MiB."""
    with path.open("rb") as file:
        while chunk := cast(bytes, file.read(CHUNK_BYTES)):
            yield chunk


def copy(source: epath.Path, target: epath.Path) -> Written:
    """Copy a file whole or not at all, making the folders above it.

    Args:
        source: The file.
        target: The copy.

    Returns:
        Size and checksum of what was copied.

    Raises:
        OSError: If the storage refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    size = crc = 0
    with Replacing(target) as file:
        for chunk in read_chunks(source):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    return Written(size, crc)


class Replacing:
    """A file being written piece by piece that takes its name when the `with` block ends without an error.

    It is a context manager because it must take a torn file away again.
    """

    def __init__(self, path: epath.Path) -> None:
        """Name the file.

        Args:
            path: The file; its folder must exist.
        """
        self._path = path
        self._partial = partial_name(path)

    def __enter__(self) -> Any:
        """Open it under its partial name."""
        self._file = self._partial.open("wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close it, and rename or remove it."""
        try:
            self._file.close()
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)


def file_names(folder: epath.Path) -> list[str]:
    """List the regular files below a folder, hidden ones and those in hidden folders left out.

    Args:
        folder: The folder; need not exist.

    Returns:
        Relative names, sorted.
    """
    if not folder.is_dir():
        return []
    names = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names += [f"{path.name}/{name}" for name in file_names(path)]
        elif is_remote(path) or Path(path).is_file():  # a local epath.Path takes a pipe for a file
            names.append(path.name)
        else:
            logger.warning("leaving out %s, which is no regular file", path)
    return names


def reason(error: OSError) -> str:
    """Return why the storage refused, a full disk in plain words."""
    return "the disk is full" if error.errno in FULL_DISK else error.strerror or str(error)


def sizes(entries: Mapping[str, Written]) -> int:
    """Return the bytes of many files together."""
    return sum(entry.bytes for entry in entries.values())
