import gzip
import json
import pathlib

import pytest
import zstandard

from train.data import config, readers

TEXTS = ["first", "sécond\n"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(path, **kwargs):
    return [document.text for document in readers.SourceReader(config.Source(path=path, **kwargs))]


def zstd(data):
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
def test_compression_changes_nothing(tmp_path, suffix, pack):
    (tmp_path / f"f.jsonl{suffix}").write_bytes(pack(LINES))
    (tmp_path / f"f.txt{suffix}").write_bytes(pack(b"whole"))
    assert read(str(tmp_path)) == [*TEXTS, "whole"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
def test_members_one_after_another_are_all_read(tmp_path, suffix, pack):
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(pack(LINES) + pack(LINES))
    assert read(str(path)) == TEXTS * 2


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
@pytest.mark.parametrize("harm", ["truncated", "garbage"])
def test_broken_compression_is_an_error_that_names_the_file(tmp_path, suffix, pack, harm):
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(pack(LINES)[:-5] if harm == "truncated" else b"garbage" * 9)
    with pytest.raises(ValueError, match=rf"f\.jsonl{suffix}: cannot be read"):
        read(str(path))


def test_a_file_that_can_not_be_opened_is_an_error_that_names_it(tmp_path, monkeypatch):
    path = tmp_path / "f.txt"
    path.write_text("text")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(ValueError, match=r"f\.txt: cannot be read: Permission denied"):
        read(str(path))


def test_the_text_field_reaches_the_reader(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"body": "b"}\n')
    assert read(str(path), text_field="body") == ["b"]


def test_bytes_read_rise_to_the_size_of_all_files(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("12345")
    reader = readers.SourceReader(config.Source(path=str(tmp_path)))
    seen = [reader.bytes_read for _ in reader]
    assert seen == [5, 10]
    assert reader.bytes_read == reader.n_bytes == 10


def test_the_built_in_corpus_needs_no_file():
    reader = readers.SourceReader(config.Source(path=config.STDLIB))
    assert reader.n_bytes is None
    assert next(iter(reader)).name.startswith("stdlib/")
