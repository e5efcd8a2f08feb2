import io

import pytest

from train.data import jsonl


def read(data, text_field="text"):
    return list(jsonl.read_jsonl(io.BytesIO(data), name="f.jsonl", text_field=text_field))


def test_each_line_is_a_document_and_blank_lines_are_passed_over():
    assert read(b'{"text": "a"}\n\n{"id": 2, "text": "b"}') == [
        ("f.jsonl:1", "a"),
        ("f.jsonl:3", "b"),
    ]


def test_another_field_may_hold_the_text():
    assert read(b'{"text": "a", "body": "b"}\n', "body") == [("f.jsonl:1", "b")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{oops}", "not JSON"),
        (b"[1]", "must be a JSON object, is list"),
        (b'{"body": "b"}', "no field 'text'; its fields: 'body'"),
        (b"{}", "no field 'text'; its fields: none"),
        (b'{"text": null}', "field 'text' must be a string, is NoneType"),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 10"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(line, words):
    with pytest.raises(ValueError, match=rf"f\.jsonl:2: {words}"):
        read(b'{"text": "fine"}\n' + line + b"\n")
