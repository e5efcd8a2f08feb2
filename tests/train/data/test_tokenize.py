import dataclasses

import numpy as np
import pytest

from dsv32_jax import tokenizer
from train.data import config, corpus, loader, readers, tokenize


def run(capsys, *argv):
    code = tokenize.main([str(arg) for arg in argv])
    return code, capsys.readouterr()


@pytest.fixture
def folder(tmp_path, jsonl):
    out = tmp_path / "tokens"
    sources = [config.Source(path=str(jsonl))]
    tokenize.tokenize(
        tokenize.open_sources(sources, out, 300),
        out,
        tokenizer=tokenizer.ByteTokenizer(),
        shard_tokens=300,
        report=lambda line: None,
    )
    return out


def test_several_files_are_written_and_give_the_batches_of_the_text(cfg, folder):
    assert len(list(folder.glob("*.array_record"))) > 2
    from_tokens = dataclasses.replace(cfg, sources=(config.Source(path=str(folder)),))
    loaders = [
        loader.make_loader(each, host=0, n_hosts=1, split="train", vocab_size=259)
        for each in (cfg, from_tokens)
    ]
    assert loaders[0].state() == loaders[1].state()
    for _ in range(5):
        np.testing.assert_array_equal(next(loaders[0])["tokens"], next(loaders[1])["tokens"])


def test_files_are_about_as_long_as_asked(folder):
    opened = corpus.open_corpora(
        config.DataConfig(
            sources=(config.Source(path=f"{folder}/tokens-00000.array_record"),),
            seq_len=8,
            batch_size=1,
            seed=0,
        )
    )
    assert 300 <= opened[0].lengths.sum() < 300 + opened[0].lengths.max()


def test_the_command_says_what_it_wrote_and_where(capsys, tmp_path, jsonl):
    code, said = run(capsys, tmp_path / "out", jsonl)
    assert code == 0
    assert said.out.startswith("39 documents, ")
    assert str(tmp_path / "out") in said.out


def test_an_existing_folder_is_left_alone(capsys, folder, jsonl):
    before = sorted(folder.iterdir())
    code, said = run(capsys, folder, jsonl)
    assert code == 2
    assert "exists; name a new folder" in said.err
    assert sorted(folder.iterdir()) == before


def test_a_failed_run_leaves_no_folder_and_the_next_one_succeeds(capsys, tmp_path, jsonl):
    good = jsonl.read_text()
    jsonl.write_text(good + "oops\n")
    code, said = run(capsys, tmp_path / "out", jsonl)
    assert code == 1
    assert "texts.jsonl:41: not JSON" in said.err
    assert not (tmp_path / "out").exists()
    jsonl.write_text(good)
    assert run(capsys, tmp_path / "out", jsonl)[0] == 0
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.txt"], "no such file or folder"),
        (["--tokenizer", "nowhere"], "tokenizer='nowhere'"),
        (["--shard-tokens", "0"], "shard_tokens=0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(capsys, tmp_path, argv, words):
    code, said = run(capsys, tmp_path / "out", *argv)
    assert code == 2
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1


def test_token_files_are_not_tokenised_twice(capsys, tmp_path, folder):
    code, said = run(capsys, tmp_path / "out", folder)
    assert code == 2
    assert "holds token files already" in said.err


def test_sources_without_text_are_an_error(capsys, tmp_path):
    (tmp_path / "empty.txt").touch()
    code, said = run(capsys, tmp_path / "out", tmp_path / "empty.txt")
    assert code == 1
    assert "no document with text" in said.err


def test_wrong_usage_exits_with_two(capsys):
    code, said = run(capsys, "--no-such-flag")
    assert code == 2
    assert said.err.startswith("error: ")


def test_progress_tells_share_and_time_left_where_sizes_are_known(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenize, "SECONDS_PER_LINE", 0.0)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("12345")
    lines = []
    sources = [config.Source(path=str(tmp_path))]
    tokenize.tokenize(
        tokenize.open_sources(sources, tmp_path / "out", 100),
        tmp_path / "out",
        tokenizer=tokenizer.ByteTokenizer(),
        report=lines.append,
    )
    assert lines[-1].startswith("2 documents, 14 tokens, ")
    assert lines[-1].endswith("100.0%, 0 s left")


def test_progress_leaves_out_the_time_left_where_a_size_is_unknown():
    progress = tokenize.Progress([readers.SourceReader(config.Source(path=config.STDLIB))], print)
    assert progress.line(1.0) == "0 documents, 0 tokens, 0 tokens/s"
