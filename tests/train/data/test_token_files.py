import numpy as np
import pytest
from array_record.python import array_record_module

from train.data import token_files

DOCUMENTS = [np.array(ids, np.int32) for ids in ([5, 6, 7], [1], list(range(1000)))]


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "f.array_record"
    token_files.write_token_file(made, DOCUMENTS)
    return made


def index_file(path):
    return path.with_name(path.name + token_files.INDEX_SUFFIX)


def write_records(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), token_files.WRITER_OPTIONS)
    for record in records:
        writer.write(record)
    writer.close()


def test_documents_come_back_as_written(path):
    records = token_files.TokenRecords([path, path])
    assert len(records) == 6
    for i in range(6):
        np.testing.assert_array_equal(records[i], DOCUMENTS[i % 3])


def test_the_index_beside_the_file_is_what_reading_the_file_gives(path):
    stored = token_files.read_index(path)
    index_file(path).unlink()
    scanned = token_files.read_index(path)
    np.testing.assert_array_equal(stored.lengths, [3, 1, 1000])
    np.testing.assert_array_equal(stored.lengths, scanned.lengths)
    np.testing.assert_array_equal(stored.keys, scanned.keys)
    assert stored.n_ids == scanned.n_ids == 1000


def test_an_empty_record_of_another_writer_counts_as_a_document_of_length_zero(tmp_path):
    path = tmp_path / "f.array_record"
    write_records(path, [b"", DOCUMENTS[0].tobytes()])
    np.testing.assert_array_equal(token_files.read_index(path).lengths, [0, 3])


def test_a_document_out_of_range_is_an_error(path):
    with pytest.raises(IndexError, match=r"document=3 must be in \[0, 3\)"):
        token_files.TokenRecords([path])[3]


def test_another_suffix_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.array_record"):
        token_files.write_token_file(tmp_path / "f.tokens", DOCUMENTS)


@pytest.mark.parametrize("bad", [[], [3, -1]])
def test_writing_an_empty_document_or_a_negative_id_is_an_error(tmp_path, bad):
    with pytest.raises(ValueError, match="document 3 is empty or has a negative id"):
        token_files.write_token_file(
            tmp_path / "f.array_record", [*DOCUMENTS, np.array(bad, np.int32)]
        )


def test_reading_a_negative_id_is_an_error(tmp_path):
    path = tmp_path / "f.array_record"
    write_records(path, [np.array([4, -1], np.int32).tobytes()])
    with pytest.raises(ValueError, match="record 0 has a negative token id"):
        token_files.read_index(path)


def test_a_record_that_is_no_list_of_ids_is_an_error(tmp_path):
    path = tmp_path / "f.array_record"
    write_records(path, [b"12345"])
    with pytest.raises(ValueError, match="5 bytes are no list of int32 ids"):
        token_files.read_index(path)


@pytest.mark.parametrize("content", [b"", b"garbage" * 20_000])
def test_a_file_that_is_no_array_record_is_an_error(tmp_path, content):
    path = tmp_path / "f.array_record"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not an ArrayRecord file among f\.array_record"):
        token_files.TokenRecords([path])


def test_a_truncated_file_is_an_error(path):
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"f\.array_record"):
        token_files.TokenRecords([path])


def test_an_index_of_another_file_is_an_error(path):
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ValueError, match="delete it to have the file read anew"):
        token_files.read_index(path)


def test_a_broken_index_is_an_error(path):
    index_file(path).write_bytes(b"garbage")
    with pytest.raises(ValueError, match="not an index"):
        token_files.read_index(path)
