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


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(7, 5)).astype(np.float32)
    head = rng.normal(size=(5, 23)).astype(np.float32)
    return hidden, head, rng.integers(0, 23, size=7).astype(np.int32)


def plain_cross_entropy(hidden, head, targets):
    logits = hidden.astype(np.float64) @ head.astype(np.float64)
    peak = logits.max(axis=1, keepdims=True)
    logsumexp = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
    return logsumexp - logits[np.arange(len(targets)), targets]


@pytest.mark.parametrize("chunk", [1, 4, 8, 22, 23, 64])
def test_cross_entropy_does_not_depend_on_the_vocabulary_chunks(rows, chunk, monkeypatch):
    monkeypatch.setattr(losses, "VOCAB_CHUNK", chunk)

    found = losses.cross_entropy(*map(jnp.asarray, rows))

    np.testing.assert_allclose(found, plain_cross_entropy(*rows), atol=ATOL)


def test_cross_entropy_of_huge_logits_is_finite(rows, monkeypatch):
    monkeypatch.setattr(losses, "VOCAB_CHUNK", 8)
    hidden, head, targets = rows

    found = losses.cross_entropy(*map(jnp.asarray, (hidden * 300, head, targets)))

    np.testing.assert_allclose(found, plain_cross_entropy(hidden * 300, head, targets), rtol=1e-5)


@pytest.mark.parametrize("chunk", [8, 64])
def test_cross_entropy_has_the_gradients_of_a_plain_logsumexp(rows, chunk, monkeypatch):
    monkeypatch.setattr(losses, "VOCAB_CHUNK", chunk)
    hidden, head, targets = rows
    logits = hidden.astype(np.float64) @ head.astype(np.float64)
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    weights = np.arange(1, 8)
    error = (softmax - np.eye(23)[targets]) * weights[:, None]

    grads = jax.grad(
        lambda h, w: jnp.sum(losses.cross_entropy(h, w, jnp.asarray(targets)) * weights), (0, 1)
    )(jnp.asarray(hidden), jnp.asarray(head))

    np.testing.assert_allclose(grads[0], error @ head.T, atol=1e-4)
    np.testing.assert_allclose(grads[1], hidden.T @ error, atol=1e-4)


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
            expected[b, t] = plain_cross_entropy(hidden[b, t][None], head, tokens[b, end][None])[0]
    np.testing.assert_allclose(found, expected, atol=ATOL)
