"""Find the files of a source and tell their format by suffix."""

import glob
import pathlib
from typing import Literal

from etils.epath import backend

from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location

FileFormat = Literal["text", "jsonl", "parquet", "tokens"]

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # suffix -> pyarrow's name
# Plain .json is left out: beside a corpus it is nearly always something else. Compressed, it is
# how C4 and its descendants name their JSON lines.
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
PARQUET_SUFFIXES = (".parquet",)
TOKEN_SUFFIXES = (".array_record",)
TEXT_SUFFIXES = tuple(
    suffix + compression
    for suffix in (
        *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp"),
        *(".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"),
    )
    for compression in ("", *COMPRESSIONS)
)
_SUFFIXES: tuple[tuple[FileFormat, tuple[str, ...]], ...] = (
    ("jsonl", JSONL_SUFFIXES),
    ("parquet", PARQUET_SUFFIXES),
    ("tokens", TOKEN_SUFFIXES),
    ("text", TEXT_SUFFIXES),
)


def file_format(path: Location) -> FileFormat | None:
    """Tell a file's format by its suffix.

    Args:
        path: the file; it need not exist.

    Returns:
        the format, or None for an unknown suffix.
    """
    name = path.name.lower()
    return next((form for form, suffixes in _SUFFIXES if name.endswith(suffixes)), None)


def list_files(path: str) -> list[Location]:
    """List the files of a file, folder or glob, sorted by path.

    A folder is searched recursively; hidden entries and unknown suffixes in it are passed over.
    A file named directly or by a glob must have a known suffix. An existing path is never read
    as a glob.

    Args:
        path: the file, folder or glob, of a bucket too (gs://); `~` is expanded.

    Returns:
        at least one file.

    Raises:
        FileNotFoundError: there is no such path, or the glob matches no file.
        ValueError: a named file has an unknown suffix, or a folder holds no known file.
    """
    root = storage.locate(path).expanduser()
    if root.is_dir():
        return _files_of_folder(root)
    if root.exists():
        files = [root]
    elif glob.has_magic(path):
        files = sorted(file for file in _matches(root) if file.is_file())
        if not files:
            raise FileNotFoundError(f"source {path!r}: the glob matches no file")
    else:
        raise FileNotFoundError(f"source {path!r}: no such file or folder")
    for file in files:
        if file_format(file) is None:
            raise ValueError(f"{file}: unknown suffix; known are {_known_suffixes()}")
    return files


def _matches(pattern: Location) -> list[Location]:
    if isinstance(pattern, pathlib.Path):
        return [pathlib.Path(name) for name in glob.glob(str(pattern), recursive=True)]
    # epath's own glob refuses **
    return [storage.locate(name) for name in backend.fsspec_backend.glob(str(pattern))]


def _files_of_folder(root: Location) -> list[Location]:
    if isinstance(root, pathlib.Path):
        files = [
            file
            for file in sorted(root.rglob("*"))
            if file_format(file) is not None
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
    else:
        names = (root / name for name in storage.file_names(root))
        files = sorted(file for file in names if file_format(file) is not None)
    if not files:
        raise ValueError(f"{root}: the folder holds no file with one of {_known_suffixes()}")
    return files


def _known_suffixes() -> str:
    plain = [s for s in TEXT_SUFFIXES if not s.endswith(tuple(COMPRESSIONS))]
    return ", ".join((*plain, *JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TOKEN_SUFFIXES))
