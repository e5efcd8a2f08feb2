"""Offer the running Python's own library and its installed packages as corpora: real text, nothing to download."""

import logging
import pathlib
import sysconfig
from collections.abc import Iterator

from train.data import documents

logger = logging.getLogger(__name__)

MAX_MODULE_BYTES = 500_000  # longer ones are generated tables
# Tests repeat themselves, encodings are tables, and the rest is not the library.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)


def read_stdlib() -> Iterator[documents.Document]:
    """Read each module of the standard library, then each topic of `pydoc`.

    About 10 MB in 640 documents. The text, so every row made of it, is fixed for one Python
    release and changes with the next.

    Yields:
        the documents, modules sorted by path and topics by name.

    Raises:
        FileNotFoundError: this Python carries no library as source files.
        ValueError: a module is not UTF-8.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = _library_files(root)
    if not files:
        raise FileNotFoundError(f"{root}: this Python has no standard library as source files")
    for file in files:
        name = f"stdlib/{file.relative_to(root).as_posix()}"
        try:
            yield documents.Document(name, file.read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not valid UTF-8 at byte {error.start}") from error
    # The module file spells these as one dictionary literal; as documents they are prose.
    from pydoc_data import topics

    for topic in sorted(topics.topics):
        yield documents.Document(f"pydoc/{topic}", topics.topics[topic])


def _library_files(root: pathlib.Path) -> list[pathlib.Path]:
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts[:-1])
    ]


def read_site_packages() -> Iterator[documents.Document]:
    """Read each module of the packages installed beside the running Python.

    Tens to hundreds of MB, whatever is installed: good for a longer run, not for comparing machines. Test folders,
    modules over MAX_MODULE_BYTES and modules that are not UTF-8 are left out.

    Yields:
        the documents, sorted by path.

    Raises:
        FileNotFoundError: no package is installed as source files.
    """
    root = pathlib.Path(sysconfig.get_paths()["purelib"])
    skipped = SKIPPED_FOLDERS - {"encodings"}
    files = [f for f in sorted(root.rglob("*.py")) if skipped.isdisjoint(f.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"{root}: no package is installed there as source files")
    left_out = 0
    for file in files:
        raw = file.read_bytes()
        try:
            text = raw.decode("utf-8") if len(raw) <= MAX_MODULE_BYTES else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            left_out += 1
        else:
            yield documents.Document(f"site-packages/{file.relative_to(root).as_posix()}", text)
    logger.info("site-packages: %d modules, %d left out", len(files) - left_out, left_out)
