import json
import logging
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dsv32_jax.errors import UsageError
from train import command, pretrain

DEMANDED = [
    *(f"lm_loss/{name}{end}"
      for name in ("dense", "sparse_untrained", "sparse_warmup", "sparse", "dense_control", "window_control")
      for end in ("", "_stderr")),
    *(f"recall/{layer}{choice}"
      for layer in ("", "layer_0/", "layer_1/", "mtp/")
      for choice in ("indexer", "random", "window", "oracle")),
    "kl/first", "kl/last", "wall_s",
    *(f"tokens_per_s/{stage}" for stage in ("dense", "warmup", "sparse")),
]  # fmt: skip


@pytest.fixture
def summary(whole_run):
    return json.loads((whole_run / "summary.json").read_text())


def test_the_summary_has_every_figure_and_each_is_a_finite_number(summary):
    assert set(DEMANDED) <= summary.keys()
    assert all(isinstance(v, float) and math.isfinite(v) for v in summary.values())
    assert all(summary[name] > 0 for name in DEMANDED)


def test_the_recalls_lie_between_nothing_and_the_oracle(summary):
    for layer in ("layer_0", "layer_1", "mtp"):
        recall = {
            c: summary[f"recall/{layer}/{c}"] for c in ("indexer", "random", "window", "oracle")
        }
        assert max(recall.values()) == recall["oracle"] <= 1


def test_the_run_leaves_its_report_and_figure(whole_run):
    text = (whole_run / "report.md").read_text()

    assert text.endswith("\n\nToo small.\n")
    assert (whole_run / "plots" / "evidence.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((whole_run / "config.json").read_text())["sparse"]["steps"] == 4


def test_the_warmup_moves_the_indexers_and_not_one_bit_of_the_rest(whole_run, weights_of):
    before, after = weights_of(whole_run / "stages/dense"), weights_of(whole_run / "stages/warmup")

    for name in before:
        assert np.array_equal(before[name], after[name]) == (".indexer." not in name), name


@pytest.mark.parametrize(
    ("first", "then"),
    [("warmup", "dense_control"), ("warmup", "window_control"), (None, "dense")],
)
def test_stages_without_a_selection_leave_the_indexers_alone(
    whole_run, weights_of, tiny_parameters, first, then
):
    after = weights_of(whole_run / "stages" / then)
    before = tiny_parameters.weights if first is None else weights_of(whole_run / "stages" / first)

    for name in tiny_parameters.weights:
        assert np.array_equal(before[name], after[name]) == (".indexer." in name), name


def test_sparse_training_moves_everything(whole_run, weights_of):
    before, after = weights_of(whole_run / "stages/warmup"), weights_of(whole_run)

    assert [name for name in before if np.array_equal(before[name], after[name])] == []


@pytest.mark.parametrize("folder", ["stages/dense", "stages/dense_control", "."])
def test_the_router_bias_moves_by_gamma_a_step_and_is_saved(
    whole_run, weights_of, folder, tiny_run
):
    biases = {n: v for n, v in weights_of(whole_run / folder).items() if n.endswith("gate.bias")}
    before = {n: np.zeros_like(v) for n, v in biases.items()}
    steps = 4 if folder == "stages/dense" else 8

    assert sorted(biases) == ["moe_layers.moe.gate.bias", "mtp.block.moe.gate.bias"]
    for name, bias in biases.items():
        assert bias.dtype == np.float32
        moves = (bias - before[name]) / tiny_run.dense.loss.bias_rate
        np.testing.assert_allclose(moves, np.round(moves), atol=1e-3)
        assert 0 < np.abs(moves).max() <= steps + 1e-3


def test_each_stage_reports_the_numbers_that_mean_something_in_it(whole_run, lines_of):
    main = {"lm", "mtp", "balance", "grad_norm", "lr"}
    indexer = {"kl", "indexer_grad_norm", "indexer_lr"}
    names = {
        folder: set(lines_of(whole_run / folder)[0])
        - {"step", "loss", "max_load", "max_device_load"}
        for folder in ("stages/dense", "stages/warmup", ".", "stages/window_control")
    }

    assert names == {
        "stages/dense": main, "stages/warmup": indexer, ".": main | indexer, "stages/window_control": main,
    }  # fmt: skip


def test_the_controls_see_the_sparse_stages_rates(whole_run, lines_of):
    rates = [[row["lr"] for row in lines_of(whole_run / f)] for f in (".", "stages/dense_control")]

    assert rates[0] == rates[1] == [np.float32(5e-3)] + [np.float32(1e-2)] * 3


def test_a_finished_run_says_so_and_computes_nothing_again(
    run_with_evidence, whole_run, monkeypatch, caplog, capsys
):
    for name in ("run_leg", "open_corpora", "_gather_evidence"):
        monkeypatch.setattr(pretrain, name, lambda *args: pytest.fail("computed again"))

    with caplog.at_level(logging.INFO, logger="train"):
        assert pretrain.main(run_with_evidence, whole_run) == 0

    assert "this run is finished" in caplog.text
    assert (whole_run / "report.md").read_text() in capsys.readouterr().out


def test_another_config_in_the_same_folder_is_refused_and_changes_nothing(
    run_with_evidence, whole_run
):
    before = (whole_run / "config.json").read_text()

    with pytest.raises(
        UsageError, match=r"holds a run of another config \(seed: 0 -> 1\)"
    ) as raised:
        pretrain.main(replace(run_with_evidence, seed=1), whole_run)

    assert raised.value.exit_status == 2
    assert (whole_run / "config.json").read_text() == before
    assert (whole_run / "summary.json").is_file()


def test_a_change_of_what_is_measured_measures_again_and_trains_nothing(
    run_with_evidence, whole_run, lines_of, tmp_path
):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    evidence = replace(run_with_evidence.evidence, caveat="Still too small.")

    pretrain.main(replace(run_with_evidence, evidence=evidence), folder)

    assert (folder / "report.md").read_text().endswith("Still too small.\n")
    assert lines_of(folder) == lines_of(whole_run)
    old, new = (json.loads((f / "summary.json").read_text()) for f in (whole_run, folder))
    assert old | {"wall_s": 0} == new | {"wall_s": 0}


@pytest.fixture
def shell(run_with_evidence, config_text, tmp_path, capsys):
    """Run the command in a fresh folder; return its status and what it wrote to standard error."""

    def run(*argv, cfg=run_with_evidence, workdir="run"):
        (tmp_path / "mine.py").write_text(config_text(cfg))
        where = ["--config", str(tmp_path / "mine.py"), "--workdir", str(tmp_path / workdir)]
        status = command.run_command(pretrain.main, [*where, *argv], about=pretrain.ABOUT)
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sparse.step=3", "unknown config field sparse.step; did you mean sparse.steps"),
        ("sparse.steps=many", "sparse.steps=many must be a whole number"),
        ("model.vocab_size=100", "vocabulary too small: vocab_size=100"),
        ("model.indexer.topk=16", "model.indexer.topk=16 must be below the warmup stage's seq_len=16"),
        ("sparse.microbatches=3", "sparse.microbatches=3 must divide the batch of 4 rows"),
        ("mesh.ici_tensor=3", "mesh.ici_* axes"),
        ("evidence.rows=100000", "n_rows=100000 must be in [1, "),
        ("init_from=nowhere", "init_from=nowhere: no such folder"),
        ("data.heldout_fraction=0.0", "the heldout split of source"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_one_line_and_status_2(shell, tmp_path, override, message):
    status, err = shell(override)

    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("crash.txt"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "No such file|no such"),
        ("", "is empty"),
        ('{"text": "ab"}\n' * 9, "split of source|no held-out document has more than"),
    ],
)
def test_text_that_can_not_be_trained_on_is_one_line_and_status_2(
    shell, run_with_evidence, tmp_path, texts, message
):
    path = tmp_path / "mine.jsonl"
    if texts is not None:
        path.write_text(texts)
    source = replace(run_with_evidence.data.sources[0], path=str(path))
    cfg = replace(run_with_evidence, data=replace(run_with_evidence.data, sources=(source,)))

    status, err = shell(cfg=cfg)

    assert status == 2
    assert err.startswith("error: ")
    assert re.search(message, err)
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("crash.txt"))


def test_a_folder_that_can_not_be_made_is_one_line_and_status_2(shell):
    status, err = shell(workdir="mine.py/run")

    assert status == 2
    assert "mine.py/run cannot be written: Not a directory" in err


def test_a_mistake_put_right_may_use_the_same_folder(shell):
    assert shell("model.vocab_size=100")[0] == 2

    status, err = shell("model.vocab_size=101")

    assert status == 2
    assert err.startswith("error: vocabulary too small: vocab_size=101")


def test_another_model_to_start_from_is_one_line(shell, whole_run, tmp_path):
    status, err = shell("model.ffn_dim=24", f"init_from={whole_run / 'stages' / 'dense'}")

    assert status == 2
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "is of another model (model.ffn_dim: " in errors[0]
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("crash.txt"))


def test_a_step_folder_to_start_from_names_the_run(shell, whole_run):
    run = whole_run / "stages" / "dense"
    step = next((run / "checkpoints").iterdir())

    status, err = shell(f"init_from={step}")

    assert status == 2
    assert f"give the run's folder {run}" in err
