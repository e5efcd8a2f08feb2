import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.data import parquet


def read(columns, text_field="text"):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    file.seek(0)
    return list(parquet.read_parquet(file, name="f.parquet", text_field=text_field))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_each_row_is_a_document(kind):
    assert read({"id": [1, 2], "text": pa.array(["a", "b"], kind)}) == [
        ("f.parquet:1", "a"),
        ("f.parquet:2", "b"),
    ]


def test_rows_count_on_over_several_reads():
    n = parquet.ROWS_PER_READ + 1
    assert read({"text": ["a"] * n})[-1].name == f"f.parquet:{n}"


def test_a_missing_column_is_an_error_that_lists_the_others():
    with pytest.raises(ValueError, match=r"f\.parquet: no column 'text'; its columns: 'body'"):
        read({"body": ["a"]})


def test_a_column_of_numbers_is_an_error():
    with pytest.raises(ValueError, match="column 'text' must hold strings, holds int64"):
        read({"text": [1]})


def test_a_null_is_an_error_with_its_row():
    with pytest.raises(ValueError, match=r"f\.parquet:2: column 'text' is null"):
        read({"text": ["a", None]})


def test_a_file_that_is_no_parquet_is_an_error():
    with pytest.raises(ValueError, match=r"f\.parquet: not a Parquet file"):
        list(parquet.read_parquet(io.BytesIO(b"x" * 99), name="f.parquet", text_field="text"))


def test_a_broken_page_is_an_error_that_names_the_file():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": [f"{i}" * 50 for i in range(999)]}), file)
    broken = bytearray(file.getvalue())
    broken[4:2000] = b"\xff" * 1996
    with pytest.raises(ValueError, match=r"f\.parquet: not a Parquet file, or broken"):
        list(parquet.read_parquet(io.BytesIO(broken), name="f.parquet", text_field="text"))
