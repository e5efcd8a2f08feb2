import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.rl import objective
from train.rl.objective import ObjectiveConfig, Responses

ATOL = 2e-6  # float32 sums of a few terms of size 1
V = 7
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.fixture
def policies():
    """Logits of a policy, of the older one that drew, and of the reference."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=V), jnp.float32) for _ in range(3)]


def reverse_kl(logits, ref):
    log_p, log_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_ref))


def expected_estimate(logits, old, ref, estimate):
    """The estimate's mean over tokens drawn from the old policy, by enumeration."""
    log_old = jax.nn.log_softmax(old)
    args = jax.nn.log_softmax(logits), log_old, jax.nn.log_softmax(ref)
    return jnp.sum(jnp.exp(log_old) * estimate(*args))


def responses(rng, n=4, length=6, **changes):
    """Draw responses of different lengths; what stands behind their ends is nonsense."""
    lengths = rng.integers(1, length + 1, size=n)
    mask = np.arange(length) < lengths[:, None]
    old, new, ref = (-rng.exponential(size=(n, length)) for _ in range(3))
    arrays = [np.where(mask, x, np.nan).astype(np.float32) for x in (old, new, ref)]
    given = Responses(
        logp_old=arrays[0], logp_sampler=arrays[0], logp_ref=arrays[2], mask=mask,
        advantages=rng.normal(size=n).astype(np.float32), weight=np.full(n, 1 / n, np.float32),
        kl_strength=np.full(n, 0.1, np.float32),
    )._replace(**changes)  # fmt: skip
    return jnp.asarray(arrays[1]), jax.tree.map(jnp.asarray, given)


def plain_loss(logp, given, clip_low, clip_high, delta):
    """The formula in float64, token by token."""
    total = 0.0
    for i, mask in enumerate(np.asarray(given.mask)):
        new, old, sampler, ref = (
            np.asarray(x[i], np.float64)[mask]
            for x in (logp, given.logp_old, given.logp_sampler, given.logp_ref)
        )
        ratio, advantage = np.exp(new - old), float(given.advantages[i])
        gain = [
            min(r * advantage, min(max(r, 1 - clip_low), 1 + clip_high) * advantage) for r in ratio
        ]
        if delta is not None and advantage < 0 and np.mean(sampler - new) > delta:
            gain = [0.0] * len(gain)
        rho = np.exp(ref - new)
        kl = ratio * (rho - np.log(rho) - 1)
        strength = float(given.kl_strength[i])
        total -= float(given.weight[i]) * (np.mean(gain) - strength * np.mean(kl))
    return total


def test_the_kl_estimate_is_the_reverse_kl_in_value_and_gradient(policies):
    logits, old, ref = policies
    found = functools.partial(expected_estimate, estimate=objective.unbiased_kl)

    value, grad = jax.value_and_grad(found)(logits, old, ref)

    expected, expected_grad = jax.value_and_grad(reverse_kl)(logits, ref)
    np.testing.assert_allclose(value, expected, atol=ATOL)
    np.testing.assert_allclose(grad, expected_grad, atol=ATOL)


def test_without_the_ratio_the_gradient_differs_even_on_policy(policies):
    logits, _, ref = policies

    def uncorrected(logp, logp_old, logp_ref):
        return objective.unbiased_kl(logp, logp, logp_ref)

    def mine(
        x,
    ):  # drawn from the policy itself, whose probabilities do not count as a function of it
        return expected_estimate(x, jax.lax.stop_gradient(x), ref, objective.unbiased_kl)

    def other(x):
        return expected_estimate(x, jax.lax.stop_gradient(x), ref, uncorrected)

    np.testing.assert_allclose(jax.grad(mine)(logits), jax.grad(reverse_kl)(logits, ref), atol=ATOL)
    assert np.abs(jax.grad(other)(logits) - jax.grad(reverse_kl)(logits, ref)).max() > 0.01


def test_over_a_kept_set_the_estimate_is_the_kl_of_the_renormalised_policies(policies):
    kept = jnp.asarray([True, False, True, True, False, True, False])
    logits, old, ref = (jnp.where(kept, x, -1e9) for x in policies)

    def estimate(x):
        log_old = jax.nn.log_softmax(old)
        per_token = objective.unbiased_kl(jax.nn.log_softmax(x), log_old, jax.nn.log_softmax(ref))
        return jnp.sum(jnp.where(kept, jnp.exp(log_old) * per_token, 0))

    def exact(x):
        log_p, log_ref = jax.nn.log_softmax(x), jax.nn.log_softmax(ref)
        return jnp.sum(jnp.where(kept, jnp.exp(log_p) * (log_p - log_ref), 0))

    for got, want in zip(
        jax.value_and_grad(estimate)(logits), jax.value_and_grad(exact)(logits), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=ATOL)


def test_advantages_are_differences_from_the_mean_and_not_divided_by_the_deviation():
    found = objective.advantages(jnp.asarray([[1.0, 0, 0, 1], [5, 5, 5, 1]]))

    np.testing.assert_allclose(found, [[0.5, -0.5, -0.5, 0.5], [1, 1, 1, -3]], atol=ATOL)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "leave_one_out"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ({"scale": "std"}, [1, -1, -1, 1]),
    ],
)
def test_other_advantages_by_name(options, expected):
    found = objective.advantages(jnp.asarray([1.0, 0, 0, 1]), **options)

    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("options", [{}, {"scale": "std"}, {"baseline": "leave_one_out"}])
def test_equal_rewards_have_no_advantage(options):
    found = objective.advantages(jnp.full((2, 3), 0.1), **options)

    assert (found == 0).all()


def test_a_lone_response_has_no_other_to_be_compared_with():
    with pytest.raises(ValueError, match="needs groups of at least 2"):
        objective.advantages(jnp.ones((2, 1)), baseline="leave_one_out")


def test_the_mask_drops_whole_negative_responses_that_became_unlikely():
    sampler = jnp.zeros((4, 3))
    logp = jnp.asarray([[-3.0, 0, 0], [-3, 0, 0], [-0.1, -0.1, -0.1], [-9, -9, -9]])
    mask = jnp.asarray([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)

    found = objective.off_policy_mask(
        logp, sampler, jnp.asarray([-1.0, 1.0, -1.0, -1.0]), mask, delta=0.5
    )

    # Mean 1 and negative; mean 1 but positive; mean 0.1; no token at all.
    assert found.tolist() == [0, 1, 1, 1]


def test_the_mask_averages_over_the_responses_own_tokens_only():
    mask = jnp.asarray([[True, True, False, False]])
    logp = jnp.asarray([[-1.2, -1.2, 99.0, 99.0]])

    found = objective.off_policy_mask(logp, jnp.zeros((1, 4)), jnp.asarray([-1.0]), mask, delta=1.1)

    assert found.tolist() == [0]


def test_the_loss_is_the_formula():
    rng = np.random.default_rng(1)
    for delta in (None, 0.3):
        logp, given = responses(rng, n=8)
        sampler = given.logp_sampler + jnp.asarray(rng.normal(size=logp.shape), jnp.float32)
        given = given._replace(logp_sampler=sampler)

        found, _ = objective.grpo_loss(logp, given, delta=delta, **CLIP)

        np.testing.assert_allclose(found, plain_loss(logp, given, 0.2, 0.28, delta), rtol=1e-5)


def test_as_many_responses_as_tokens_do_not_broadcast():
    logp, given = responses(np.random.default_rng(2), n=5, length=5)

    found, figures = objective.grpo_loss(logp, given, delta=0.3, **CLIP)

    np.testing.assert_allclose(found, plain_loss(logp, given, 0.2, 0.28, 0.3), rtol=1e-5)
    assert figures.tokens == jnp.sum(given.mask)


def test_groups_along_more_axes_are_the_same_responses():
    logp, given = responses(np.random.default_rng(3), n=6)
    folded = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), given)

    found, _ = objective.grpo_loss(logp.reshape(2, 3, -1), folded, delta=0.3, **CLIP)

    np.testing.assert_allclose(
        found, objective.grpo_loss(logp, given, delta=0.3, **CLIP)[0], atol=ATOL
    )


def test_the_mask_reads_the_samplers_probabilities_and_not_the_trainers_own():
    logp, given = responses(np.random.default_rng(4))
    given = given._replace(
        logp_old=logp, logp_sampler=logp + 1, advantages=-jnp.ones(4), kl_strength=jnp.zeros(4)
    )

    loss, figures = objective.grpo_loss(logp, given, delta=0.5, **CLIP)

    assert figures.masked == 4
    assert loss == 0


def test_a_masked_response_keeps_its_kl():
    logp, given = responses(np.random.default_rng(5))
    given = given._replace(logp_sampler=logp + 1, advantages=-jnp.ones(4))

    loss, figures = objective.grpo_loss(logp, given, delta=0.5, **CLIP)

    kl = objective.unbiased_kl(logp, given.logp_old, given.logp_ref)
    mean = jnp.sum(jnp.where(given.mask, kl, 0), 1) / jnp.sum(given.mask, 1)
    np.testing.assert_allclose(loss, 0.1 * jnp.mean(mean), rtol=1e-5)
    assert figures.policy == 0


def test_equal_policies_have_a_ratio_of_one_and_the_policy_gradient():
    logp, given = responses(np.random.default_rng(6))
    given = given._replace(logp_old=logp, logp_sampler=logp, kl_strength=jnp.zeros(4))

    grad, figures = jax.grad(
        lambda x: objective.grpo_loss(x, given, delta=0.1, **CLIP), has_aux=True
    )(logp)

    assert figures.ratio == figures.tokens
    assert figures.masked == 0
    n_tokens = jnp.sum(given.mask, 1, keepdims=True)
    expected = -given.advantages[:, None] * given.weight[:, None] / n_tokens
    np.testing.assert_allclose(grad, jnp.where(given.mask, expected, 0), atol=ATOL)


def test_a_clipped_token_has_no_policy_gradient_and_is_counted():
    logp = jnp.log(jnp.asarray([[0.9, 0.5, 0.1, 0.1]] * 2))
    old = jnp.log(jnp.full((2, 4), 0.5))  # ratios 1.8, 1 and 0.2
    one = jnp.ones(2)
    given = Responses(
        old, old, None, jnp.ones((2, 4), bool), jnp.asarray([1.0, -1.0]), one, 0 * one
    )

    grad, figures = jax.grad(
        lambda x: objective.grpo_loss(x, given, delta=None, **CLIP), has_aux=True
    )(logp)

    assert (np.asarray(grad) == 0).tolist() == [
        [True, False, False, False],
        [False, False, True, True],
    ]
    assert figures.clipped == 3


def test_each_tokens_kl_has_the_ratio_of_that_token_alone():
    logp, given = responses(np.random.default_rng(7), n=1, length=4)
    given = given._replace(mask=jnp.ones((1, 4), bool), advantages=jnp.zeros(1))
    given = jax.tree.map(lambda x: jnp.nan_to_num(x, nan=-1.0), given)
    logp = jnp.nan_to_num(logp, nan=-0.5)

    def loss(x):
        return objective.grpo_loss(x, given, delta=None, **CLIP)[0]

    curvature = jax.hessian(lambda x: loss(x[None]))(logp[0])
    assert np.count_nonzero(curvature - np.diag(np.diag(curvature))) == 0


def test_what_stands_behind_a_response_changes_nothing():
    logp, given = responses(np.random.default_rng(8))

    def run(fill):
        filled = [
            jnp.where(given.mask, x, fill)
            for x in (logp, given.logp_old, given.logp_sampler, given.logp_ref)
        ]
        other = given._replace(logp_old=filled[1], logp_sampler=filled[2], logp_ref=filled[3])
        return jax.value_and_grad(lambda x: objective.grpo_loss(x, other, delta=0.3, **CLIP)[0])(
            filled[0]
        )

    for fill in (np.nan, -np.inf, 300.0):
        for got, want in zip(run(fill), run(0.0), strict=True):
            np.testing.assert_array_equal(got, want)


def test_microbatches_add_up():
    logp, given = responses(np.random.default_rng(9), n=6)
    whole = objective.grpo_loss(logp, given, delta=0.3, **CLIP)

    halves = [
        objective.grpo_loss(logp[i], jax.tree.map(lambda x, i=i: x[i], given), delta=0.3, **CLIP)
        for i in (slice(0, 2), slice(2, 6))
    ]

    for got, want in zip(
        jax.tree.leaves(jax.tree.map(jnp.add, *halves)), jax.tree.leaves(whole), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=ATOL)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sequence_mean", [[1 / 4, 1 / 4], [1 / 2, 0]]),
        ("token_mean", [[1 / 6, 3 / 6], [2 / 6, 0]]),
        ("constant", [[1 / 30, 3 / 30], [2 / 30, 0]]),
    ],
)
def test_weights_of_responses_by_reduction(reduction, expected):
    lengths = jnp.asarray([[1.0, 3], [2, 0]])

    found = objective.response_weights(lengths, reduction, max_tokens=10)

    np.testing.assert_allclose(found, expected, atol=ATOL)


def test_a_batch_without_responses_has_no_weight():
    assert not objective.response_weights(jnp.zeros((2, 2)), "sequence_mean").any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 0.0}, "clip_low=0.0 must be in"),
        ({"clip_high": -1.0}, "clip_high=-1.0 must be positive"),
        ({"kl_strength": -1.0}, "kl_strength=-1.0 must be finite and not negative"),
        ({"kl_strength": float("inf")}, "kl_strength=inf must be finite"),
        ({"off_policy_delta": 0.0}, "off_policy_delta=0.0 must be positive, or None"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    cfg = ObjectiveConfig(kl_strength=0.001, off_policy_delta=0.5)

    with pytest.raises(ValueError, match=message):
        dataclasses.replace(cfg, **change)
