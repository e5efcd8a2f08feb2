"""Read a text file as one document."""

import io
from collections.abc import Iterator

from train.data import documents


def read_text(file: io.BufferedIOBase, *, name: str) -> Iterator[documents.Document]:
    """Read a whole file as one document, its line ends untouched.

    Args:
        file: the decompressed bytes.
        name: the file's name, for the document and for messages.

    Yields:
        the one document.

    Raises:
        ValueError: the bytes are not UTF-8.
    """
    try:
        text = file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not valid UTF-8 at byte {error.start}") from error
    yield documents.Document(name, text)
