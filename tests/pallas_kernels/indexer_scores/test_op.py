import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_kernels

FLOAT32_TOL = 2e-5  # sums of up to 64 products of size ~1 in float32
indexer_scores = jax.jit(
    pallas_kernels.indexer_scores, static_argnames=("causal", "implementation")
)
BF16_DIFF = 1e-5  # calc_diff; inputs are exact in bf16 and products accumulate in float32


def oracle(q, k, w, start, end):
    """Compute the scores of one sequence in float64, pair by pair."""
    scores = np.full((q.shape[0], k.shape[0]), -np.inf)
    for t in range(q.shape[0]):
        for s in range(max(start[t], 0), min(end[t], k.shape[0])):
            scores[t, s] = sum(w[t, j] * max(q[t, j] @ k[s], 0.0) for j in range(q.shape[1]))
    return scores


def draw(rng, batch, n_queries, n_keys, heads=3, dim=8):
    shapes = ((n_queries, heads, dim), (n_keys, dim), (n_queries, heads))
    return [rng.normal(size=(*batch, *shape)) for shape in shapes]


def ranges(start, end):
    return {"start": jnp.asarray(start, jnp.int32), "end": jnp.asarray(end, jnp.int32)}


def float32(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


# Regular, then irregular: one token, odd sizes, fewer keys than queries, more than one block.
@pytest.mark.parametrize(("n_queries", "n_keys"), [(16, 16), (1, 1), (5, 13), (13, 5), (131, 37)])
def test_scores_equal_a_loop_over_pairs(rng, draw_ranges, n_queries, n_keys):
    q, k, w = draw(rng, (), n_queries, n_keys)
    start, end = draw_ranges(rng, (n_queries,), n_keys)

    out = indexer_scores(*float32(q, k, w), **ranges(start, end))

    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, oracle(q, k, w, start, end), atol=FLOAT32_TOL)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_leading_batch_axes_are_separate_sequences(rng, draw_ranges, batch):
    q, k, w = draw(rng, batch, 5, 9)
    start, end = draw_ranges(rng, (*batch, 5), 9)

    out = indexer_scores(*float32(q, k, w), **ranges(start, end))

    for i in np.ndindex(batch):
        expected = oracle(q[i], k[i], w[i], start[i], end[i])
        np.testing.assert_allclose(out[i], expected, atol=FLOAT32_TOL)


@pytest.mark.parametrize("heads", [1, 8, 19])  # 19 takes the looped form of the sum over heads
def test_any_number_of_heads_is_summed(rng, heads):
    q, k, w = draw(rng, (), 4, 6, heads=heads)
    start, end = np.zeros(4, np.int32), np.full(4, 6, np.int32)

    out = indexer_scores(*float32(q, k, w), **ranges(start, end))

    np.testing.assert_allclose(out, oracle(q, k, w, start, end), atol=FLOAT32_TOL)


@pytest.mark.parametrize("n", [150, 8 * 128 + 5])
def test_the_causal_promise_changes_nothing(rng, draw_ranges, n):
    # Small integers: every product and sum is exact, so the two must agree to the bit.
    q, k, w = (rng.integers(-3, 4, size=a.shape) for a in draw(rng, (), n, n, heads=2, dim=4))
    start, end = draw_ranges(rng, (n,), n)

    promised, plain = (
        indexer_scores(*float32(q, k, w), **ranges(start, end), causal=c) for c in (True, False)
    )

    np.testing.assert_array_equal(promised, plain)


def test_empty_rows_are_all_minus_infinity(rng):
    q, k, w = draw(rng, (), 3, 4)
    bounds = ranges([0, 2, 3], [0, 2, 1])

    assert np.all(np.isneginf(indexer_scores(*float32(q, k, w), **bounds)))


def test_negative_weights_give_negative_scores(rng):
    q, k, _ = draw(rng, (), 3, 4)
    out = indexer_scores(
        *float32(np.abs(q), np.abs(k), -np.ones((3, 3))),
        **ranges(np.zeros(3), np.full(3, 4)),
    )

    assert np.all(np.asarray(out) < 0)


def test_gradients_agree_with_finite_differences(rng):
    arrays = float32(*draw(rng, (), 4, 5, heads=2, dim=3))
    start, end = np.array([0, 1, 2, 3], np.int32), np.array([1, 3, 2, 5], np.int32)

    def total(*arrays):
        scores = indexer_scores(*float32(*arrays), **ranges(start, end))
        return jnp.sum(jnp.where(jnp.isfinite(scores), scores, 0.0) ** 2)

    check_grads(total, tuple(arrays), order=1, modes=["rev"], eps=1e-3, atol=2e-2, rtol=2e-2)


def test_large_bf16_inputs_accumulate_in_float32(rng, calc_diff):
    q, k, w = (
        np.asarray(jnp.asarray(a * 1e3, jnp.bfloat16), np.float64)
        for a in draw(rng, (), 9, 33, 16, 64)
    )
    start, end = np.zeros(9, np.int32), np.full(9, 33, np.int32)

    out = indexer_scores(*(jnp.asarray(a, jnp.bfloat16) for a in (q, k, w)), **ranges(start, end))

    assert out.dtype == jnp.float32
    assert np.all(np.isfinite(out))
    assert calc_diff(out, oracle(q, k, w, start, end)) < BF16_DIFF


def test_a_nan_key_spoils_its_own_column_only(rng):
    q, k, w = draw(rng, (), 3, 4)
    k[2] = np.nan
    bounds = ranges(np.zeros(3), np.full(3, 4))

    out = np.asarray(indexer_scores(*float32(q, k, w), **bounds))

    assert np.all(np.isnan(out[:, 2]))
    assert np.all(np.isfinite(np.delete(out, 2, axis=1)))


def test_scores_are_repeatable(rng, draw_ranges):
    q, k, w = float32(*draw(rng, (), 150, 150))
    start, end = draw_ranges(rng, (150,), 150)
    run = jax.jit(lambda: indexer_scores(q, k, w, **ranges(start, end), causal=True))

    np.testing.assert_array_equal(run(), run())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"implementation": "magic"}, r"indexer_scores: implementation='magic' must be one of"),
        (
            {"causal": True},
            "indexer_scores: causal=True needs as many queries as keys, got 3 and 4",
        ),
    ],
)
def test_wrong_options_are_refused(rng, option, message):
    bounds = ranges(np.zeros(3), np.full(3, 4))
    with pytest.raises(ValueError, match=message):
        indexer_scores(*float32(*draw(rng, (), 3, 4)), **bounds, **option)
