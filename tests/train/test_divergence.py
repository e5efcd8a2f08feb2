import json
import math

import pytest

from train import divergence

CFG = divergence.LossGuardConfig(window=3, factor=2.0, patience=2)


def guard_after(losses):
    guard = divergence.LossGuard(CFG)
    for step, loss in enumerate(losses):
        guard.check(step, loss)
    return guard


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_divergence_at_once(loss):
    with pytest.raises(divergence.DivergedError, match=f"the loss is {loss} at step 7"):
        guard_after([]).check(7, loss)


def test_a_lasting_spike_is_divergence():
    guard = guard_after([1.0, 1.0, 1.0, 5.0])

    with pytest.raises(divergence.DivergedError, match=r"5 at step 9, .* 2 checks .* median 1$"):
        guard.check(9, 5.0)


def test_spikes_with_a_normal_loss_between_them_are_forgiven():
    guard = guard_after([1.0, 1.0, 1.0, 5.0, 1.0, 5.0, 1.0])
    assert guard.state() == {"normal": [1.0, 1.0, 1.0], "spikes": 0}


def test_a_loss_of_just_the_factor_is_no_spike():
    guard = guard_after([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    assert guard.state() == {"normal": [2.0, 2.0, 2.0], "spikes": 0}


def test_the_median_moves_with_normal_losses():
    guard = guard_after([1.0, 1.0, 1.0, 1.9, 1.9, 3.5, 3.5, 3.5])
    assert guard.state() == {"normal": [3.5, 3.5, 3.5], "spikes": 0}


def test_nothing_is_a_spike_before_the_window_is_full():
    guard = guard_after([1.0, 9.0, 9.0])
    assert guard.state() == {"normal": [1.0, 9.0, 9.0], "spikes": 0}


def test_a_negative_loss_has_no_spikes():
    guard = guard_after([-1.0, -1.0, -1.0, 5.0, 5.0])
    assert guard.state() == {"normal": [-1.0, 5.0, 5.0], "spikes": 0}


def test_a_restored_guard_judges_as_if_it_had_never_stopped():
    resumed = divergence.LossGuard(CFG)
    resumed.restore(json.loads(json.dumps(guard_after([1.0, 1.0, 1.0, 5.0]).state())))

    with pytest.raises(divergence.DivergedError, match="2 checks in a row"):
        resumed.check(4, 5.0)


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("factor", 1.0), ("patience", 0)])
def test_a_config_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        divergence.LossGuardConfig(**{field: value})
