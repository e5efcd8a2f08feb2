"""Read JSON lines: one object a line, its text in a named field."""

import io
import json
from collections.abc import Iterator

from train.data import documents


def read_jsonl(
    file: io.BufferedIOBase, *, name: str, text_field: str
) -> Iterator[documents.Document]:
    """Read one document a line; blank lines are passed over.

    Args:
        file: the decompressed bytes.
        name: the file's name, for documents and messages.
        text_field: the field that holds the text.

    Yields:
        the documents in order, each named `name:line`.

    Raises:
        ValueError: a line is not UTF-8, no JSON object, or has no string in `text_field`.
    """
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{name}:{number}"
            yield documents.Document(where, _text_of_line(line, where, text_field))


def _text_of_line(line: bytes, where: str, text_field: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not valid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a JSON object, is {type(entry).__name__}")
    if text_field not in entry:
        fields = ", ".join(map(repr, entry)) or "none"
        raise ValueError(f"{where}: no field {text_field!r}; its fields: {fields}")
    text = entry[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field {text_field!r} must be a string, is {type(text).__name__}"
        )
    return text
