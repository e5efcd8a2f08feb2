import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from train import losses, step
from train import state as states
from train.losses import Batch, LossSums
from train.optimizer import AdamConfig, Rates, make_optimizer
from train.step import LossConfig

# Each loss has a share of the gradient that a mistake in its weight would show.
ALL_ON = LossConfig(mtp=0.5, balance=0.25, bias_rate=1e-3, kl=0.75)
GRAD_ATOL = 2e-5  # float32 sums in another order; the gradients' largest elements are near 1
LENGTHS = (
    (7, 5, 4),
    (16,),
    (3, 9),
    (10, 6),
)  # documents of each packed row; the third ends in padding
SEQ_LEN = 16


@pytest.fixture(scope="module")
def packed(one_layer):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, one_layer.vocab_size, size=(len(LENGTHS), SEQ_LEN)).astype(np.int32)
    ids = np.zeros_like(tokens)
    for row, lengths in enumerate(LENGTHS):
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return Batch(jnp.asarray(np.where(ids, tokens, 0)), jnp.asarray(ids))


@pytest.fixture(scope="module")
def padded(packed):
    """The same documents, one a row."""
    tokens, ids = [], []
    for row, lengths in enumerate(LENGTHS):
        for document in range(1, len(lengths) + 1):
            found = np.asarray(packed.tokens)[row][np.asarray(packed.segment_ids)[row] == document]
            tokens.append(np.pad(found, (0, SEQ_LEN - len(found))))
            ids.append(np.arange(SEQ_LEN) < len(found))
    return Batch(jnp.asarray(tokens), jnp.asarray(np.array(ids, np.int32)))


def with_mask(batch, trains):
    """Let each document train its tokens where `trains` says so, whatever row it lies in."""
    ids = np.asarray(batch.segment_ids)
    first = ids != np.pad(ids, ((0, 0), (1, 0)))[:, :-1]
    place = np.arange(SEQ_LEN) - np.maximum.accumulate(np.where(first, np.arange(SEQ_LEN), 0), 1)
    return batch._replace(trained=jnp.asarray(trains(place) & (ids > 0)))


@pytest.fixture(scope="module")
def gradients(one_layer, one_layer_parameters):
    """Differentiate the one-layer model's loss; returns gradients, sums and loads."""
    params = jax.tree.map(jnp.asarray, one_layer_parameters)

    @functools.cache
    def compiled(cfg, stage, microbatches):
        return jax.jit(lambda p, b: step.gradients(cfg, ALL_ON, stage, p, b, microbatches))

    def run(stage, batch, microbatches, cfg=one_layer):
        return compiled(cfg, stage, microbatches)(params, batch)

    return run


def assert_same(found, expected, what):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            found[name], expected[name], atol=GRAD_ATOL, rtol=1e-4, err_msg=f"{what}: {name}"
        )


@pytest.mark.parametrize("stage", ["dense", "warmup", "sparse"])
def test_neither_packing_nor_microbatches_change_the_gradient(gradients, packed, padded, stage):
    expected, sums, loads = gradients(stage, packed, 1)
    grads, other_sums, other_loads = gradients(stage, padded, 2)

    assert_same(grads, expected, "padded in two microbatches")
    np.testing.assert_allclose(other_sums, sums, rtol=1e-5)
    assert_same(other_loads, loads, "loads")
    assert all(np.any(g) for g in expected.values())


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_neither_packing_nor_microbatches_change_the_gradient_of_masked_losses(
    gradients, packed, padded, stage
):
    def trains(place):
        return place >= 2

    expected, sums, _ = gradients(stage, with_mask(packed, trains), 1)
    grads, other_sums, _ = gradients(stage, with_mask(padded, trains), 2)

    assert_same(grads, expected, "padded in two microbatches, masked")
    np.testing.assert_allclose(other_sums, sums, rtol=1e-5)
    assert float(sums.lm) < float(gradients(stage, packed, 1)[1].lm)


def test_a_mask_of_everything_is_no_mask(gradients, packed):
    expected, sums, _ = gradients("dense", packed, 1)
    grads, other_sums, _ = gradients("dense", with_mask(packed, lambda place: place >= 0), 1)

    assert_same(grads, expected, "all trained")
    np.testing.assert_allclose(other_sums, sums, rtol=1e-6)


def test_a_microbatch_a_row_adds_up_to_the_batch(gradients, packed):
    expected, sums, loads = gradients("sparse", packed, 1)
    grads, other_sums, other_loads = gradients("sparse", packed, 4)

    assert_same(grads, expected, "four microbatches")
    np.testing.assert_allclose(other_sums, sums, rtol=1e-5)
    assert_same(other_loads, loads, "loads")


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_the_indexers_gradient_survives_rematerialisation(gradients, packed, one_layer, remat):
    plain, _, _ = gradients("warmup", packed, 1)

    grads, _, _ = gradients("warmup", packed, 1, replace(one_layer, remat=remat))

    assert_same(grads, plain, remat)
    assert all(np.abs(np.asarray(g)).max() > 1e-6 for g in grads.values())


def test_only_the_kl_moves_the_indexer_and_nothing_else_does_it_move(
    one_layer, one_layer_parameters, packed
):
    params = jax.tree.map(jnp.asarray, one_layer_parameters)

    def sums(weights):
        model = parameters.assemble(one_layer, params._replace(weights=weights))
        output = model(
            packed.tokens, packed.segment_ids, mode="sparse", run_mtp=True, indexer_loss=True
        )
        return losses.sums(model, output, packed, heads=True)

    @jax.jit
    def gradient_of(chosen):
        return jax.vjp(sums, params.weights)[1](chosen)[0]

    one_hot = np.eye(4, dtype=np.float32)
    lm, mtp, balance, kl = (gradient_of(LossSums(*map(jnp.asarray, row))) for row in one_hot)

    for name in params.weights:
        on_indexer = ".indexer." in name
        for loss in (lm, mtp, balance):
            assert not (on_indexer and np.any(loss[name])), name
        assert np.any(kl[name]) == on_indexer, name
        assert on_indexer or np.any(lm[name]) or np.any(mtp[name]), name


def test_the_losses_of_a_stage_are_weighed_and_divided_by_the_whole_batchs_counts():
    sums = LossSums(*map(jnp.float32, (10.0, 6.0, 4.0, 8.0)))
    counts = losses.LossWeights(*map(jnp.float32, (5.0, 3.0, 2.0, 4.0)))
    cfg = LossConfig(mtp=0.5, balance=0.1, kl=3.0)

    found = {
        s: float(step.combine(sums, counts, cfg, s))
        for s in ("dense", "warmup", "sparse", "window")
    }

    main = 10 / 5 + 0.5 * 6 / 3 + 0.1 * 4 / 2
    assert found == pytest.approx(
        {"dense": main, "warmup": 6.0, "sparse": main + 6, "window": main}
    )
    off = LossConfig(mtp=None, balance=None)
    assert float(step.combine(sums, counts, off, "dense")) == 2.0


@pytest.mark.parametrize("name", ["mtp", "balance", "bias_rate", "kl"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_coefficient_that_turns_a_loss_off_by_a_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be positive"):
        LossConfig(**{name: value})


def test_the_router_bias_moves_once_a_step_against_the_load_of_the_whole_batch(
    one_layer, one_layer_parameters, gradients, padded, mesh
):
    _, _, loads = gradients("dense", padded, 2)
    optimizer = make_optimizer(AdamConfig())
    layout = states.shardings(one_layer, optimizer, "dense", mesh)
    start = states.create(jax.tree.map(jnp.array, one_layer_parameters), optimizer, "dense", layout)
    run = step.make_step(one_layer, ALL_ON, AdamConfig(), "dense", 2)

    after, _ = run(start, padded, Rates(np.float32(0.1), np.float32(0.0)))

    n_tokens, n_with_next = 60, 52  # an expert layer sees every token, MTP's those with a successor
    assert after.parameters.router_bias.keys() == loads.keys()
    for name, bias in one_layer_parameters.router_bias.items():
        load = np.asarray(loads[name])
        assert load.sum() == 2 * (n_with_next if name.startswith("mtp.") else n_tokens)
        moved = bias + np.float32(1e-3) * np.sign(load.mean(-1, keepdims=True) - load)
        found = after.parameters.router_bias[name]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, moved, atol=1e-7)
        assert np.unique(np.sign(found - bias)).size > 1


def test_what_is_turned_off_leaves_the_router_bias_and_the_mtp_module_as_they_were(
    one_layer, one_layer_parameters, packed, mesh
):
    adam = AdamConfig(weight_decay=0.5)
    optimizer = make_optimizer(adam)
    run = step.make_step(one_layer, LossConfig(mtp=None, bias_rate=None), adam, "dense", 1)
    layout = states.shardings(one_layer, optimizer, "dense", mesh)
    start = states.create(jax.tree.map(jnp.array, one_layer_parameters), optimizer, "dense", layout)

    after, metrics = run(start, packed, Rates(np.float32(0.1), np.float32(0.0)))

    assert float(metrics.mtp) == 0.0
    for name, value in one_layer_parameters.router_bias.items():
        np.testing.assert_array_equal(after.parameters.router_bias[name], value)
    for name, value in one_layer_parameters.weights.items():
        still = name.startswith("mtp.") or ".indexer." in name
        assert np.array_equal(after.parameters.weights[name], value) == still, name


def test_the_fullest_expert_and_device_are_reported_over_the_mean_of_their_layer():
    loads = {"a": jnp.asarray([[2.0, 4.0, 6.0, 0.0], [3.0, 3.0, 3.0, 3.0]]), "b": jnp.zeros((4,))}

    assert float(step._max_load(loads, 4)) == 2.0
    assert float(step._max_load(loads, 2)) == 1.0
    loads["b"] = jnp.asarray([2.0, 4.0, 2.0, 0.0])  # 6 and 2 on two devices
    assert float(step._max_load(loads, 2)) == 1.5
    assert float(step._max_load(loads, 1)) == 1.0
    assert float(step._max_load({}, 2)) == 1.0
