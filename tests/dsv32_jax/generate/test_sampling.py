import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax.generate import sampling
from dsv32_jax.generate.sampling import Knobs, SamplingParams

TOL = 1e-5
V = 50


def knobs(n=1, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    def full(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (n,))

    return Knobs(
        full(temperature, jnp.float32), full(top_p, jnp.float32), full(top_k, jnp.int32), full(seed, jnp.uint32)
    )  # fmt: skip


def expected_log_probs(logits, temperature, top_p, top_k):
    """In float64, token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return {order[0]: 0.0}
    kept = order[:top_k] if top_k else order
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in kept]
    total, before, final = sum(weights), 0.0, []
    for i, weight in zip(kept, weights, strict=True):
        if before >= top_p and final:
            break
        final.append((i, weight))
        before += weight / total
    total = sum(weight for _, weight in final)
    return {i: math.log(weight / total) for i, weight in final}


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 7), (0.6, 20), (1e-6, 0), (1e-300, 0)]
)
def test_the_distribution_is_that_of_a_loop(rng, temperature, top_p, top_k):
    logits = np.round(rng.normal(size=(4, V)), 1)  # rounded, so that there are ties
    settings = knobs(4, temperature, top_p, top_k)
    found = np.asarray(sampling.log_probs(jnp.asarray(logits, jnp.float32), settings))
    for row, values in zip(found, logits, strict=True):
        expected = expected_log_probs(values.tolist(), temperature, top_p, top_k)
        assert np.flatnonzero(row > -np.inf).tolist() == sorted(expected)
        for token, log_p in expected.items():
            assert row[token] == pytest.approx(log_p, abs=TOL)


def test_each_sequence_has_its_own_settings(rng):
    logits = jnp.asarray(rng.normal(size=(3, V)), jnp.float32)
    mixed = Knobs(
        jnp.asarray([0.0, 1.0, 2.0]), jnp.asarray([1.0, 0.5, 1.0]),
        jnp.asarray([0, 0, 3], jnp.int32), jnp.asarray([0, 0, 0], jnp.uint32),
    )  # fmt: skip
    found = np.asarray(sampling.log_probs(logits, mixed))
    for row, single in enumerate(
        [knobs(temperature=0), knobs(top_p=0.5), knobs(temperature=2.0, top_k=3)]
    ):
        alone = sampling.log_probs(logits[row : row + 1], single)[0]
        np.testing.assert_array_equal(found[row], alone)


def test_draws_have_the_distributions_frequencies(rng):
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=6), jnp.float32))
    log_p = jnp.where(jnp.arange(6) == 2, -jnp.inf, log_p)
    n = 20000
    keys = sampling.keys(jnp.zeros(n, jnp.uint32), jnp.arange(n), sampling.DRAW)
    tokens = sampling.draw(jnp.broadcast_to(log_p, (n, 6)), keys)
    p = np.exp(np.asarray(log_p))
    p /= p.sum()
    shares = np.bincount(tokens, minlength=6) / n
    assert shares[2] == 0
    assert np.abs(shares - p).max() < 4 * np.sqrt(0.25 / n)  # four standard errors


def test_a_draw_depends_on_seed_position_and_use_alone():
    def draws(seed, position, use, n=1):
        keys = sampling.keys(jnp.full(n, seed, jnp.uint32), jnp.full(n, position), use)
        return np.asarray(sampling.draw(jnp.zeros((n, 1000)), keys))

    first = draws(1, 2, sampling.DRAW)[0]
    assert (draws(1, 2, sampling.DRAW, 5) == first).all()
    others = [
        draws(*a)[0]
        for a in ((2, 2, 0), (1, 3, 0), (1, 2, sampling.DRAFT), (1, 2, sampling.ACCEPT))
    ]
    assert first not in others
    assert len(set(others)) == 4


def test_kept_sets_are_packed_eight_to_a_byte():
    log_p = jnp.full((1, 12), -jnp.inf).at[0, jnp.asarray([0, 9])].set(-1.0)
    np.testing.assert_array_equal(sampling.pack_kept(log_p), [[0b10000000, 0b01000000]])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", 1e-9), ("temperature", math.nan), ("top_p", 0.0),
        ("top_p", 1.5), ("top_k", -1), ("top_k", 2**31), ("seed", -1), ("seed", 2**32), ("max_tokens", 0),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
