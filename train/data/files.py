"""Find the files of a source and tell their format by suffix."""

import glob
import pathlib
from typing import Literal

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


def file_format(path: pathlib.Path) -> FileFormat | None:
    """Tell a file's format by its suffix.

    Args:
        path: the file; it need not exist.

    Returns:
        the format, or None for an unknown suffix.
    """
    name = path.name.lower()
    return next((form for form, suffixes in _SUFFIXES if name.endswith(suffixes)), None)


def list_files(path: str) -> list[pathlib.Path]:
    """List the files of a file, folder or glob, sorted by path.

    A folder is searched recursively; hidden entries and unknown suffixes in it are passed over.
    A file named directly or by a glob must have a known suffix. An existing path is never read
    as a glob.

    Args:
        path: the file, folder or glob; `~` is expanded.

    Returns:
        at least one file.

    Raises:
        FileNotFoundError: there is no such path, or the glob matches no file.
        ValueError: a named file has an unknown suffix, or a folder holds no known file.
    """
    root = pathlib.Path(path).expanduser()
    if root.is_dir():
        return _files_of_folder(root)
    if root.exists():
        files = [root]
    elif glob.has_magic(path):
        matches = glob.glob(str(root), recursive=True)
        files = sorted(file for file in map(pathlib.Path, matches) if file.is_file())
        if not files:
            raise FileNotFoundError(f"source {path!r}: the glob matches no file")
    else:
        raise FileNotFoundError(f"source {path!r}: no such file or folder")
    for file in files:
        if file_format(file) is None:
            raise ValueError(f"{file}: unknown suffix; known are {_known_suffixes()}")
    return files


def _files_of_folder(root: pathlib.Path) -> list[pathlib.Path]:
    files = [
        file
        for file in sorted(root.rglob("*"))
        if file_format(file) is not None
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    if not files:
        raise ValueError(f"{root}: the folder holds no file with one of {_known_suffixes()}")
    return files


def _known_suffixes() -> str:
    plain = [s for s in TEXT_SUFFIXES if not s.endswith(tuple(COMPRESSIONS))]
    return ", ".join((*plain, *JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TOKEN_SUFFIXES))
