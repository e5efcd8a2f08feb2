import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv32_jax import gate, segments
from dsv32_jax.config import MoEConfig

FLOAT32_TOL = 1e-5  # sums of ~10 values of size 1
MOE = MoEConfig(n_experts=12, n_active=3, n_groups=4, n_active_groups=2, expert_dim=4)
IDS = [[1, 1, 1, 1, 2, 2, 0, 0, 0], [0, 3, 3, 3, 4, 4, 4, 4, 4]]


def choose(biased, moe):
    """Choose one token's experts by the published rule, in plain Python."""
    size = moe.n_experts // moe.n_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(moe.n_groups)]
    if moe.n_groups > 1:
        best = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
        kept = sorted(range(moe.n_groups), key=lambda g: (-best[g], g))[: moe.n_active_groups]
        groups = [groups[g] for g in kept]
    open_to = [e for group in groups for e in group]
    return sorted(open_to, key=lambda e: (-biased[e], e))[: moe.n_active]


@pytest.fixture
def new_gate(cfg):
    def draw(moe, bias=None):
        module = gate.Gate(dataclasses.replace(cfg, dim=5, moe=moe, init_std=1.0), rngs=nnx.Rngs(0))
        if bias is not None:
            module.bias = gate.RouterBias(jnp.asarray(bias, jnp.float32))
        return module

    return draw


@pytest.fixture
def documents():
    return segments.from_ids(jnp.asarray(IDS))


@pytest.mark.parametrize(
    "moe",
    [
        MOE,
        dataclasses.replace(MOE, n_groups=1, n_active_groups=1),
        dataclasses.replace(MOE, n_active=1),
    ],
)
def test_selection_follows_the_published_rule(rng, moe):
    biased = rng.normal(size=(2, 20, 12)).astype(np.float32)  # half of them negative
    out = gate.select_experts(jnp.asarray(biased), moe)
    expected = [[choose(row, moe) for row in rows] for rows in biased]
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, expected)


def test_closed_groups_stay_closed_when_every_score_is_negative():
    biased = -np.arange(1.0, 13.0)  # filling closed groups with 0 would choose from them
    out = gate.select_experts(jnp.asarray(biased[None, None], jnp.float32), MOE)
    np.testing.assert_array_equal(out, [[[0, 1, 2]]])


def test_groups_are_ranked_by_their_two_best_experts():
    # Group 0 holds the single best expert, groups 1 and 2 the best pairs.
    biased = [9, 0, 0, 5, 5, 0, 6, 4, 0, 0, 0, 0]
    out = gate.select_experts(jnp.asarray([[biased]], jnp.float32), MOE)
    assert set(np.asarray(out)[0, 0]) == {3, 4, 6}


def test_equal_scores_go_to_the_smaller_expert():
    out = gate.select_experts(jnp.ones((1, 1, 12)), MOE)
    np.testing.assert_array_equal(out, [[[0, 1, 2]]])


def test_gates_are_unbiased_scores_normalised_to_the_scale(rng, new_gate, documents):
    bias = rng.normal(size=12)
    module = new_gate(MOE, bias)
    x = rng.normal(size=(2, 9, 5))
    scores = 1 / (1 + np.exp(-x @ np.asarray(module.weight[...], np.float64)))

    out = module(jnp.asarray(x, jnp.float32), documents)

    np.testing.assert_allclose(jnp.sum(out.gates, -1), 2.5, rtol=1e-6)
    for b, t in np.ndindex(2, 9):
        experts = choose(scores[b, t] + bias, MOE)
        np.testing.assert_array_equal(out.experts[b, t], experts)
        expected = 2.5 * scores[b, t, experts] / scores[b, t, experts].sum()
        np.testing.assert_allclose(out.gates[b, t], expected, rtol=FLOAT32_TOL)


def test_gates_may_stay_unnormalised(rng, new_gate, documents):
    module = new_gate(dataclasses.replace(MOE, normalize_gates=False, route_scale=1.5))
    x = rng.normal(size=(2, 9, 5))
    scores = 1 / (1 + np.exp(-x @ np.asarray(module.weight[...], np.float64)))

    out = module(jnp.asarray(x, jnp.float32), documents)

    expected = 1.5 * np.take_along_axis(scores, np.asarray(out.experts), axis=-1)
    np.testing.assert_allclose(out.gates, expected, rtol=FLOAT32_TOL)


def test_given_experts_are_taken_and_weighed_by_the_scores_here(rng, new_gate, documents):
    module, x = new_gate(MOE), rng.normal(size=(2, 9, 5))
    scores = 1 / (1 + np.exp(-x @ np.asarray(module.weight[...], np.float64)))
    given = np.stack([rng.permutation(12)[:3] for _ in range(18)]).reshape(2, 9, 3)
    given[1, 4:7] = -1

    out = module(jnp.asarray(x, jnp.float32), documents, jnp.asarray(given, jnp.int32))

    new = 0
    for b, t in np.ndindex(2, 9):
        own = choose(scores[b, t], MOE)
        experts = given[b, t] if given[b, t, 0] >= 0 else own
        np.testing.assert_array_equal(out.experts[b, t], experts)
        expected = 2.5 * scores[b, t, experts] / scores[b, t, experts].sum()
        np.testing.assert_allclose(out.gates[b, t], expected, rtol=FLOAT32_TOL)
        new += len(set(experts) - set(own)) * (IDS[b][t] > 0)
    assert out.rerouted == new > 0


def test_given_experts_leave_the_router_its_gradient(rng, new_gate, documents):
    module, x = new_gate(MOE), jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.float32)
    given = jnp.broadcast_to(jnp.asarray([3, 7, 11]), (2, 9, 3))
    factor = jnp.asarray(rng.normal(size=(2, 9, 3)), jnp.float32)
    graph, weights = nnx.split(module)

    def found(weights):
        return jnp.sum(nnx.merge(graph, weights)(x, documents, given).gates * factor)

    def expected(weight):
        scores = jax.nn.sigmoid(x @ weight)[..., jnp.asarray([3, 7, 11])]
        return jnp.sum(2.5 * scores / jnp.sum(scores, -1, keepdims=True) * factor)

    grad = jax.grad(found, allow_int=True)(weights)["weight"][...]

    np.testing.assert_allclose(grad, jax.grad(expected)(module.weight[...]), atol=FLOAT32_TOL)
    assert (np.abs(grad).sum(0) > 0).tolist() == [e in (3, 7, 11) for e in range(12)]


def test_an_equal_bias_changes_nothing_and_a_large_one_only_the_choice(rng, new_gate, documents):
    x = jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.float32)
    plain, equal = (new_gate(MOE, bias)(x, documents) for bias in (np.zeros(12), np.full(12, 0.25)))
    np.testing.assert_array_equal(plain.experts, equal.experts)
    np.testing.assert_array_equal(plain.gates, equal.gates)

    pushed = new_gate(MOE, 10.0 * (np.arange(12) == 7))(x, documents)
    assert np.all(np.any(np.asarray(pushed.experts) == 7, axis=-1))
    assert np.all(np.asarray(pushed.gates) < 2.5)


def test_gates_are_computed_in_float32(rng, new_gate, documents):
    x = jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.bfloat16)
    module = new_gate(MOE)
    low, wide = module(x, documents), module(x.astype(jnp.float32), documents)
    np.testing.assert_array_equal(low.experts, wide.experts)
    np.testing.assert_array_equal(low.gates, wide.gates)


def test_the_load_counts_tokens_of_documents_only(rng, new_gate, documents):
    out = new_gate(MOE)(jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.float32), documents)
    valid = np.array(IDS) != 0
    expected = np.bincount(np.asarray(out.experts)[valid].ravel(), minlength=12)
    np.testing.assert_array_equal(out.load, expected)


def test_the_balance_loss_is_the_published_one_document_by_document(rng, documents):
    scores = rng.uniform(0.1, 1, size=(2, 9, 12))
    expected = 0.0
    for row, ids in zip(scores, np.array(IDS), strict=True):
        for document in set(ids) - {0}:
            s = row[ids == document]
            n = len(s)
            top = np.argsort(-s, axis=-1)[:, :3]
            f = np.bincount(top.ravel(), minlength=12) * 12 / (3 * n)
            p = (s / s.sum(-1, keepdims=True)).mean(0)
            expected += n * np.sum(f * p)

    out = gate.balance_sum(jnp.asarray(scores, jnp.float32), MOE, documents)

    np.testing.assert_allclose(out, expected, rtol=FLOAT32_TOL)


def test_the_balance_loss_of_an_even_load_is_one_a_token():
    ids = jnp.ones((1, 12), jnp.int32)
    scores = np.full((12, 12), 0.5)
    for t in range(12):  # token t prefers experts t, t+1, t+2: every expert is chosen thrice
        scores[t, [t, (t + 1) % 12, (t + 2) % 12]] = 0.6
    out = gate.balance_sum(jnp.asarray(scores[None], jnp.float32), MOE, segments.from_ids(ids))
    np.testing.assert_allclose(out, 12.0, rtol=FLOAT32_TOL)


def test_gradients_reach_the_weight_by_gates_and_balance_but_never_the_bias(
    rng, new_gate, documents
):
    module = new_gate(MOE, rng.normal(size=12))
    graph, weight, bias = nnx.split(module, nnx.Param, gate.RouterBias)
    x = jnp.asarray(rng.normal(size=(2, 9, 5)), jnp.float32)

    def loss(weight, bias, use_gates):
        out = nnx.merge(graph, weight, bias)(x, documents)
        return jnp.sum(out.gates[..., 0]) if use_gates else out.balance

    for use_gates in (True, False):
        d_weight, d_bias = jax.grad(loss, argnums=(0, 1))(weight, bias, use_gates)
        assert np.all(np.asarray(jax.tree.leaves(d_bias)[0]) == 0)
        assert np.any(np.asarray(jax.tree.leaves(d_weight)[0]) != 0)
