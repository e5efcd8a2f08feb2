"""Figures of attempts whose outcomes are known."""

import pytest

from train.agents.environment import Grade, Task
from train.agents.trajectory import Trajectory
from train.evaluation import report
from train.evaluation.attempts import Key, Planned
from train.evaluation.config import EvaluateConfig, PolicyConfig

POLICIES = (PolicyConfig(name="a", place="x"), PolicyConfig(name="b", place="y"))


def run_of(policy, environment, task, sample, run, score, *, steps=1, tokens=10, end="answer"):
    """A run and what came of it."""
    planned = Planned(
        Key(policy, environment, task, sample, run),
        None,
        Task(name=task, environment=environment, prompt="?"),
        0,
    )
    grade = None if score is None else Grade(score=score)
    trajectory = Trajectory(
        task=task, environment=environment, messages=(), calls=(), end=end, answer="",
        steps=steps, tokens=tokens, seconds=1.0, grade=grade,
    )  # fmt: skip
    return planned, trajectory


def collect(pairs):
    return report.collect([run for run, _ in pairs], {run.key: found for run, found in pairs})


@pytest.fixture
def cfg():
    return EvaluateConfig(policies=POLICIES, families=(), samples=2, ks=(1, 2))


@pytest.fixture
def attempts():
    scores = {("e", "t0"): (1.0, 0.0), ("e", "t1"): (0.5, 0.5), ("f", "t0"): (None, 1.0)}
    pairs = [
        run_of("a", e, t, i, 0, score, steps=i + 1, tokens=100, end="answer" if score else "steps")
        for (e, t), two in scores.items()
        for i, score in enumerate(two)
    ]
    pairs += [run_of("b", e, t, i, 0, 0.0) for e, t in scores for i in range(2)]
    return collect(pairs)


def test_the_figures_of_known_outcomes(cfg, attempts):
    found = report.figures_of(cfg, attempts)

    assert found["a/all/tasks"] == 3
    assert found["a/all/attempts"] == 6
    assert found["a/all/success"] == found["a/all/pass@1"] == pytest.approx(1 / 3)
    assert found["a/all/pass@2"] == pytest.approx(2 / 3)
    assert found["a/all/score"] == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    assert found["a/e/success"] == pytest.approx(0.25)
    assert found["a/f/success"] == pytest.approx(0.5)
    assert (found["a/all/steps"], found["a/all/tokens"]) == (1.5, 100)
    assert found["a/all/end/steps"] == pytest.approx(2 / 6)
    assert found["b/all/success"] == 0
    assert found["b/all/success_high"] == pytest.approx(1 - 0.025 ** (1 / 3))
    assert found["a/rating"] > 1000 > found["b/rating"]
    assert all(
        found[f"{n}_low"] <= found[n] <= found[f"{n}_high"] for n in ("a/all/success", "a/rating")
    )


def test_of_several_runs_the_one_with_the_fewest_steps_counts_and_all_are_paid_for(cfg):
    pairs = [
        run_of("a", "e", "t", 0, 0, 1.0, steps=5, tokens=50),
        run_of("a", "e", "t", 0, 1, 0.0, steps=3, tokens=30),
        run_of("a", "e", "t", 0, 2, 1.0, steps=1, tokens=10, end="tokens"),
    ]
    (attempt,) = collect(pairs)["a"]["e"]["t"]

    assert attempt == report.Attempt(0.0, False, 9, 90, "answer")


def test_the_table_has_a_row_for_all_and_for_each_environment(cfg, attempts):
    text = report.report_text(cfg, attempts, report.figures_of(cfg, attempts))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]

    assert [row[0].strip("| ") for row in rows[2:]] == ["a", "a", "a", "b", "b", "b"]
    assert [row[1] for row in rows[2:5]] == ["all", "e", "f"]
    assert len({len(row) for row in rows}) == 1
    assert "pass@2" in rows[0]
    assert rows[2][4].startswith("0.333 [")
    assert "a ended by answer 66.7%, steps 33.3%." in text
    assert "Bradley-Terry" in text
