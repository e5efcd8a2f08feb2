"""Cut documents into rows of one length, each row a pure function of its number.

A row is `{"tokens": int32 [T], "segment_ids": int32 [T]}`. Segments count 1, 2, ... within a row,
one a document or part of one; 0 marks padding, whose token is 0. Every token of every document
lies in exactly one row. A part that continues a document starts a segment of its own, without
bos and without sight of the earlier part, so its first token is seen but never predicted: about
one token in T, and all of a part that is one token long. Rows of examples hold whole documents,
and also `"trained": bool [T]`, false for padding.
"""

import abc
import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from train.data import corpus as corpora

Row = dict[str, Shaped[np.ndarray, " T"]]


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        document: the document's number in its corpus.
        start: first position.
        stop: one past the last position.
    """

    document: int
    start: int
    stop: int


class Rows(abc.ABC):
    """Rows of some documents of a corpus, any row at hand: a random-access source for grain.

    Holds 16 bytes a document, whatever the number of rows.

    Args:
        corpus: the documents.
        order: numbers of the documents to use, in the order to cut them.
        seq_len: tokens a row.
    """

    def __init__(
        self, corpus: corpora.Corpus, *, order: Int64[np.ndarray, " chosen"], seq_len: int
    ):
        """Keep the documents; the class docstring has the arguments."""
        self.corpus = corpus
        self.order = order
        self.seq_len = seq_len
        self.n_tokens = int(corpus.lengths[order].sum())

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def pieces(self, row: int) -> list[Piece]:
        """Return the parts of documents that fill a row, in order, none of them empty.

        Args:
            row: the row's number, in [0, len).
        """

    def __getitem__(self, row: int) -> Row:
        """Return a row.

        Args:
            row: its number, in [0, len).

        Returns:
            tokens and segment ids; of examples also which tokens train.
        """
        tokens = np.zeros(self.seq_len, np.int32)
        segment_ids = np.zeros(self.seq_len, np.int32)
        trained = np.zeros(self.seq_len, np.bool_)
        masked = self.corpus if isinstance(self.corpus, corpora.ExampleCorpus) else None
        filled = 0
        for segment, (document, start, stop) in enumerate(self.pieces(row), start=1):
            end = filled + stop - start
            tokens[filled:end] = self.corpus.tokens(document, start, stop)
            segment_ids[filled:end] = segment
            if masked is not None:
                trained[filled:end] = masked.trained_tokens(document, start, stop)
            filled = end
        made: Row = {"tokens": tokens, "segment_ids": segment_ids}
        return made if masked is None else made | {"trained": trained}


class PackedRows(Rows):
    """Lay documents end to end and cut the stream every `seq_len` tokens.

    Row r holds tokens [r*T, (r+1)*T) of the stream; only the last row has padding.
    """

    def __init__(
        self, corpus: corpora.Corpus, *, order: Int64[np.ndarray, " chosen"], seq_len: int
    ):
        """Sum the lengths; the class docstring of `Rows` has the arguments."""
        super().__init__(corpus, order=order, seq_len=seq_len)
        self._ends = np.cumsum(corpus.lengths[order])  # of each document in the stream

    def __len__(self) -> int:
        """Return the number of rows."""
        return -(-self.n_tokens // self.seq_len)

    def pieces(self, row: int) -> list[Piece]:
        """Return the parts of documents in [row * T, (row + 1) * T) of the stream.

        Args:
            row: the row's number, in [0, len).

        Returns:
            the parts, in order.
        """
        position = row * self.seq_len
        limit = min(position + self.seq_len, self.n_tokens)
        place = int(np.searchsorted(self._ends, position, side="right"))
        pieces = []
        while position < limit:
            end = int(self._ends[place])
            document = int(self.order[place])
            start = position - (end - int(self.corpus.lengths[document]))
            taken = min(end, limit) - position
            if taken:  # a token file may hold empty records
                pieces.append(Piece(document, start, start + taken))
            position += taken
            place += 1
        return pieces


class DocumentRows(Rows):
    """Give each document rows of its own, the rest of a row padding.

    A document longer than a row is cut into as few parts as fit, as even as can be, so that no
    part is a single token where `seq_len` > 2.
    """

    def __init__(
        self, corpus: corpora.Corpus, *, order: Int64[np.ndarray, " chosen"], seq_len: int
    ):
        """Count each document's rows; the class docstring of `Rows` has the arguments."""
        super().__init__(corpus, order=order, seq_len=seq_len)
        self._ends = np.cumsum(-(-corpus.lengths[order] // seq_len))

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, row: int) -> list[Piece]:
        """Return the one part of a document that a row holds.

        Args:
            row: the row's number, in [0, len).

        Returns:
            the part.
        """
        place = int(np.searchsorted(self._ends, row, side="right"))
        document = int(self.order[place])
        length = int(self.corpus.lengths[document])
        n_parts = -(-length // self.seq_len)
        part = row - (int(self._ends[place]) - n_parts)
        return [Piece(document, part * length // n_parts, (part + 1) * length // n_parts)]


class WholeRows(Rows):
    """Fill rows with whole documents: each goes where it leaves the least room, or begins a row.

    Raises:
        ValueError: a document is longer than a row.
    """

    def __init__(
        self, corpus: corpora.Corpus, *, order: Int64[np.ndarray, " chosen"], seq_len: int
    ):
        """Place the documents; the class docstring of `Rows` has the arguments."""
        super().__init__(corpus, order=order, seq_len=seq_len)
        self._rows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # (free places, row), sorted
        for document in map(int, order):
            length = int(corpus.lengths[document])
            if length > seq_len:
                raise ValueError(f"document {document} has {length} tokens, rows only {seq_len}")
            place = bisect.bisect_left(rooms, (length, 0))
            if place == len(rooms):
                room, row = seq_len, len(self._rows)
                self._rows.append([])
            else:
                room, row = rooms.pop(place)
            self._rows[row].append(document)
            if room > length:
                bisect.insort(rooms, (room - length, row))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def pieces(self, row: int) -> list[Piece]:
        """Return the documents of a row.

        Args:
            row: the row's number, in [0, len).

        Returns:
            the documents, each whole.
        """
        return [Piece(doc, 0, int(self.corpus.lengths[doc])) for doc in self._rows[row]]
