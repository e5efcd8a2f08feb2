import jax
import numpy as np
import pytest

from dsv32_jax import parameters
from dsv32_jax.generate.sampling import SamplingParams
from train.rl import packing, policy, rollout

ROW = 64
LOG_P_TOL = 2e-4  # float32 through a cache and in one pass, at temperatures near 1


@pytest.fixture(scope="module")
def requests(cfg):
    rng = np.random.default_rng(1)
    settings = [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 0.9, 5)] * 3
    return [
        (
            rng.integers(0, cfg.vocab_size, size=3 + i).tolist(),
            SamplingParams(temperature=t, top_p=p, top_k=k, seed=i, max_tokens=4 + 2 * i),
        )
        for i, (t, p, k) in enumerate(settings)
    ]


@pytest.fixture(scope="module")
def rollouts(make_engine, params, requests):
    found = dict(rollout.sample(make_engine(params), requests, version=7))
    return [found[i] for i in range(len(requests))]


@pytest.fixture(scope="module")
def packed(rollouts):
    rows = packing.plan_rows([len(r.tokens) for r in rollouts], ROW)
    return packing.pack(rollouts, rows, n_rows=len(rows) + 1, row_length=ROW)


def test_every_request_comes_back_with_its_prompt_and_settings(rollouts, requests):
    for found, (prompt, params) in zip(rollouts, requests, strict=True):
        assert found.tokens[: found.n_prompt].tolist() == prompt
        assert found.n_drawn == len(found.log_p) == params.max_tokens
        assert (found.temperature, found.reason, found.version) == (
            params.temperature, "length", 7,
        )  # fmt: skip
        assert (found.kept is None) == (params.top_p == 1 and params.top_k == 0)


def test_the_policy_agrees_with_the_sampler_token_by_token(cfg, params, packed):
    scores = policy.make_score(cfg)(params, packed)

    assert packed.mask.sum() == sum(range(4, 22, 2))
    difference = np.where(packed.mask, scores.log_p - packed.log_p, 0)
    assert np.abs(difference).max() < LOG_P_TOL
    assert scores.rerouted == 0
    assert np.isfinite(np.asarray(scores.entropy)[packed.mask]).all()


@pytest.mark.parametrize("left_out", ["kept", "temperature"])
def test_without_the_samplers_settings_the_ratio_is_not_one(cfg, params, packed, left_out):
    other = packed._replace(temperature=np.ones_like(packed.temperature))
    run = policy.make_score(cfg, kept=left_out != "kept")

    scores = run(params, packed if left_out == "kept" else other)

    difference = np.where(packed.mask, scores.log_p - packed.log_p, 0)
    assert np.abs(difference).max() > 100 * LOG_P_TOL


def test_replayed_experts_hold_where_the_router_has_moved(cfg, params, packed):
    moved = dict(params.router_bias)
    moved["moe_layers.moe.gate.bias"] = moved["moe_layers.moe.gate.bias"] + np.linspace(
        -3, 3, cfg.moe.n_experts, dtype=np.float32
    )
    other = params._replace(router_bias=moved)

    replayed = policy.make_score(cfg)(other, packed)
    chosen = policy.make_score(cfg, replay=False)(other, packed)

    # The bias moves the choice only, so that replay gives the sampler's own values back.
    same, changed = (
        np.abs(np.where(packed.mask, x.log_p - packed.log_p, 0)).max() for x in (replayed, chosen)
    )
    assert same < LOG_P_TOL
    assert changed > 100 * LOG_P_TOL
    assert replayed.rerouted > 0


def test_other_rows_and_padding_change_nothing(cfg, params, rollouts, packed):
    rows = [[i] for i in range(len(rollouts))]
    alone = packing.pack(rollouts, rows, n_rows=len(rows), row_length=ROW)

    together, apart = (policy.make_score(cfg)(params, x).log_p for x in (packed, alone))

    for i in range(len(rollouts)):
        b, s = np.argwhere(packed.rollout == i)[0]
        n = rollouts[i].n_drawn
        np.testing.assert_allclose(together[b, s, :n], apart[i, 0, :n], atol=LOG_P_TOL)


def test_the_same_seeds_draw_the_same_rollouts_after_the_weights_were_elsewhere(
    cfg, make_engine, params, requests, rollouts
):
    engine = make_engine(params)
    other = jax.tree.map(lambda x: 0.9 * x, params)
    engine.replace_model(parameters.assemble(cfg, other))
    away = dict(rollout.sample(engine, requests, version=1))
    engine.replace_model(parameters.assemble(cfg, params))

    back = dict(rollout.sample(engine, requests, version=2))

    for i, before in enumerate(rollouts):
        np.testing.assert_array_equal(back[i].tokens, before.tokens)
        np.testing.assert_allclose(back[i].log_p, before.log_p, atol=LOG_P_TOL)
    assert any(not np.array_equal(away[i].tokens, r.tokens) for i, r in enumerate(rollouts))


def test_weights_are_not_replaced_under_a_running_request(cfg, make_engine, params):
    engine = make_engine(params)
    engine.submit([1, 2], SamplingParams())

    with pytest.raises(RuntimeError, match="only be replaced while there is no request"):
        engine.replace_model(parameters.assemble(cfg, params))


@pytest.mark.parametrize(
    ("setting", "keep_sets", "message"),
    [
        ({"temperature": 0.0}, True, "temperature=0 draws greedily"),
        ({"top_p": 0.9}, False, "top_p and top_k need keep_sets=True"),
        ({"top_k": 3}, False, "top_p and top_k need keep_sets=True"),
    ],
)
def test_settings_that_would_falsify_the_ratio_are_refused(
    make_engine, params, setting, keep_sets, message
):
    engine = make_engine(params, keep_sets=keep_sets)

    with pytest.raises(ValueError, match=message):
        next(rollout.sample(engine, [([1], SamplingParams(**setting))], version=0))
