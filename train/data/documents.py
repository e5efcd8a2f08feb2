"""Define a document: the unit that is split, shuffled and never mixed with another."""

from typing import NamedTuple


class Document(NamedTuple):
    """One text and where it came from.

    Attributes:
        name: the file, and the line or row where a file holds many; for messages only.
        text: the whole text.
    """

    name: str
    text: str
