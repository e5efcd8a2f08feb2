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


@pytest.fixture(scope="module")
def watched(make_engine, params):
    """Responses with selections: of 3 to 26 tokens, where a token selects 8."""
    engine = make_engine(params, prefill_chunk=10)
    engine.report_selection(True)
    prompts = [list(range(1, 2 + n)) for n in (2, 12, 19)]
    requests = [
        (p, SamplingParams(top_p=0.9, seed=i, max_tokens=4 + i)) for i, p in enumerate(prompts)
    ]
    found = dict(rollout.sample(engine, requests, version=0))
    return [found[i] for i in range(3)]


WATCHED_ROWS = {"n_rows": 1, "row_length": 48}  # the two long ones share a row


@pytest.mark.parametrize("masked_max_len", [48, 1])  # attention in its two forms
def test_a_learner_with_the_same_weights_selects_the_same_keys(
    cfg, params, watched, masked_max_len
):
    mla = dataclasses.replace(cfg.mla, masked_max_len=masked_max_len)
    score = policy.make_score(dataclasses.replace(cfg, mla=mla), selection=True)

    found = agreement.compare_selection(score, params, watched, **WATCHED_ROWS)

    # All but the last token of a response, from the ninth on.
    n_tokens = sum(max(len(r.tokens) - 1 - cfg.indexer.topk, 0) for r in watched)
    assert n_tokens > 20
    assert found == agreement.Selection(cfg.n_layers * n_tokens, 0, 0, 0, (0,) * cfg.n_layers)
    assert found.describe() == f"selection: 0 of {3 * n_tokens} sets differ, 0 keys"


def test_keys_that_an_indexer_with_other_weights_selects_are_counted(cfg, params, watched):
    name = "moe_layers.attn.indexer.weights_proj"
    silent = (
        params.weights[name].at[-1].set(0.0)
    )  # all scores tie: the last layer takes its first keys
    other = params._replace(weights=params.weights | {name: silent})

    found = agreement.compare_selection(
        policy.make_score(cfg, selection=True), other, watched, **WATCHED_ROWS
    )

    late = np.concatenate([r.selection[-1, 8:-1] >= 8 for r in watched])  # [tokens, keys]
    n_differ = int(late.any(axis=1).sum())
    assert found.differ == found.tokens == n_differ > 20
    assert found.by_layer == (0, 0, n_differ)
    assert found.keys == late.sum() > n_differ
    assert found.describe().endswith(f"{late.sum()} keys, of {n_differ} tokens, from layer 2 on")


def test_where_a_token_reads_all_its_keys_nothing_is_compared(cfg, params, watched):
    short = watched[:1]
    assert len(short[0].tokens) <= cfg.indexer.topk

    found = agreement.compare_selection(
        policy.make_score(cfg, selection=True), params, short, **WATCHED_ROWS
    )

    assert found.sets == 0
    assert "nothing to compare" in found.describe()
