import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from dsv32_jax.errors import WorkFailedError
from train.checkpoint import CheckpointConfig
from train.metrics import MetricsConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl import loop
from train.rl.objective import ObjectiveConfig
from train.rl.rewards import Scored
from train.rl.settings import GateConfig, LearnerConfig, RlConfig, RolloutConfig
from train.rl.trainer import Asked
from train.signals import StopOnSignal

RL = RlConfig(
    steps=4,
    rollouts=RolloutConfig(
        prompts=2, group_size=3, max_prompt_tokens=6, max_tokens=4, slots=6, page_size=4,
        top_p=0.9, staleness=1,
    ),
    learner=LearnerConfig(
        objective=ObjectiveConfig(kl_strength=0.01, off_policy_delta=0.5),
        optimizer=OptimizerConfig(main=Schedule(peak=5e-3), adam=AdamConfig(weight_decay=0.0)),
        rows=4, row_length=16, reference_every=3,
    ),
    gate=GateConfig(prompts=3, tolerance=1e-3, selection=False),
    evaluate_every=2, evaluate_tasks=5, samples_every=2,
)  # fmt: skip


class Low:
    """Rewards tokens of the vocabulary's lower half."""

    eos_id = 0

    def __init__(self, half, first=0, reward=None):
        self.half, self.first, self.reward = half, first, reward

    def ask(self, number):
        rng = np.random.default_rng(self.first + number)
        return Asked("low", rng.integers(1, self.half, size=3 + number % 3).tolist(), number, "low")

    def judge(self, answers):
        if self.reward is not None:
            return [self.reward(task) for task, _ in answers]
        return [Scored(float(np.mean(drawn.response < self.half)), {}) for _, drawn in answers]


@pytest.fixture
def setting(cfg):
    half = cfg.vocab_size // 2
    return loop.Setting(
        model=cfg, rl=RL, kl_strength={}, tasks=Low(half), held_out=Low(half, first=10**6),
        text=lambda tokens: " ".join(map(str, tokens)),
        checkpoint=CheckpointConfig(every_steps=1, keep_last=2, keep_best=0),
        metrics=MetricsConfig(tensorboard=False), seed=5,
    )  # fmt: skip


@pytest.fixture
def start(params):
    return lambda: jax.tree.map(lambda x: x + 0, params)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def final_arrays(folder, setting, mesh):
    state, step = loop.Run(setting, folder, mesh)._restore()
    return step, jax.tree.map(np.asarray, state)


def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path, setting, start, mesh):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    figures = loop.Run(setting, whole, mesh).run(start, StopOnSignal())
    first = setting._replace(rl=dataclasses.replace(RL, steps=2))
    loop.Run(first, halves, mesh).run(start, StopOnSignal())

    again = loop.Run(setting, halves, mesh).run(lambda: pytest.fail("starts anew"), StopOnSignal())

    assert again.keys() == figures.keys()
    for name in ("accuracy/before", "accuracy/after"):
        assert again[name] == figures[name]
    (n, mine), (m, other) = (final_arrays(f, setting, mesh) for f in (halves, whole))
    assert n == m == 4
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(mine.reference.weights["head"], mine.parameters.weights["head"])
    names = ("step", "reward/mean", "loss", "kl", "ratio/mean", "masked_fraction", "length")
    assert [[row[n] for n in names] for row in rows(halves)] == [
        [row[n] for n in names] for row in rows(whole)
    ]
    # Drawn a step before it is learned from, so that the ratio is not one.
    assert rows(whole)[0]["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert abs(rows(whole)[1]["ratio/mean"] - 1) > 1e-4
    assert [row["step"] for row in rows(whole) if "accuracy" in row] == [2, 4]
    assert sorted(p.name for p in whole.glob("pending-*")) == ["pending-3.npz", "pending-4.npz"]
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert [len(sample["responses"]) for sample in samples] == [3] * len(samples) != []


def test_drawing_beside_the_learner_changes_nothing(tmp_path, setting, start, mesh):
    together, apart = tmp_path / "together", tmp_path / "apart"
    overlap = setting._replace(
        rl=dataclasses.replace(RL, rollouts=dataclasses.replace(RL.rollouts, overlap=True))
    )
    for folder, one in ((apart, setting), (together, overlap)):
        folder.mkdir()
        loop.Run(one, folder, mesh).run(start, StopOnSignal())

    (_, mine), (_, other) = (final_arrays(f, setting, mesh) for f in (together, apart))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    names = ("reward/mean", "loss", "kl", "ratio/mean", "length")
    assert [[row[n] for n in names] for row in rows(together)] == [
        [row[n] for n in names] for row in rows(apart)
    ]


def test_a_run_that_trains_its_indexers_goes_on_as_if_never_stopped_and_only_so(
    tmp_path, setting, one_layer, one_layer_parameters, mesh
):
    optimizer = dataclasses.replace(RL.learner.optimizer, indexer=Schedule(peak=5e-3))
    rl = dataclasses.replace(
        RL,
        steps=2,
        learner=dataclasses.replace(RL.learner, optimizer=optimizer),
        gate=dataclasses.replace(RL.gate, selection=True),
    )
    half = one_layer.vocab_size // 2
    small = setting._replace(
        model=one_layer, rl=rl, tasks=Low(half), held_out=Low(half, first=10**6)
    )

    def start():
        return jax.tree.map(jax.numpy.asarray, one_layer_parameters)

    whole, half_done = tmp_path / "whole", tmp_path / "half_done"
    whole.mkdir()
    figures = loop.Run(small, whole, mesh).run(start, StopOnSignal())
    shutil.copytree(whole, half_done)
    shutil.rmtree(half_done / "checkpoints" / "2")
    loop.Run(small, half_done, mesh).run(lambda: pytest.fail("starts anew"), StopOnSignal())

    (_, mine), (_, other) = (final_arrays(f, small, mesh) for f in (half_done, whole))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    name = "moe_layers.attn.indexer.wk"
    assert not np.array_equal(mine.parameters.weights[name], one_layer_parameters.weights[name])
    kl = [row["indexer_kl"] for row in rows(whole)]
    assert kl == [row["indexer_kl"] for row in rows(half_done)]
    assert len(kl) == 2
    assert figures["gate/selection_sets"] > 0
    assert figures["gate/selection_differ"] == figures["gate/selection_keys"] == 0
    with pytest.raises(ValueError, match=r"holds the stage rl_indexer, not rl: .* first step on"):
        loop.Run(small._replace(rl=dataclasses.replace(RL, steps=3)), half_done, mesh).run(
            start, StopOnSignal()
        )


def test_a_selection_that_covers_every_key_is_not_compared(tmp_path, setting, params, mesh, caplog):
    model = setting.model
    wide = dataclasses.replace(model, indexer=dataclasses.replace(model.indexer, topk=9))
    gate = dataclasses.replace(RL.gate, selection=True)
    run = loop.Run(
        setting._replace(model=wide, rl=dataclasses.replace(RL, gate=gate)), tmp_path, mesh
    )

    with caplog.at_level("INFO"):
        run._count_selection(params)  # which nothing is drawn with

    assert "selection: top 9 of 9 keys is all, nothing to compare" in caplog.text


def test_pending_responses_that_were_changed_are_not_learned_from(tmp_path, setting, start, mesh):
    first = setting._replace(rl=dataclasses.replace(RL, steps=1))
    loop.Run(first, tmp_path, mesh).run(start, StopOnSignal())
    (tmp_path / "pending-1.npz").write_bytes(b"other")

    with pytest.raises(WorkFailedError, match=r"pending-1\.npz is not what checkpoint 1 was saved"):
        loop.Run(setting, tmp_path, mesh).run(start, StopOnSignal())


def test_a_run_whose_sampler_and_learner_disagree_does_not_start(tmp_path, setting, start, mesh):
    gate = GateConfig(prompts=3, tolerance=1e-9)
    strict = setting._replace(rl=dataclasses.replace(RL, gate=gate))

    with pytest.raises(WorkFailedError, match="sampler and learner disagree on"):
        loop.Run(strict, tmp_path, mesh).run(start, StopOnSignal())

    assert not (tmp_path / "checkpoints").exists()


def test_a_run_from_which_nothing_can_be_learned_stops_with_its_counts(
    tmp_path, setting, start, mesh
):
    lost = setting._replace(
        tasks=Low(40, reward=lambda task: Scored(None, {}, "raised")),
        rl=dataclasses.replace(RL, steps=9),
    )

    with pytest.raises(WorkFailedError, match=r'5 draws in a row .* "reward/faults": 6\.0,'):
        loop.Run(lost, tmp_path, mesh).run(start, StopOnSignal())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"learner": dataclasses.replace(RL.learner, row_length=9)}, "row_length=9 must hold"),
        (
            {"learner": dataclasses.replace(RL.learner, keep_sampling_mask=False)},
            "keep_sampling_mask=false with top_p or top_k",
        ),
        (
            {"rollouts": dataclasses.replace(RL.rollouts, staleness=0)},
            "off_policy_delta has no effect",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RL, **change)
