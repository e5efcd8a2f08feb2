import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import optimizer
from train.optimizer import AdamConfig, OptimizerConfig, Rates, Schedule

NAMES = (
    "embed",
    "dense_layers.attn_norm.weight",
    "dense_layers.attn.wo",
    "dense_layers.attn.indexer.wk",
    "dense_layers.attn.indexer.k_norm.weight",
    "dense_layers.attn.indexer.k_norm.bias",
)
DECAYED = {"embed", "dense_layers.attn.wo", "dense_layers.attn.indexer.wk"}
RTOL = 1e-5  # float32, a handful of operations


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(3, 2)).astype(np.float32) for name in NAMES}


def group_norm(grads, indexer):
    squares = [
        (g.astype(float) ** 2).sum() for n, g in grads.items() if (".indexer." in n) == indexer
    ]
    return math.sqrt(sum(squares))


def adamw(weights, grad_steps, cfg, rates):
    """Run AdamW as its paper writes it, in float64, the two groups apart."""
    weights = {name: value.astype(float) for name, value in weights.items()}
    first = dict.fromkeys(weights, 0.0)
    second = dict.fromkeys(weights, 0.0)
    for t, grads in enumerate(grad_steps, start=1):
        for name in weights:
            indexer = ".indexer." in name
            grad = grads[name] * min(1.0, cfg.clip_norm / group_norm(grads, indexer))
            first[name] = cfg.b1 * first[name] + (1 - cfg.b1) * grad
            second[name] = cfg.b2 * second[name] + (1 - cfg.b2) * grad**2
            step = first[name] / (1 - cfg.b1**t)
            step = step / (np.sqrt(second[name] / (1 - cfg.b2**t)) + cfg.eps)
            decay = cfg.indexer_weight_decay if indexer else cfg.weight_decay
            step = step + decay * weights[name] * (name in DECAYED)
            weights[name] = weights[name] - (rates.indexer if indexer else rates.main) * step
    return weights


def run(cfg, weights, grad_steps, rates):
    transform = optimizer.make_optimizer(cfg)
    state = transform.init(weights)
    for grads in grad_steps:
        updates, state = transform.update(grads, state, weights)
        weights = optimizer.apply_updates(weights, updates, rates)
    return weights


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_three_steps_are_those_of_adamw_with_its_groups_apart(clip_norm):
    cfg = AdamConfig(weight_decay=0.2, indexer_weight_decay=0.3, clip_norm=clip_norm)
    grads, rates = [arrays(seed) for seed in (1, 2, 3)], Rates(0.1, 0.03)

    found = run(cfg, arrays(0), grads, rates)

    expected = adamw(arrays(0), grads, cfg, rates)
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=RTOL, atol=1e-6, err_msg=name)


def test_a_huge_indexer_gradient_leaves_the_main_models_update_as_it_was():
    plain = [arrays(seed) for seed in (1, 2)]
    huge = [{n: g * (1e6 if ".indexer." in n else 1) for n, g in grads.items()} for grads in plain]

    found = [run(AdamConfig(), arrays(0), grads, Rates(0.1, 0.1)) for grads in (plain, huge)]

    for name in NAMES:
        if ".indexer." not in name:
            np.testing.assert_array_equal(found[0][name], found[1][name])


def test_the_state_holds_moments_of_what_is_given_only():
    given = {name: jnp.asarray(value) for name, value in arrays(0).items() if ".indexer." in name}

    state = optimizer.make_optimizer(AdamConfig(mu_dtype="bfloat16")).init(given)

    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    assert len(moments) == 2 * len(given)
    assert sorted(str(m.dtype) for m in moments) == ["bfloat16"] * 3 + ["float32"] * 3


def test_a_schedule_warms_up_holds_decays_by_a_cosine_and_ends_in_constant_pieces():
    schedule = Schedule(
        peak=1.0, warmup_steps=4, hold_steps=3, decay_steps=10, final=0.2, tail=((20, 0.1), (25, 0.05))
    )  # fmt: skip

    rates = [schedule.rate(step) for step in range(30)]

    expected = [0.25, 0.5, 0.75] + [1.0] * 4
    expected += [0.2 + 0.8 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)]
    expected += [0.2] * 3 + [0.1] * 5 + [0.05] * 5
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_schedule_without_a_decay_stays_at_its_peak():
    assert [Schedule(peak=7.3e-6).rate(step) for step in (0, 1, 10**6)] == [
        pytest.approx(7.3e-6, rel=1e-6)
    ] * 3


def test_the_schedule_of_v3_gives_its_published_rates():
    # V3 report 4.2: 2K steps up to 2.2e-4, held to 10T tokens, a cosine to 2.2e-5 over 4.3T, 333B at 2.2e-5 and
    # 167B at 7.3e-6; 62.9M tokens a step at the full batch of 15,360 x 4K.
    step = 15_360 * 4096
    hold, decay = int(10e12 / step), int(4.3e12 / step)
    last = hold + decay + int(333e9 / step)
    v3 = Schedule(
        peak=2.2e-4, warmup_steps=2000, hold_steps=hold - 2000, decay_steps=decay, final=2.2e-5,
        tail=((last, 7.3e-6),),
    )  # fmt: skip

    found = [
        v3.rate(s) for s in (0, 1999, hold - 1, hold + decay // 2, hold + decay, last - 1, last)
    ]

    expected = [1.1e-7, 2.2e-4, 2.2e-4, 1.21e-4, 2.2e-5, 2.2e-5, 7.3e-6]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_optimizer_of_v3_is_the_default():
    cfg = AdamConfig()

    assert (cfg.b1, cfg.b2, cfg.weight_decay, cfg.clip_norm) == (0.9, 0.95, 0.1, 1.0)


def test_each_group_has_its_rate_and_one_that_does_not_train_has_none():
    main, indexer = Schedule(peak=0.5, warmup_steps=2), Schedule(peak=0.25)

    assert optimizer.rates_at(OptimizerConfig(main=main, indexer=indexer), 0) == (0.25, 0.25)
    assert optimizer.rates_at(OptimizerConfig(main=main), 5) == (0.5, 0.0)
    assert optimizer.rates_at(OptimizerConfig(indexer=indexer), 0) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peak": 0.0}, "peak=0.0 must be positive"),
        ({"peak": float("inf")}, "peak=inf must be positive and finite"),
        ({"peak": 1.0, "tail": ((5, float("inf")),)}, "steps of at least 1 and positive rates"),
        ({"peak": 1.0, "decay_steps": 5, "final": 2.0}, r"final=2.0 must be in \[0, peak=1.0\]"),
        ({"peak": 1.0, "warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"peak": 1.0, "hold_steps": 3}, "hold_steps=3 and final=0.0 need decay_steps above 0"),
        ({"peak": 1.0, "final": 0.5}, "hold_steps=0 and final=0.5 need decay_steps above 0"),
        ({"peak": 1.0, "tail": ((5, 0.1), (5, 0.2))}, "must have ascending steps"),
        ({"peak": 1.0, "tail": ((5, 0.0),)}, "must have steps of at least 1 and positive rates"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"b1": 1.0}, r"b1=1.0 must be in \[0, 1\)"),
        ({"b2": -0.1}, r"b2=-0.1 must be in \[0, 1\)"),
        ({"eps": 0.0}, "eps=0.0 must be positive"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        ({"indexer_weight_decay": -1.0}, "indexer_weight_decay=-1.0 must not be negative"),
    ],
)
def test_an_adam_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AdamConfig(**fields)
