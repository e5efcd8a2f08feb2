import math
from types import SimpleNamespace

from train import retention


def test_the_newest_and_the_best_stay():
    metrics = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.8, 5: 0.7}

    assert retention.steps_to_keep([1, 2, 3, 4, 5], metrics, keep_last=2, keep_best=1) == {2, 4, 5}


def test_a_step_that_is_new_and_best_counts_for_both():
    assert retention.steps_to_keep([1, 2], {1: 0.5, 2: 0.1}, keep_last=1, keep_best=1) == {2}


def test_steps_without_a_number_are_never_best():
    metrics = {1: None, 2: math.nan, 3: 5.0}

    assert retention.steps_to_keep([1, 2, 3, 4], metrics, keep_last=1, keep_best=2) == {3, 4}


def test_the_later_of_two_equals_is_the_better():
    assert retention.steps_to_keep([1, 2, 3], {1: 0.5, 2: 0.5}, keep_last=1, keep_best=1) == {2, 3}


def test_the_policy_reads_the_metrics_at_the_time_of_the_decision():
    metrics: dict[int, float | None] = {}
    policy = retention.LastAndBest(metrics, keep_last=1, keep_best=1)
    metrics.update({1: 0.1, 2: 0.2})

    stays = policy.should_preserve([SimpleNamespace(step=s) for s in (1, 2, 3)], context=None)

    assert stays == [True, False, True]
