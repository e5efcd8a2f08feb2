import dataclasses

import numpy as np
import pytest

from dsv32_jax.errors import WorkFailedError
from dsv32_jax.generate.sampling import SamplingParams
from train.rl import agreement, policy, rollout

TOLERANCE = 1e-3
ROWS = {"n_rows": 2, "row_length": 32, "tolerance": TOLERANCE}


@pytest.fixture(scope="module")
def rollouts(make_engine, params):
    requests = [
        ([1, 2, 3 + i], SamplingParams(top_p=0.9, seed=i, max_tokens=4 + i)) for i in range(7)
    ]
    found = dict(rollout.sample(make_engine(params), requests, version=0))
    return [found[i] for i in range(7)]


def test_a_sampler_with_the_same_weights_agrees(cfg, params, rollouts):
    found = agreement.compare(policy.make_score(cfg), params, rollouts, **ROWS)

    assert found.tokens == sum(r.n_drawn for r in rollouts) == sum(range(4, 11))
    assert abs(found.ratio_mean - 1) < TOLERANCE
    assert (found.over, found.first, found.rerouted) == (0, None, 0)
    agreement.require_agreement(found, tolerance=TOLERANCE, share=0.0)


@pytest.mark.parametrize("value", [-9.0, np.nan])
def test_the_first_token_that_differs_is_named(cfg, params, rollouts, value):
    log_p = rollouts[4].log_p.copy()
    log_p[[2, 5]] = value
    wrong = [*rollouts[:4], dataclasses.replace(rollouts[4], log_p=log_p), *rollouts[5:]]

    found = agreement.compare(policy.make_score(cfg), params, wrong, **ROWS)

    assert found.over == 2
    assert (found.first.rollout, found.first.place) == (4, 2)
    assert found.first.token == rollouts[4].response[2]
    np.testing.assert_allclose(found.first.learner, rollouts[4].log_p[2], atol=TOLERANCE)
    message = "disagree on 2 of 49 tokens by more than 0.001 nats .* token 2 of response 4, id"
    with pytest.raises(WorkFailedError, match=message):
        agreement.require_agreement(found, tolerance=TOLERANCE, share=0.0)
    agreement.require_agreement(found, tolerance=TOLERANCE, share=0.05)


def test_a_sampler_that_forgot_its_kept_sets_is_stopped(cfg, params, rollouts):
    forgot = [dataclasses.replace(r, kept=None) for r in rollouts]

    found = agreement.compare(policy.make_score(cfg), params, forgot, **ROWS)

    assert found.ratio_mean < 0.97  # the learner's mass lies on tokens that were cut off too
    with pytest.raises(WorkFailedError, match="sampler and learner disagree"):
        agreement.require_agreement(found, tolerance=TOLERANCE, share=0.05)
