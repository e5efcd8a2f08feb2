import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from configs import grpo as default
from dsv32_jax import config
from dsv32_jax.errors import UsageError, WorkFailedError
from train import grpo
from train.loop import StoppedError
from train.metrics import MetricsConfig
from train.rl import trainer
from train.rl.problems import Family
from train.rl.rewards import Rewarder, Weights
from train.rl.task_source import TaskConfig, TaskFile
from train.start import restore_parameters

SUMMARY = (
    "accuracy/before", "accuracy/after", "accuracy/chain_sum/before", "accuracy/chain_sum/after", "ratio/mean",
    "masked_fraction", "clip_fraction", "kl", "entropy", "length", "tokens_per_s/rollout", "tokens_per_s/train",
    "gate/ratio_mean", "gate/largest_difference", "wall_s",
)  # fmt: skip
TIMES = ("tokens_per_s/rollout", "tokens_per_s/train", "seconds_per_step")


def short(stage, steps):
    return dataclasses.replace(stage, steps=steps)


def rollouts_of(cfg, **changes):
    return dataclasses.replace(cfg.rl.rollouts, **changes)


REWARD = """
def reward(task, text, tokens):
    return len(set(text)) / 8
"""


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    """The default run, made small enough for seconds, with a reward that an untrained policy gets too."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    base = default.get_config()
    cold = base.cold_start
    cold = dataclasses.replace(
        cold, examples=40, seq_len=128, batch_size=4,
        dense=short(cold.dense, 3), warmup=short(cold.warmup, 1), sparse=short(cold.sparse, 1),
    )  # fmt: skip
    rollouts = dataclasses.replace(
        base.rl.rollouts, prompts=2, group_size=2, max_prompt_tokens=96, max_tokens=6, slots=4,
        staleness=1,
    )  # fmt: skip
    learner = dataclasses.replace(base.rl.learner, rows=2, row_length=128)
    rl = dataclasses.replace(
        base.rl, steps=3, rollouts=rollouts, learner=learner, evaluate_every=2, evaluate_tasks=3,
        samples_every=1, gate=dataclasses.replace(base.rl.gate, prompts=2, selection=False),
    )  # fmt: skip
    small = dataclasses.replace(config.tiny(), n_layers=1, n_dense_layers=0)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(small, vocab_size=264, mtp=False),
        tasks=TaskConfig(families=(Family(name="chain_sum", settings=(("max_terms", 2),)),), held_out=4),
        cold_start=cold,
        rl=rl,
        rewards=dataclasses.replace(
            base.rewards,
            workers=1,
            weights=(Weights(correct=1.0, format=0.1, custom=1.0),),
            custom=f"{path}:reward",
        ),
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=1),
        metrics=MetricsConfig(tensorboard=False),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert grpo.main(cfg, folder) == 0
    return folder


def rows_without_times(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in TIMES and not k.startswith("seconds/")}
        for row in rows
    ]


def test_a_run_from_nothing_leaves_what_a_person_looks_for(whole, cfg):
    summary = json.loads((whole / "summary.json").read_text())
    assert set(SUMMARY) <= set(summary)
    assert all(np.isfinite(value) for value in summary.values())
    assert abs(summary["gate/ratio_mean"] - 1) < 1e-4
    assert summary["step/after"] == 3
    rows = rows_without_times(whole)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ["accuracy" in row for row in rows] == [False, True, True]
    assert {"reward/mean", "reward/correct", "reward/format", "masked_fraction", "entropy"} <= set(
        rows[0]
    )
    assert "| chain_sum |" in (whole / "report.md").read_text()
    assert (whole / "plots" / "grpo.png").read_bytes().startswith(b"\x89PNG")
    samples = (whole / "samples.md").read_text()
    assert samples.count("## Step") == 3
    assert "arithmetic problem" in samples
    examples = (whole / "cold_start" / "examples.jsonl").read_text().splitlines()
    assert len(examples) == 40
    assert json.loads(examples[0])["prompt"].startswith(
        "<｜begin▁of▁sentence｜>State the final answer"
    )


def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(
    cfg, whole, tmp_path, monkeypatch, mesh
):
    step, calls = trainer.Learner.step, []

    def step_and_stop(self, *args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(trainer.Learner, "step", step_and_stop)
    with pytest.raises(StoppedError, match="SIGTERM at step 2: saved"):
        grpo.main(cfg, tmp_path)
    assert not (tmp_path / "summary.json").exists()

    assert grpo.main(cfg, tmp_path) == 0

    assert rows_without_times(tmp_path) == rows_without_times(whole)
    mine, other = (restore_parameters(cfg, folder, mesh).weights for folder in (tmp_path, whole))
    for name in mine:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
    assert not np.array_equal(
        mine["head"], restore_parameters(cfg, whole / "cold_start", mesh).weights["head"]
    )
    assert (tmp_path / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_a_run_stopped_while_rewards_are_awaited_draws_the_same_again(
    cfg, whole, tmp_path, monkeypatch
):
    cfg = dataclasses.replace(cfg, cold_start=None, init_from=str(whole / "cold_start"))
    score, calls = Rewarder.score, []

    def stop_in_the_third_draw(self, tasks, responses):
        calls.append(1)
        if len(calls) == 4:  # after the evaluation and two draws
            os.kill(os.getpid(), signal.SIGINT)
            raise WorkFailedError("the run was stopped while responses were rewarded")
        return score(self, tasks, responses)

    monkeypatch.setattr(Rewarder, "score", stop_in_the_third_draw)
    with pytest.raises(StoppedError, match="SIGINT at step 1: saved"):
        grpo.main(cfg, tmp_path)

    assert grpo.main(cfg, tmp_path) == 0

    assert rows_without_times(tmp_path) == rows_without_times(whole)


def test_a_finished_run_says_so_and_changes_nothing(cfg, whole, caplog, capsys):
    before = (whole / "summary.json").read_bytes()
    with caplog.at_level("INFO", logger="train.grpo"):
        assert grpo.main(cfg, whole) == 0

    assert "this run is finished" in caplog.text
    assert "| held-out accuracy | before | after |" in capsys.readouterr().out
    assert (whole / "summary.json").read_bytes() == before


def test_another_config_in_the_folder_is_refused(cfg, whole):
    other = dataclasses.replace(cfg, seed=1)

    with pytest.raises(UsageError, match=r"holds a run of another config .*seed"):
        grpo.main(other, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"rl": dataclasses.replace(c.rl, evaluate_tasks=5)}, "evaluate_tasks=5, but only 4 tasks"),
        (lambda c: {"model": dataclasses.replace(c.model, vocab_size=97)}, "vocabulary too small"),
        (
            lambda c: {"rl": dataclasses.replace(c.rl, gate=dataclasses.replace(c.rl.gate, prompts=9))},
            r"gate\.prompts=9, but only 4 tasks",
        ),
        (
            lambda c: {"rl": dataclasses.replace(c.rl, rollouts=rollouts_of(c, max_prompt_tokens=3))},
            r"max_prompt_tokens=3, but none of the first 100 .* that of chain_sum.* has \d+ tokens",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_trained(cfg, change, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        grpo.main(dataclasses.replace(cfg, **change(cfg)), tmp_path)

    assert not (tmp_path / "cold_start").exists()


def test_a_held_out_prompt_that_the_sampler_can_not_take_is_named(cfg, tmp_path):
    path, long = tmp_path / "t.jsonl", "y" * 300
    lines = [
        {"question": f"{i} {long * (i % 2)}", "verifier": "exact", "answer": "a"}
        for i in range(100)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = TaskConfig(files=(TaskFile(path=str(path)),), held_out_fraction=0.2)
    rl = dataclasses.replace(cfg.rl, evaluate_tasks=10)

    with pytest.raises(
        UsageError, match=r"held-out task t:\d+ has a prompt of \d+ tokens, .*max_tokens=102;"
    ):
        grpo.main(dataclasses.replace(cfg, tasks=tasks, rl=rl), tmp_path)


def test_tasks_that_nothing_judges_are_named(cfg, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{i}", "rubric": "r"}) for i in range(200)))
    tasks = TaskConfig(files=(TaskFile(path=str(path), weight=1.0),))

    with pytest.raises(UsageError, match="has no verifier, but correct=1 counts"):
        grpo.main(dataclasses.replace(cfg, tasks=tasks), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cold_start": None}, "a policy to begin with is needed"),
        ({"init_from": "runs/x"}, "init_from and cold_start exclude each other"),
    ],
)
def test_there_must_be_one_policy_to_begin_with(cfg, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(cfg, **change)


def test_a_run_begins_with_the_policy_of_another_run(cfg, whole, tmp_path):
    later = dataclasses.replace(
        cfg, cold_start=None, init_from=str(whole / "cold_start"),
        rl=dataclasses.replace(cfg.rl, steps=1),
    )  # fmt: skip

    assert grpo.main(later, tmp_path) == 0

    mine, other = (json.loads((f / "summary.json").read_text()) for f in (tmp_path, whole))
    assert mine["accuracy/before"] == other["accuracy/before"]
    assert not (tmp_path / "cold_start").exists()
