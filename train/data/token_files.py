"""Write and read token files: ArrayRecord, one document a record as little-endian int32 ids.

The route for corpora too large to tokenise at each start. A record holds the ids as they are
trained on, bos and eos included. Beside each file the writer leaves a small index (length and
hash of each document); a file without one is read once, whole, when it is opened.
"""

import dataclasses
import logging
import pathlib
import zipfile
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from train.data import hashing

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.npz"
# One record a group: any other size makes a random read decompress its neighbours too.
WRITER_OPTIONS = "group_size:1"
RECORD_DTYPE = np.dtype("<i4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """What a loader must know of a token file's documents without reading them.

    Attributes:
        lengths: tokens in each document.
        keys: each document's hash.
        n_ids: one more than the largest id; 0 for a file without tokens.
    """

    lengths: Int64[np.ndarray, " docs"]
    keys: UInt64[np.ndarray, " docs"]
    n_ids: int


def write_token_file(
    path: str | pathlib.Path, documents: Iterable[Int32[np.ndarray, " _"]]
) -> TokenIndex:
    """Write documents, and their index, as one token file.

    Args:
        path: the file to write; ends in ".array_record".
        documents: the ids of each document, at least one each, bos and eos included.

    Returns:
        the index, as it now lies beside the file.

    Raises:
        ValueError: the suffix is another, or a document is empty or has a negative id.
    """
    from array_record.python import array_record_module

    path = pathlib.Path(path)
    if path.suffix != ".array_record":
        raise ValueError(f"{path}: a token file's name must end in .array_record")
    lengths: list[int] = []
    keys: list[int] = []
    n_ids = 0
    writer = array_record_module.ArrayRecordWriter(str(path), WRITER_OPTIONS)
    try:
        for tokens in documents:
            if not tokens.size or tokens.min() < 0:
                raise ValueError(f"{path}: document {len(lengths)} is empty or has a negative id")
            writer.write(tokens.astype(RECORD_DTYPE).tobytes())
            lengths.append(tokens.size)
            keys.append(hashing.document_key(tokens))
            n_ids = max(n_ids, int(tokens.max()) + 1)
    finally:
        writer.close()
    index = TokenIndex(
        lengths=np.array(lengths, np.int64), keys=np.array(keys, np.uint64), n_ids=n_ids
    )
    np.savez(
        _index_path(path),
        lengths=index.lengths,
        keys=index.keys,
        n_ids=n_ids,
        file_size=path.stat().st_size,
    )
    return index


def read_index(path: pathlib.Path) -> TokenIndex:
    """Return a token file's index, from beside the file or by reading the file.

    Args:
        path: the token file.

    Returns:
        the index.

    Raises:
        ValueError: the file is broken, a record is no list of ids, or the index beside the file
            belongs to another.
    """
    if not _index_path(path).is_file():
        logger.info("%s has no index beside it: reading the whole file once", path)
        return _scan(path)
    try:
        with np.load(_index_path(path), allow_pickle=False) as stored:
            index = TokenIndex(
                lengths=stored["lengths"], keys=stored["keys"], n_ids=int(stored["n_ids"])
            )
            file_size = int(stored["file_size"])
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{_index_path(path)}: not an index: {error}; delete it") from error
    if file_size != path.stat().st_size:
        raise ValueError(
            f"{_index_path(path)}: made for a file of {file_size} bytes, {path.name} has"
            f" {path.stat().st_size}; delete it to have the file read anew"
        )
    return index


def _scan(path: pathlib.Path) -> TokenIndex:
    """Make the index of a file that was written without one."""
    lengths: list[int] = []
    keys: list[int] = []
    n_ids = 0
    records = TokenRecords([path])
    for tokens in (records[i] for i in range(len(records))):
        if tokens.size and tokens.min() < 0:
            raise ValueError(f"{path}: record {len(lengths)} has a negative token id")
        lengths.append(tokens.size)
        keys.append(hashing.document_key(tokens))
        n_ids = max(n_ids, int(tokens.max(initial=-1)) + 1)
    return TokenIndex(
        lengths=np.array(lengths, np.int64), keys=np.array(keys, np.uint64), n_ids=n_ids
    )


class TokenRecords:
    """Read any document of a list of token files; safe to share among threads.

    Args:
        paths: the token files; documents count on from one to the next.

    Raises:
        ValueError: a file is no ArrayRecord, or is broken.
    """

    def __init__(self, paths: list[pathlib.Path]):
        """Open the files; the class docstring has the arguments."""
        from grain import sources

        self._names = ", ".join(path.name for path in paths)
        try:
            self._records = sources.ArrayRecordDataSource([str(path) for path in paths])
        except RuntimeError as error:  # ArrayRecord's only error
            raise ValueError(f"not an ArrayRecord file among {self._names}: {error}") from error

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._records)

    def __getitem__(self, document: int) -> Int32[np.ndarray, " _"]:
        """Return one document's ids.

        Args:
            document: its number, in [0, len).

        Returns:
            the ids, read-only.

        Raises:
            IndexError: `document` is out of range.
            ValueError: the record is broken or its size is not a multiple of four bytes.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document={document} must be in [0, {len(self)})")
        try:
            record = self._records[document]
        except RuntimeError as error:
            raise ValueError(f"record {document} of {self._names} is broken: {error}") from error
        if len(record) % RECORD_DTYPE.itemsize:
            raise ValueError(
                f"record {document} of {self._names}: {len(record)} bytes are no list of int32 ids"
            )
        return np.frombuffer(record, RECORD_DTYPE).astype(np.int32, copy=False)


def _index_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + INDEX_SUFFIX)
