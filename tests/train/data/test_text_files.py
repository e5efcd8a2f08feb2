import io

import pytest

from train.data import text_files


def test_a_file_is_one_document_with_its_line_ends():
    assert list(text_files.read_text(io.BytesIO(b"a\r\nb\n"), name="f.txt")) == [
        ("f.txt", "a\r\nb\n")
    ]


def test_bytes_that_are_not_utf8_are_an_error_with_file_and_place():
    with pytest.raises(ValueError, match=r"f\.txt: not valid UTF-8 at byte 2"):
        list(text_files.read_text(io.BytesIO(b"ab\xff"), name="f.txt"))
