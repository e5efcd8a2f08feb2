"""Properties of the model's backward pass: who trains by which loss, padding, and rematerialisation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from train import losses
from train.losses import Batch

FLOAT32_TOL = 1e-4  # relative to a weight's largest gradient: sums in another order
IDS = [[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 2, 2, 2, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3]]


@functools.partial(jax.jit, static_argnames=("cfg", "mode"))
def gradients(cfg, mode, params, batch):
    """Return the gradients of the sum of all main losses, and of the indexer's KL."""

    def both(weights):
        model = parameters.assemble(cfg, params._replace(weights=weights))
        output = model(batch.tokens, batch.segment_ids, mode=mode, run_mtp=True, indexer_loss=True)
        sums = losses.sums(model, output, batch, heads=True)
        return sums.lm + sums.mtp + sums.balance, sums.kl

    backward = jax.vjp(both, params.weights)[1]
    one, zero = jnp.ones(()), jnp.zeros(())
    return backward((one, zero))[0], backward((zero, one))[0]


@pytest.fixture(scope="module", params=["dense", "sparse", "gathered"])
def main_and_kl(request, cfg, model, attention):
    cfg, mode = attention(cfg, request.param)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, size=(2, 14))
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(IDS, jnp.int32))
    return jax.tree.map(np.asarray, gradients(cfg, mode, parameters.flatten(model), batch))


def test_padded_rows_keep_every_gradient_finite(main_and_kl):
    for grads in main_and_kl:
        for name, grad in grads.items():
            assert np.all(np.isfinite(grad)), name


def test_the_main_losses_never_move_an_indexer(main_and_kl):
    main, _ = main_and_kl
    for name, grad in main.items():
        if parameters.is_indexer(name):
            assert np.all(grad == 0), name
        else:
            assert np.any(grad != 0), name


def test_the_kl_moves_every_indexer_weight_and_nothing_else(main_and_kl):
    _, kl = main_and_kl
    for name, grad in kl.items():
        if not parameters.is_indexer(name):
            assert np.all(grad == 0), name
        elif not name.startswith("mtp."):
            assert all(np.any(layer != 0) for layer in grad), name
        else:
            assert np.any(grad != 0), name


@pytest.fixture(scope="module")
def plain_gradient(cfg, new_model):
    """Return a function from config changes to the gradient of the hidden states' sum of squares."""
    base = dataclasses.replace(cfg, n_layers=2, n_dense_layers=0)
    params = parameters.flatten(new_model(base))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, size=(1, 10)), jnp.int32)

    def grad(**changes):
        changed = dataclasses.replace(base, **changes)

        def loss(weights):
            model = parameters.assemble(changed, params._replace(weights=weights))
            out = model(tokens, mode="dense", run_mtp=True)
            return jnp.sum(out.hidden[:, :4] ** 3) + jnp.sum(out.mtp_hidden[:, :4] ** 3)

        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params.weights))

    return grad


@pytest.fixture(scope="module")
def expected_gradient(plain_gradient):
    return plain_gradient(remat="none")


@pytest.mark.parametrize(
    "changes", [{"remat": "dots"}, {"remat": "full"}, {"scan_unroll": 2}], ids=str
)
def test_rematerialisation_and_unrolling_change_no_gradient(
    plain_gradient, expected_gradient, changes
):
    got = plain_gradient(**changes)
    for name, expected in expected_gradient.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got[name], expected, atol=FLOAT32_TOL * scale, err_msg=name)
