"""Read Parquet: one document a row, its text in a named column."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

from train.data import documents

ROWS_PER_READ = 1024  # bounds memory where a row group is large


def read_parquet(
    file: io.BufferedIOBase, *, name: str, text_field: str
) -> Iterator[documents.Document]:
    """Read one document a row.

    Args:
        file: the file's bytes, seekable.
        name: the file's name, for documents and messages.
        text_field: the column that holds the text.

    Yields:
        the documents in order, each named `name:row`, rows counted from 1.

    Raises:
        ValueError: the file is no Parquet or broken, lacks the column, or the column holds
            something else than strings, null included.
    """
    import pyarrow as pa  # heavy, and only this format needs it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        kinds = {field.name: field.type for field in table.schema_arrow}
        _check_column(kinds, name, text_field)
        row = 0
        for batch in table.iter_batches(batch_size=ROWS_PER_READ, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    raise ValueError(f"{name}:{row}: column {text_field!r} is null")
                yield documents.Document(f"{name}:{row}", text)
    except (pa.ArrowInvalid, OSError) as error:  # of a broken page pyarrow raises either
        raise ValueError(f"{name}: not a Parquet file, or broken: {error}") from error


def _check_column(kinds: Mapping[str, Any], name: str, text_field: str) -> None:
    import pyarrow as pa

    if text_field not in kinds:
        columns = ", ".join(map(repr, kinds)) or "none"
        raise ValueError(f"{name}: no column {text_field!r}; its columns: {columns}")
    kind = kinds[text_field]
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{name}: column {text_field!r} must hold strings, holds {kind}")
