import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import head
from train.head import Kept

ATOL = 1e-5  # float32 sums of a few dozen terms of size 1
B, T, D, V = 2, 4, 5, 23


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    matrix = rng.normal(size=(D, V)).astype(np.float32)
    return hidden, matrix, rng.integers(0, V, size=(B, T)).astype(np.int32)


@pytest.fixture
def kept(rows):
    """Sets of 1 to 9 tokens with the target among them; one place keeps all; the lists end in padding."""
    _, _, targets = rows
    rng = np.random.default_rng(1)
    mask = np.ones((B, T, V), bool)
    lists = [[] for _ in range(B)]
    for b, t in np.ndindex(B, T):
        if (b, t) == (1, 2):
            continue
        others = rng.choice(V, size=rng.integers(0, 9), replace=False)
        mask[b, t] = np.isin(np.arange(V), [*others, targets[b, t]])
        lists[b] += [(t, v) for v in np.flatnonzero(mask[b, t])]
    longest = max(map(len, lists)) + 3
    padded = np.asarray([row + [(T, 0)] * (longest - len(row)) for row in lists], np.int32)
    return mask, Kept(jnp.asarray(padded[..., 0]), jnp.asarray(padded[..., 1]))


def plain(hidden, matrix, targets, temperature=1.0, mask=True):
    """Return log-probabilities and entropies in float64."""
    logits = hidden.astype(np.float64) @ matrix.astype(np.float64) / temperature
    logits = np.where(mask, logits, -np.inf)
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    p = np.exp(log_p)
    entropy = -np.sum(p * np.where(p > 0, log_p, 0), axis=-1)
    return np.take_along_axis(log_p, targets[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("chunk", [1, 4, 8, 22, 23, 64])
def test_predictions_do_not_depend_on_the_vocabulary_chunks(rows, chunk, monkeypatch):
    monkeypatch.setattr(head, "VOCAB_CHUNK", chunk)

    found = head.predict(*map(jnp.asarray, rows), entropy=True)

    for got, expected in zip(found, plain(*rows), strict=True):
        np.testing.assert_allclose(got, expected, atol=ATOL)


@pytest.mark.parametrize("chunk", [4, 64])
def test_the_distribution_is_over_the_kept_tokens_at_its_temperature(
    rows, kept, chunk, monkeypatch
):
    monkeypatch.setattr(head, "VOCAB_CHUNK", chunk)
    mask, lists = kept
    temperature = np.asarray([[0.5, 1.0, 2.0, 0.7], [1.3, 0.6, 1.0, 0.9]], np.float32)

    found = head.predict(
        *map(jnp.asarray, rows), temperature_BT=jnp.asarray(temperature), kept=lists, entropy=True
    )

    expected = plain(*rows, temperature[..., None], mask)
    np.testing.assert_allclose(found.log_p, expected[0], atol=ATOL)
    np.testing.assert_allclose(found.entropy, expected[1], atol=ATOL)


def test_a_target_that_was_not_kept_has_no_probability(rows):
    _, _, targets = rows
    other = (targets[0, 1] + 1) % V
    lists = Kept(jnp.asarray([[1], [T]], jnp.int32), jnp.asarray([[other], [0]], jnp.int32))

    found = head.predict(*map(jnp.asarray, rows), kept=lists).log_p

    assert found[0, 1] == -np.inf
    assert np.isfinite(np.delete(np.asarray(found), 1)).all()


def test_log_probabilities_of_huge_logits_are_finite(rows, monkeypatch):
    monkeypatch.setattr(head, "VOCAB_CHUNK", 8)
    hidden, matrix, targets = rows

    found = head.predict(*map(jnp.asarray, (hidden * 300, matrix, targets)), entropy=True)

    expected = plain(hidden * 300, matrix, targets)
    np.testing.assert_allclose(found.log_p, expected[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.entropy, expected[1], atol=1e-3)


@pytest.mark.parametrize("chunk", [8, 64])
def test_gradients_are_those_of_the_plain_distribution(rows, kept, chunk, monkeypatch):
    monkeypatch.setattr(head, "VOCAB_CHUNK", chunk)
    hidden, matrix, targets = rows
    mask, lists = kept
    weights = np.arange(1, 1 + B * T, dtype=np.float32).reshape(B, T)
    warmth = jnp.full((B, T), 0.8)

    def total(h, w):
        found = head.predict(
            h, w, jnp.asarray(targets), temperature_BT=warmth, kept=lists, entropy=True
        )
        return jnp.sum(found.log_p * weights) + jnp.sum(found.entropy * weights[::-1])

    def expected(h, w):
        logits = jnp.where(mask, h @ w / 0.8, -1e30)
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.where(mask, jnp.exp(log_p) * log_p, 0), -1)
        return jnp.sum(chosen * weights) + jnp.sum(entropy * weights[::-1])

    grads = jax.grad(total, (0, 1))(jnp.asarray(hidden), jnp.asarray(matrix))

    wanted = jax.grad(expected, (0, 1))(jnp.asarray(hidden), jnp.asarray(matrix))
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
