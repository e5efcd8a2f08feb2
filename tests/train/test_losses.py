import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from train import losses
from train.losses import Batch

ATOL = 1e-5  # float32 sums of a few dozen terms of size 1

# Two documents and padding; one document of a single token; one that fills the row.
IDS = np.array([[1, 1, 1, 2, 2, 0, 0, 0], [1, 2, 2, 2, 3, 3, 3, 3], [1] * 8], np.int32)


def plain_cross_entropy(hidden, head, target):
    logits = hidden.astype(np.float64) @ head.astype(np.float64)
    return np.logaddexp.reduce(logits) - logits[target]


def test_the_weights_count_the_tokens_that_have_a_successor_and_two():
    found = losses.weights(Batch(jnp.asarray(IDS), jnp.asarray(IDS)))

    # Row by row: (2 + 1), (0 + 2 + 3), 7 have one successor; 1, (1 + 2), 6 have two; 5, 8, 8 are tokens.
    assert tuple(map(float, found)) == (15.0, 10.0, 21.0, 21.0)


def test_a_batch_of_padding_has_weights_of_one():
    assert (
        tuple(map(float, losses.weights(Batch(*2 * [jnp.zeros((2, 8), jnp.int32)])))) == (1.0,) * 4
    )


@pytest.mark.parametrize("ahead", [1, 2])
def test_each_token_is_measured_on_the_token_ahead_in_its_own_document(
    one_layer, one_layer_parameters, ahead
):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, one_layer.vocab_size, size=IDS.shape).astype(np.int32)
    hidden = rng.normal(size=(*IDS.shape, one_layer.dim)).astype(np.float32)
    model = parameters.assemble(one_layer, jax.tree.map(jnp.asarray, one_layer_parameters))
    head = one_layer_parameters.weights["head"]

    found = losses.next_token(
        model, jnp.asarray(hidden), Batch(jnp.asarray(tokens), jnp.asarray(IDS)), ahead
    )

    expected = np.zeros(IDS.shape)
    for b, t in np.ndindex(IDS.shape):
        end = t + ahead
        if IDS[b, t] and end < 8 and IDS[b, end] == IDS[b, t]:
            expected[b, t] = plain_cross_entropy(hidden[b, t], head, tokens[b, end])
    np.testing.assert_allclose(found, expected, atol=ATOL)


# The tokens that train: a response, all, and none of the last row but its first token, which nothing predicts.
TRAINED = np.array(
    [[0, 0, 1, 0, 1, 0, 0, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]],
    bool,
)


def test_the_weights_count_the_tokens_whose_target_trains():
    found = losses.weights(Batch(jnp.asarray(IDS), jnp.asarray(IDS), jnp.asarray(TRAINED)))

    # Row by row: (1 + 1), (0 + 2 + 3), 0 targets one ahead; 1, (1 + 2), 0 two ahead; KL and balance see all tokens.
    assert tuple(map(float, found)) == (7.0, 4.0, 21.0, 21.0)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_mask_leaves_the_losses_of_trained_targets_and_no_others(
    one_layer, one_layer_parameters, ahead
):
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, one_layer.vocab_size, size=IDS.shape).astype(np.int32))
    hidden = jnp.asarray(rng.normal(size=(*IDS.shape, one_layer.dim)).astype(np.float32))
    model = parameters.assemble(one_layer, jax.tree.map(jnp.asarray, one_layer_parameters))

    every = losses.next_token(model, hidden, Batch(tokens, jnp.asarray(IDS)), ahead)
    masked = losses.next_token(
        model, hidden, Batch(tokens, jnp.asarray(IDS), jnp.asarray(TRAINED)), ahead
    )

    target_trains = np.pad(TRAINED, ((0, 0), (0, ahead)))[:, ahead:]
    np.testing.assert_array_equal(masked, np.where(target_trains, every, 0.0))
    assert np.any(masked)
    assert not np.array_equal(masked, every)
