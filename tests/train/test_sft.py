import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from configs import cold_start as default
from dsv32_jax import config
from dsv32_jax.encoding import markup
from dsv32_jax.errors import UsageError
from train import loop, sft
from train.data.config import DataConfig, Source
from train.loop import StoppedError
from train.metrics import MetricsConfig
from train.rl.problems import Family
from train.rl.task_source import TaskConfig
from train.start import restore_parameters

MEASURED = ("held_out_loss/before", "held_out_loss/after", "accuracy/before", "accuracy/after")


def short(stage, steps):
    return dataclasses.replace(stage, steps=steps)


@pytest.fixture(scope="module")
def cfg(corpus_path):
    """The default run, made small enough for seconds."""
    base = default.get_config()
    data = DataConfig(sources=(Source(path=str(corpus_path)),), seq_len=64, batch_size=4, seed=0)
    solved = dataclasses.replace(
        base.solved,
        tasks=TaskConfig(
            families=(Family(name="chain_sum", settings=(("max_terms", 2),)),), held_out=4
        ),
        examples=120, measured=3, max_tokens=4, slots=4,
        rewards=dataclasses.replace(base.solved.rewards, workers=1),
    )  # fmt: skip
    return dataclasses.replace(
        base,
        model=dataclasses.replace(config.tiny(), vocab_size=264, mtp=False),
        data=dataclasses.replace(base.data, seq_len=128, batch_size=4, heldout_fraction=0.3),
        training=short(base.training, 4),
        base=dataclasses.replace(
            base.base, data=data, dense=short(base.base.dense, 2), warmup=short(base.base.warmup, 2)
        ),
        solved=solved,
        held_out_rows=4,
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=1),
        metrics=MetricsConfig(tensorboard=False),
    )


@pytest.fixture(scope="module")
def whole(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert sft.main(cfg, folder) == 0
    return folder


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def given(cfg, folder, **changes):
    """The same fine-tuning of another run's model."""
    return dataclasses.replace(cfg, base=None, init_from=str(folder), **changes)


def test_a_run_from_nothing_leaves_what_a_person_looks_for(whole, lines_of):
    summary = summary_of(whole)
    assert all(np.isfinite(summary[name]) for name in MEASURED)
    assert summary["held_out_loss/after"] < summary["held_out_loss/before"]
    assert summary["steps"] == 4
    assert [row["step"] for row in lines_of(whole)] == [1, 2, 3, 4]
    assert {"lm", "kl", "grad_norm"} <= set(lines_of(whole)[0])
    assert "| right answers, of 3 |" in (whole / "report.md").read_text()
    first = json.loads((whole / "examples.jsonl").read_text().splitlines()[0])
    assert first["prompt"].startswith(f"{markup.BOS}State the final answer")
    assert first["response"].endswith(markup.EOS)
    assert len(first["response"]) < 12 + len(markup.EOS)


def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(
    cfg, whole, tmp_path, monkeypatch, lines_of, mesh
):
    record, steps = loop._Trainer._record, []

    def record_and_stop(self, log, step, *args):
        record(self, log, step, *args)
        steps.append(self._leg.name)
        if steps.count("sparse") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop._Trainer, "_record", record_and_stop)
    with pytest.raises(StoppedError, match="SIGTERM at step 2 of sparse: saved"):
        sft.main(cfg, tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "summary.json").exists()

    assert sft.main(cfg, tmp_path) == 0

    assert lines_of(tmp_path) == lines_of(whole)
    mine, other = (restore_parameters(cfg, folder, mesh).weights for folder in (tmp_path, whole))
    for name in mine:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
    assert all(summary_of(tmp_path)[name] == summary_of(whole)[name] for name in MEASURED)


def test_a_finished_run_says_so_and_changes_nothing(cfg, whole, caplog, capsys):
    before = (whole / "summary.json").read_bytes()
    with caplog.at_level("INFO", logger="train.sft"):
        assert sft.main(cfg, whole) == 0

    assert "this run is finished" in caplog.text
    assert "| before | after |" in capsys.readouterr().out
    assert (whole / "summary.json").read_bytes() == before


def test_another_config_in_the_folder_is_refused(cfg, whole):
    with pytest.raises(UsageError, match=r"holds a run of another config .*seed"):
        sft.main(dataclasses.replace(cfg, seed=1), whole)


def test_a_dense_model_is_fine_tuned_densely_on_conversations(cfg, whole, tmp_path, mesh):
    path = tmp_path / "talks.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(
        "".join(
            json.dumps({"messages": [{**turns[0], "content": f"{i}"}, turns[1]]}) + "\n"
            for i in range(60)
        )
    )
    optimizer = dataclasses.replace(cfg.training.optimizer, indexer=None)
    dense = given(
        cfg, whole / "base" / "stages" / "dense", stage="dense", solved=None,
        data=dataclasses.replace(cfg.data, sources=(Source(path=str(path)),)),
        training=dataclasses.replace(cfg.training, optimizer=optimizer),
    )  # fmt: skip
    (tmp_path / "run").mkdir()

    assert sft.main(dense, tmp_path / "run") == 0

    summary = summary_of(tmp_path / "run")
    assert "accuracy/before" not in summary
    assert summary["held_out_loss/after"] < summary["held_out_loss/before"]
    before = restore_parameters(dense, whole / "base" / "stages" / "dense", mesh).weights
    after = restore_parameters(dense, tmp_path / "run", mesh).weights
    for name in before:
        assert np.array_equal(before[name], after[name]) == (".indexer." in name), name


def test_a_stage_that_can_not_follow_the_given_model_is_refused(cfg, whole, tmp_path):
    with pytest.raises(UsageError, match="ended with the dense stage, so its indexers"):
        sft.main(given(cfg, whole / "base" / "stages" / "dense"), tmp_path)

    optimizer = dataclasses.replace(cfg.training.optimizer, indexer=None)
    training = dataclasses.replace(cfg.training, optimizer=optimizer)
    with pytest.raises(
        UsageError, match="ended with the sparse stage, whose selection stage=dense"
    ):
        sft.main(given(cfg, whole, stage="dense", training=training), tmp_path)


def test_an_example_longer_than_a_row_is_refused_before_anything_is_trained(cfg, tmp_path):
    path = tmp_path / "long.jsonl"
    entry = {"prompt": "a" * 150, "response": f"b{markup.EOS}"}
    path.write_text(json.dumps(entry) + "\n")
    data = dataclasses.replace(cfg.data, sources=(Source(path=str(path)),))
    solved = dataclasses.replace(cfg.solved, examples=0)

    with pytest.raises(UsageError, match=r"long\.jsonl:1: 152 tokens, more than seq_len=128"):
        sft.main(dataclasses.replace(cfg, data=data, solved=solved), tmp_path)

    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"base": None}, "a model to begin with is needed"),
        (lambda c: {"init_from": "runs/x"}, "init_from and base exclude each other"),
        (lambda c: {"data": dataclasses.replace(c.data, examples=False)}, "data.examples must be true"),
        (lambda c: {"data": dataclasses.replace(c.data, heldout_fraction=0.0)}, "leaves no example"),
        (lambda c: {"base": dataclasses.replace(c.base, warmup=None)}, "leaves the indexers untrained"),
        (lambda c: {"stage": "dense"}, "dense.optimizer.indexer must not be given"),
        (lambda c: {"held_out_rows": 6}, "a multiple of the 4 rows"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(cfg, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(cfg, **change(cfg))
