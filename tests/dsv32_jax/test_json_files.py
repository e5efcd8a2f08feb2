import json
import logging
import math

import pytest

from dsv32_jax import json_files


def test_non_finite_numbers_are_written_as_null(tmp_path):
    path = tmp_path / "summary.json"

    json_files.write_json(path, {"loss": math.nan, "best": [math.inf, 1.0], "steps": 3})

    assert json.loads(path.read_text()) == {"loss": None, "best": [None, 1.0], "steps": 3}


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path):
    path = tmp_path / "summary.json"
    json_files.write_json(path, {"loss": 1.0})

    with pytest.raises(UnicodeEncodeError):
        json_files.replace_text(path, "begun, then \ud800")

    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_an_object_is_read_and_anything_else_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        json_files.read_object(path)
    for content, message in [
        (b"{", r"config\.json is not JSON: Expecting"), (b"\xff", "is not JSON: .*codec"),
        (b"[1]", r"config\.json must hold an object"),
    ]:  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            json_files.read_object(path)
    path.write_text('{"a": [1]}')

    assert json_files.read_object(path) == {"a": [1]}


def test_a_torn_last_line_is_left_out_without_a_word(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "lo')

    rows = json_files.read_lines(path)

    assert rows == [{"step": 1}, {"step": 2}]
    assert not caplog.records


def test_a_broken_line_further_up_is_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\xff\x00\n{"step": 3}\n')

    with caplog.at_level(logging.WARNING):
        rows = json_files.read_lines(path)

    assert rows == [{"step": 1}, {"step": 3}]
    assert "line 2" in caplog.text


def test_a_missing_file_has_no_lines(tmp_path):
    assert json_files.read_lines(tmp_path / "none.jsonl") == []
