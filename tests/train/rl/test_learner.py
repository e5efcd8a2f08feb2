import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from dsv32_jax.generate.sampling import SamplingParams
from train import state as states
from train import step
from train.losses import Batch
from train.optimizer import AdamConfig, Rates, make_optimizer
from train.rl import learner, packing, policy, rollout
from train.rl.learner import Targets, Work
from train.rl.objective import ObjectiveConfig
from train.rl.rollout import Rollout

ROW = 32
ADAM = AdamConfig(weight_decay=0.1, indexer_weight_decay=0.1)
OBJECTIVE = ObjectiveConfig(kl_strength=0.0, off_policy_delta=None)
RATES = Rates(np.float32(1e-2), np.float32(1e-2))


@pytest.fixture(scope="module")
def rollouts(make_engine, params):
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    requests = [
        (p, SamplingParams(top_p=0.9, seed=i, max_tokens=5 + i)) for i, p in enumerate(prompts)
    ]
    found = dict(rollout.sample(make_engine(params), requests, version=0))
    return [found[i] for i in range(len(prompts))]


def targets_of(packed, advantages, weight, n_tokens=1):
    def place(x):
        return jnp.asarray(learner.place_by_rollout(np.asarray(x), packed))

    return Targets(
        jnp.asarray(packed.log_p),
        None,
        place(advantages),
        place(weight),
        place(0 * weight),
        jnp.float32(n_tokens),
    )


def pack(rollouts, rows, n_rows):
    return packing.pack(rollouts, rows, n_rows=n_rows, row_length=ROW)


@pytest.fixture
def state(cfg, params, mesh):
    layout = states.shardings(cfg, make_optimizer(ADAM), "rl", mesh)
    copy = jax.tree.map(lambda x: x + 0, params)  # the update donates it
    return states.create(copy, make_optimizer(ADAM), "rl", layout)


def test_microbatches_add_up_to_the_batchs_gradient(cfg, params, rollouts):
    advantages, weight = np.asarray([1.0, -0.5, 0.7, -2.0]), np.asarray([0.4, 0.3, 0.2, 0.1])
    n_tokens = sum(len(r.tokens) for r in rollouts)
    run = jax.jit(learner.make_gradients(cfg, OBJECTIVE, indexer_kl=0.75))

    def gradients(rows):
        packed = pack(rollouts, rows, 2)
        return run(params, packed, targets_of(packed, advantages, weight, n_tokens))

    whole, sums = gradients([[0, 1], [2, 3]])
    parts = [gradients([[3]]), gradients([[1, 2], [0]])]

    added, added_sums = jax.tree.map(jnp.add, *parts)
    assert sums.figures.responses == 4
    assert any(parameters.is_indexer(name) and np.any(g) for name, g in whole.items())
    for name, want in whole.items():
        scale = np.abs(want).max()
        np.testing.assert_allclose(added[name], want, atol=1e-4 * scale + 1e-7, err_msg=name)
    for got, want in zip(jax.tree.leaves(added_sums), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def drawn(one_layer):
    """Four rollouts of a small model, made up."""
    rng = np.random.default_rng(0)

    def make(n_prompt, n_drawn):
        n = n_prompt + n_drawn
        tokens = rng.integers(0, one_layer.vocab_size, size=n, dtype=np.int32)
        experts = np.stack([rng.permutation(8)[:2] for _ in range(n)])[None].astype(np.int32)
        return rollout.Rollout(
            tokens=tokens, n_prompt=n_prompt, log_p=-rng.uniform(size=n_drawn).astype(np.float32), kept=None,
            experts=experts, temperature=1.0, reason="stop", version=0,
        )  # fmt: skip

    return [make(3, 5), make(2, 6), make(4, 7), make(1, 3)]


def test_a_step_over_stacked_microbatches_adds_them_up_and_skips_padding(
    one_layer, one_layer_parameters, drawn, mesh
):
    advantages, weight = np.asarray([1.0, -0.5, 0.7, -2.0]), np.asarray([0.4, 0.3, 0.2, 0.1])
    params = jax.tree.map(jnp.asarray, one_layer_parameters)
    packed = pack(drawn, [[0, 1], [2], [3]], 4)
    packed.log_p[3], packed.mask[3] = np.nan, True  # the fourth is padding: nobody reads it
    packed = packing.stack(packed, 4)
    targets = targets_of(packed, advantages, weight)._replace(kl_strength=jnp.ones((4, 1, 2)))
    targets = targets._replace(n_tokens=jnp.full(len(packed.tokens), 50.0))
    other = jax.tree.map(lambda x: 1.1 * x, params)
    score, gradients, update = (
        policy.make_score(one_layer),
        jax.jit(learner.make_gradients(one_layer, OBJECTIVE, indexer_kl=0.75)),
        jax.jit(learner.make_update(ADAM)),
    )
    parts = []
    for i in range(3):
        micro, told = jax.tree.map(lambda x, i=i: x[i], (packed, targets))
        told = told._replace(log_p_ref=score(other, micro).log_p)
        parts.append(gradients(params, micro, told))
    grads, sums = jax.tree.map(lambda *x: sum(x), *parts)
    layout = states.shardings(one_layer, make_optimizer(ADAM), "rl_indexer", mesh)
    after, norm = update(
        states.create(params, make_optimizer(ADAM), "rl_indexer", layout), grads, RATES
    )

    state = jax.tree.map(
        lambda x: x + 0, states.create(params, make_optimizer(ADAM), "rl_indexer", layout)
    )
    run = learner.make_step(one_layer, OBJECTIVE, ADAM, indexer_kl=0.75)
    found, found_sums, found_norm = run(state, other, Work(packed, targets, np.int32(3)), RATES)

    assert sums.figures.kl > 0
    assert sums.indexer_kl > 0
    assert found_norm.indexer > 0
    np.testing.assert_allclose(
        np.hypot(found_norm.main, found_norm.indexer), found_norm.whole, rtol=1e-5
    )
    np.testing.assert_allclose(found_norm.whole, norm, rtol=1e-4)
    for got, want in zip(jax.tree.leaves(found_sums), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for name, want in after.parameters.weights.items():
        got = found.parameters.weights[name]
        # Adam's first step has the gradient's sign alone, which rounding may turn where that is nearly 0.
        assert np.mean(np.abs(got - want) > 1e-4) < 0.01, name


def test_without_advantage_nothing_has_a_gradient(cfg, params, rollouts):
    packed = pack(rollouts, [[0, 1], [2, 3]], 2)

    grads, sums = jax.jit(learner.make_gradients(cfg, OBJECTIVE))(
        params, packed, targets_of(packed, np.zeros(4), np.full(4, 0.25))
    )

    assert sums.loss == 0
    assert all((np.asarray(g) == 0).all() for g in grads.values())


def test_the_ratio_is_one_and_the_loss_the_mean_advantage_where_nothing_has_moved(
    cfg, params, rollouts
):
    packed, weight = pack(rollouts, [[0, 1], [2, 3]], 2), np.full(4, 0.25)

    _, sums = jax.jit(learner.make_gradients(cfg, OBJECTIVE))(
        params, packed, targets_of(packed, np.asarray([1.0, 2, 3, -4]), weight)
    )

    np.testing.assert_allclose(sums.figures.ratio / sums.figures.tokens, 1, atol=1e-4)
    np.testing.assert_allclose(sums.loss, -0.5, atol=1e-3)


def test_a_step_moves_neither_indexers_nor_the_mtp_module_nor_the_router_bias(cfg, state):
    before = jax.tree.map(np.asarray, state.parameters)
    grads = {n: jnp.ones_like(w) for n, w in states.trainable("rl", before.weights).items()}

    after, norm = jax.jit(learner.make_update(ADAM))(state, grads, RATES)

    fixed = {n for n in before.weights if parameters.is_indexer(n) or n.startswith("mtp.")}
    assert fixed
    assert norm > 0
    for name, old in before.weights.items():
        assert np.array_equal(after.parameters.weights[name], old) == (name in fixed), name
    for name, old in before.router_bias.items():
        np.testing.assert_array_equal(after.parameters.router_bias[name], old)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_told(state):
    before = jax.tree.map(np.asarray, (state.parameters, state.opt_state))
    grads = {n: jnp.ones_like(w) for n, w in states.trainable("rl", before[0].weights).items()}
    name = next(iter(grads))
    grads[name] = grads[name].at[0].set(np.nan)

    after, norm = jax.jit(learner.make_update(ADAM))(state, grads, RATES)

    assert np.isnan(norm)
    for got, want in zip(
        jax.tree.leaves((after.parameters, after.opt_state)), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def written(one_layer):
    """Three responses that no engine drew, two of them in one row."""
    rng = np.random.default_rng(0)
    shapes = ((5, 9), (3, 6), (7, 4))
    rollouts = [
        Rollout(
            tokens=rng.integers(0, one_layer.vocab_size, size=n + m).astype(np.int32), n_prompt=n,
            log_p=np.full(m, -3.0, np.float32), kept=None, experts=None, temperature=1.0,
            reason="stop", version=0,
        )
        for n, m in shapes
    ]  # fmt: skip
    packed = packing.pack(rollouts, [[0, 1], [2]], n_rows=2, row_length=24)
    return jax.tree.map(jnp.asarray, packed)


def test_the_indexers_have_the_sparse_stages_gradient_and_the_rest_the_policys(
    one_layer, one_layer_parameters, written
):
    params = jax.tree.map(jnp.asarray, one_layer_parameters)
    targets = targets_of(written, np.asarray([1.0, -0.5, 0.7]), np.full(3, 0.3), 14 + 9 + 11)
    only_kl = step.LossConfig(mtp=None, balance=None, bias_rate=None, kl=0.75)
    batch = Batch(jnp.asarray(written.tokens), jnp.asarray(written.segment_ids))
    sparse, of_sparse, _ = jax.jit(
        lambda p: step.gradients(one_layer, only_kl, "sparse", p, batch, 1)
    )(params)
    policys, of_policy = learner.make_gradients(one_layer, OBJECTIVE)(params, written, targets)

    grads, sums = learner.make_gradients(one_layer, OBJECTIVE, indexer_kl=0.75)(
        params, written, targets
    )

    indexers = {n for n in grads if parameters.is_indexer(n)}
    assert indexers == {n for n in sparse if parameters.is_indexer(n) and not n.startswith("mtp.")}
    assert policys.keys() == grads.keys() - indexers
    for name, got in grads.items():
        want = sparse[name] if name in indexers else policys[name]
        scale = np.abs(want).max()
        assert scale > 0, name
        np.testing.assert_allclose(got, want, atol=1e-5 * scale, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(sums.indexer_kl, of_sparse.kl, rtol=1e-5)
    np.testing.assert_allclose(sums.loss, of_policy.loss, rtol=1e-5)
    assert of_policy.indexer_kl == 0


@pytest.mark.parametrize("masked_max_len", [24, 1])  # attention in its two forms
def test_no_gradient_of_the_policy_reaches_the_indexers(
    one_layer, one_layer_parameters, written, masked_max_len
):
    mla = dataclasses.replace(one_layer.mla, masked_max_len=masked_max_len)
    cfg = dataclasses.replace(one_layer, mla=mla)
    params, packed = jax.tree.map(jnp.asarray, (one_layer_parameters, written))

    def log_p(weights):
        scores = policy.score(cfg, params._replace(weights=weights), packed, indexer_loss=True)
        return jnp.sum(jnp.where(written.mask, scores.log_p, 0.0))

    grads = jax.jit(jax.grad(log_p))(params.weights)

    for name, grad in grads.items():
        moves = not parameters.is_indexer(name) and not name.startswith("mtp.")
        assert bool(np.any(grad)) == moves, name
