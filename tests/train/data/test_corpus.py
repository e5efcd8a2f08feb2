import dataclasses
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dsv32_jax import tokenizer
from train.data import config, corpus, documents, token_files

BYTES = tokenizer.ByteTokenizer()


class NoBos(tokenizer.ByteTokenizer):
    bos_id = None


def encode(texts, chosen=BYTES):
    made = (documents.Document(f"{i}", text) for i, text in enumerate(texts))
    return list(corpus.encode_documents(made, chosen))


def save(path, texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(lines))
    elif path.suffix == ".jsonl":
        path.write_bytes(lines)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif path.suffix == ".array_record":
        token_files.write_token_file(path, encode(texts))
    else:
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f"{i:03d}.txt").write_bytes(text.encode())


def open_one(path, **changes):
    cfg = config.DataConfig(
        sources=(config.Source(path=str(path)),), seq_len=8, batch_size=1, seed=0
    )
    return corpus.open_corpora(dataclasses.replace(cfg, **changes))[0]


def all_tokens(opened):
    return [opened.tokens(i, 0, int(n)).tolist() for i, n in enumerate(opened.lengths)]


def test_a_document_is_bos_then_text_then_eos_and_empty_ones_are_skipped():
    made = encode(["ab", "", "c"])
    assert [ids.tolist() for ids in made] == [[256, 97, 98, 257], [256, 99, 257]]


def test_a_tokenizer_without_bos_adds_none():
    assert encode(["ab"], NoBos())[0].tolist() == [97, 98, 257]


def test_every_document_of_many_batches_is_encoded():
    made = encode([f"{i}" for i in range(2 * corpus.TEXTS_PER_BATCH + 1)])
    assert [BYTES.decode(ids.tolist()) for ids in made] == [f"{i}" for i in range(len(made))]


def test_a_lone_surrogate_is_an_error_that_names_the_document():
    with pytest.raises(ValueError, match="1: lone surrogate at character 2"):
        encode(["fine", "ab\ud800"])


@pytest.mark.parametrize(
    "name", ["f.jsonl", "f.jsonl.gz", "f.jsonl.zst", "f.parquet", "f.array_record", "folder"]
)
def test_every_format_holds_the_same_documents(tmp_path, texts, name):
    save(tmp_path / name, texts)
    opened = open_one(tmp_path / name)
    kept = [ids.tolist() for ids in encode(texts)]
    assert all_tokens(opened) == kept
    save(tmp_path / "other.jsonl", texts)
    np.testing.assert_array_equal(opened.keys, open_one(tmp_path / "other.jsonl").keys)


@pytest.mark.parametrize("name", ["f.jsonl", "f.array_record"])
def test_any_piece_of_a_document_is_at_hand(tmp_path, name):
    save(tmp_path / name, ["first", "abcdef"])
    assert open_one(tmp_path / name).tokens(1, 2, 5).tolist() == [98, 99, 100]


@pytest.mark.parametrize(("name", "n_ids"), [("f.jsonl", 259), ("f.array_record", 258)])
def test_the_largest_id_is_known(tmp_path, name, n_ids):
    save(tmp_path / name, ["text"])
    assert open_one(tmp_path / name).n_ids == n_ids


def test_token_files_alone_do_not_read_the_tokenizer(tmp_path):
    save(tmp_path / "f.array_record", ["text"])
    assert len(open_one(tmp_path / "f.array_record", tokenizer="nowhere").lengths) == 1


def test_text_needs_a_tokenizer_that_exists(tmp_path):
    save(tmp_path / "f.jsonl", ["text"])
    with pytest.raises(FileNotFoundError, match="tokenizer='nowhere'"):
        open_one(tmp_path / "f.jsonl", tokenizer="nowhere")


@pytest.mark.parametrize("name", ["f.jsonl", "f.parquet", "folder"])
def test_a_source_without_text_is_an_error(tmp_path, name):
    save(tmp_path / name, ["", ""])
    with pytest.raises(ValueError, match="is empty: no document with text"):
        open_one(tmp_path / name)


def test_a_token_file_without_documents_is_an_error(tmp_path):
    save(tmp_path / "f.array_record", [])
    with pytest.raises(ValueError, match="is empty: no document with tokens"):
        open_one(tmp_path / "f.array_record")


def test_token_files_beside_text_are_an_error(tmp_path):
    save(tmp_path / "f.array_record", ["text"])
    save(tmp_path / "f.jsonl", ["text"])
    with pytest.raises(ValueError, match=r"mixes token files with text \(f.array_record, f.jsonl"):
        open_one(tmp_path)
