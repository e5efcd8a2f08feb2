import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from train import pretrain, start
from train.checkpoint import Checkpoints
from train.start import Start

RATES = ("tokens_per_s", "wall_s")


def figures_of(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in found.items() if not name.startswith(RATES)}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_from_a_dense_run_the_warmup_and_the_sparse_stage_are_those_of_the_whole_run(
    run_with_evidence, whole_run, weights_of, tmp_path
):
    cfg = replace(run_with_evidence, dense=None, init_from=str(whole_run / "stages" / "dense"))

    pretrain.main(cfg, tmp_path)

    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == [
        "dense_control", "warmup", "window_control",
    ]  # fmt: skip
    assert_same_weights(weights_of(tmp_path), weights_of(whole_run))
    assert figures_of(tmp_path) == figures_of(whole_run)


def test_from_a_warmup_run_only_the_sparse_stage_runs_and_nothing_untrained_is_measured(
    run_with_evidence, whole_run, weights_of, tmp_path
):
    cfg = replace(run_with_evidence, init_from=str(whole_run / "stages" / "warmup"))

    pretrain.main(cfg, tmp_path)

    assert not (tmp_path / "stages" / "warmup").exists()
    assert_same_weights(weights_of(tmp_path), weights_of(whole_run))
    untrained = ("sparse_untrained", "first", "gap_closed_by_warmup")
    assert figures_of(tmp_path) == {
        name: value
        for name, value in figures_of(whole_run).items()
        if not any(part in name for part in untrained)
    }


@pytest.mark.parametrize(
    ("done", "stages"),
    [
        (None, ["dense", "warmup", "sparse"]),
        ("dense", ["warmup", "sparse"]),
        ("warmup", ["sparse"]),
        ("sparse", ["sparse"]),
    ],
)
def test_the_stages_up_to_where_the_run_begins_are_left_out(tiny_run, tmp_path, done, stages):
    legs = pretrain.legs_of(tiny_run, tmp_path, Start(done, lambda: None))

    assert [leg.name for leg in legs] == stages
    folders = [tmp_path / "stages" / stage for stage in stages[:-1]] + [tmp_path]
    assert [leg.folder for leg in legs] == folders


def test_a_sparse_stage_without_a_warmup_is_warned_about(tiny_run, tmp_path, caplog):
    cfg = replace(tiny_run, dense=None, warmup=None, init_from="x")

    with caplog.at_level(logging.WARNING):
        pretrain.legs_of(cfg, tmp_path, Start("dense", lambda: None))

    assert "its indexer has had no warm-up" in caplog.text


def test_a_control_counts_as_the_stage_it_repeats(tiny_run, whole_run, mesh):
    cfg = replace(tiny_run, init_from=str(whole_run / "stages" / "dense_control"))

    assert start.find_start(cfg, mesh).done == "dense"


def test_a_folder_without_a_checkpoint_is_no_start(tiny_run, mesh, tmp_path):
    cfg = replace(tiny_run, init_from=str(tmp_path))

    with pytest.raises(FileNotFoundError, match=r"init_from=.* holds no finished checkpoint"):
        start.find_start(cfg, mesh)


def test_a_checkpoint_that_no_stage_made_takes_none_as_done(tiny_run, mesh, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", tiny_run.checkpoint)
    checkpoints.save(1, {"a": np.ones(2)}, data_state={}, meta={"from": "elsewhere"}, force=True)
    checkpoints.close()

    assert start.find_start(replace(tiny_run, init_from=str(tmp_path)), mesh).done is None


def test_another_model_is_refused_by_the_fields_that_differ(tiny_run, whole_run, mesh):
    other = replace(tiny_run.model, ffn_dim=24)
    cfg = replace(tiny_run, model=other, init_from=str(whole_run / "stages" / "dense"))

    with pytest.raises(
        ValueError, match=r"is of another model \(model\.ffn_dim: 16 -> 24\)"
    ) as raised:
        start.find_start(cfg, mesh).load()
    assert "\n" not in str(raised.value)
