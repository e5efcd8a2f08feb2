"""Read the documents of a source, whatever its files' formats."""

import io
from collections.abc import Iterator

from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from train.data import config, documents, files, jsonl, parquet, stdlib, text_files


class SourceReader:
    """Read a source's documents in a fixed order, telling how far it has come.

    Args:
        source: a source of text; not of token files.

    Raises:
        FileNotFoundError: the source's path does not exist or matches nothing.
        ValueError: a file's suffix is unknown.
    """

    def __init__(self, source: config.Source):
        """List the source's files; the class docstring has the arguments."""
        self._source = source
        self._files = [] if source.path in config.BUILT_IN else files.list_files(source.path)
        self.bytes_read = 0  # of the files as stored, compressed or not

    @property
    def n_bytes(self) -> int | None:
        """Return the stored size of all files, or None for a built-in corpus."""
        if self._source.path in config.BUILT_IN:
            return None
        return sum(storage.size(file) for file in self._files)

    def __iter__(self) -> Iterator[documents.Document]:
        """Yield each document.

        Yields:
            the documents, file by file.

        Raises:
            ValueError: a file can not be read, or holds something else than its format promises.
        """
        if self._source.path == config.STDLIB:
            yield from stdlib.read_stdlib()
        elif self._source.path in config.BUILT_IN:
            yield from stdlib.read_site_packages()
        done = 0
        for path in self._files:
            with _open(path) as raw:
                for document in read_file(raw, path=path, text_field=self._source.text_field):
                    self.bytes_read = done + raw.tell()
                    yield document
            done += storage.size(path)
            self.bytes_read = done


def read_file(
    raw: io.BufferedIOBase, *, path: Location, text_field: str
) -> Iterator[documents.Document]:
    """Read the documents of one open file.

    Args:
        raw: the file as stored, open for reading.
        path: its path, which tells format and compression and names it in messages.
        text_field: the field or column of the text, for the formats that have one.

    Yields:
        the documents in order.

    Raises:
        ValueError: the file is broken, or holds something else than its format promises.
    """
    name = str(path)
    form = files.file_format(path)
    try:
        if form == "jsonl":
            yield from jsonl.read_jsonl(_decompress(raw, path), name=name, text_field=text_field)
        elif form == "parquet":
            yield from parquet.read_parquet(raw, name=name, text_field=text_field)
        elif form == "text":
            yield from text_files.read_text(_decompress(raw, path), name=name)
        else:
            raise ValueError(f"{path}: not a file of text")
    except OSError as error:  # what pyarrow raises for broken or truncated data
        raise ValueError(f"{path}: cannot be read: {error}") from error


def open_lines(path: Location) -> io.BufferedIOBase:
    """Open a file of lines.

    Args:
        path: the file, compressed or not.

    Returns:
        its bytes, decompressed.

    Raises:
        ValueError: the file can not be opened.
    """
    return _decompress(_open(path), path)


def _open(path: Location) -> io.BufferedIOBase:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {storage.reason(error)}") from error
    # What reads from a bucket is no BufferedIOBase, which the readers of formats ask for.
    return file if isinstance(file, io.BufferedIOBase) else io.BufferedReader(file)


def _decompress(raw: io.BufferedIOBase, path: Location) -> io.BufferedIOBase:
    codec = files.COMPRESSIONS.get(path.suffix.lower())
    if codec is None:
        return raw
    import pyarrow as pa  # heavy, and only compressed files need it

    # pyarrow rather than zstandard: its stream reports a truncated file, zstandard's just ends.
    stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
    return io.BufferedReader(stream)
