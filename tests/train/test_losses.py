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
    found = losses.weights(jnp.asarray(IDS))

    # Row by row: (2 + 1), (0 + 2 + 3), 7 have one successor; 1, (1 + 2), 6 have two; 5, 8, 8 are tokens.
    assert tuple(map(float, found)) == (15.0, 10.0, 21.0, 21.0)


def test_a_batch_of_padding_has_weights_of_one():
    assert tuple(map(float, losses.weights(jnp.zeros((2, 8), jnp.int32)))) == (1.0,) * 4


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
