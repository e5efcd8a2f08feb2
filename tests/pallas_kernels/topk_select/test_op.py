import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

STATIC = ("k", "causal", "implementation")
topk_select = jax.jit(pallas_kernels.topk_select, static_argnames=("k", "implementation"))
indexer_topk = jax.jit(pallas_kernels.indexer_topk, static_argnames=STATIC)
indexer_topk_mask = jax.jit(pallas_kernels.indexer_topk_mask, static_argnames=STATIC)


def oracle(scores, k, start, end):
    """Sort each row's valid keys by (-score, index) in Python and list the first k, ascending, then -1."""
    rows = []
    for row, first, last in zip(np.asarray(scores), start, end, strict=True):
        valid = [s for s in range(max(first, 0), min(last, len(row))) if np.isfinite(row[s])]
        best = sorted(sorted(valid, key=lambda s: (-float(row[s]), s))[:k])
        rows.append(best + [-1] * (k - len(best)))
    return np.array(rows, np.int32)


def ranges(start, end):
    return {"start": jnp.asarray(start, jnp.int32), "end": jnp.asarray(end, jnp.int32)}


def check(scores, k, start=None, end=None):
    """Compare with the sort bit for bit, over whole rows unless told."""
    scores = np.asarray(scores, np.float32)
    start = np.zeros(len(scores), np.int32) if start is None else start
    end = np.full(len(scores), scores.shape[1], np.int32) if end is None else end
    out = topk_select(jnp.asarray(scores), k=k, **ranges(start, end))
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, oracle(scores, k, start, end))


# Regular.


def test_selection_equals_a_sort(rng, draw_ranges):
    start, end = draw_ranges(rng, (16,), 64)
    check(rng.normal(size=(16, 64)), 8, start, end)


# Irregular: one token, one key, odd sizes, fewer keys than slots, as many.


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "k"),
    [(1, 1, 1), (1, 1, 4), (5, 95, 128), (5, 33, 33), (3, 705, 704), (7, 153, 1)],
)
def test_odd_sizes_equal_a_sort(rng, n_queries, n_keys, k):
    check(rng.normal(size=(n_queries, n_keys)), k)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_leading_batch_axes_are_separate_sequences(rng, draw_ranges, batch):
    scores = rng.normal(size=(*batch, 5, 20)).astype(np.float32)
    start, end = draw_ranges(rng, (*batch, 5), 20)

    out = topk_select(jnp.asarray(scores), k=6, **ranges(start, end))

    for i in np.ndindex(batch):
        np.testing.assert_array_equal(out[i], oracle(scores[i], 6, start[i], end[i]))


# Corner: ties, signs, zeros, values that are no numbers, empty rows.


def test_ties_go_to_the_smaller_index(rng):
    check(2.0 ** rng.integers(-2, 3, size=(16, 200)), 50)  # a few powers of two, many of each
    check(np.ones((2, 9)), 4)


def test_negative_scores_are_ranked_too(rng):
    check(-np.abs(rng.normal(size=(4, 30))), 7)
    check(np.full((2, 129), -1e5), 65)


def test_minus_zero_ties_with_zero():
    check([[-1.0, -0.0, 0.0, -0.0, 0.0]], 2)
    check([[0.0, -0.0, 0.0, -2.0, -0.0]], 4)


def test_subnormal_scores_are_not_zero():
    check([[0.0, -1e-40, 1e-42, 3e-40, -0.0]], 2)


def test_nan_and_infinities_are_never_selected(rng):
    scores = rng.normal(size=(3, 40))
    scores[0, ::2] = np.nan
    scores[1, ::3] = np.inf
    scores[1, 1::3] = -np.inf
    scores[2, :] = -np.nan
    check(scores, 30)


def test_winners_above_a_sea_of_zeros_fill_up_in_order(rng):
    scores = np.zeros((2, 8320))
    winners = rng.permutation(8320)[:100]
    scores[:, winners] = rng.uniform(1, 2, size=100)
    check(scores, 2048)


def test_membership_is_not_decided_in_16_bits(rng):
    bits = np.uint32(0x3F900000) | rng.integers(0, 1024, size=(4, 3000)).astype(np.uint32)
    check(bits.view(np.float32), 2048)
    check(1 + np.arange(3000)[None] * 2.0**-23, 2048)  # the largest come last


def test_extreme_scores_are_ranked_exactly():
    big = np.finfo(np.float32).max
    check([[big, -big, 1e30, -1e30, 0.0]], 3)


def test_empty_rows_select_nothing():
    check(np.ones((3, 5)), 2, np.array([0, 5, 3]), np.array([0, 5, 1]))


def test_late_starts_leave_earlier_keys_out(rng):
    check(rng.normal(size=(3, 20)), 5, np.array([4, 10, 17]), np.array([20, 12, 20]))


def test_bounds_past_the_keys_are_cut():
    check(np.ones((2, 5)), 8, np.array([-3, 2]), np.array([9, 100]))


def test_selection_is_repeatable(rng):
    scores = jnp.asarray(rng.integers(0, 5, size=(20, 300)), jnp.float32)
    bounds = ranges(np.zeros(20), np.full(20, 300))

    first, second = (topk_select(scores, k=40, **bounds) for _ in range(2))

    np.testing.assert_array_equal(first, second)


# Fused with the scores. Small integers make every score exact and many of them tie.


def draw(rng, batch, n_queries, n_keys, heads=3, dim=4):
    shapes = ((n_queries, heads, dim), (n_keys, dim), (n_queries, heads))
    return [rng.integers(-2, 3, size=(*batch, *shape)).astype(np.float32) for shape in shapes]


def exact_scores(q, k, w):
    return np.einsum("tj,tjs->ts", w, np.maximum(np.einsum("tjx,sx->tjs", q, k), 0))


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "k"), [(1, 1, 1), (5, 95, 128), (131, 40, 9), (16, 64, 8)]
)
def test_the_fused_selection_equals_a_sort_of_the_scores(rng, draw_ranges, n_queries, n_keys, k):
    arrays = draw(rng, (), n_queries, n_keys)
    start, end = draw_ranges(rng, (n_queries,), n_keys)
    expected = oracle(exact_scores(*arrays), k, start, end)

    out = indexer_topk(*map(jnp.asarray, arrays), k=k, **ranges(start, end))

    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("batch", [(), (2,), (2, 2)])
def test_the_mask_marks_the_listed_keys(rng, draw_ranges, batch):
    arrays = [jnp.asarray(a) for a in draw(rng, batch, 12, 30)]
    bounds = ranges(*draw_ranges(rng, (*batch, 12), 30))

    listed = np.asarray(indexer_topk(*arrays, k=5, **bounds))
    mask = np.asarray(indexer_topk_mask(*arrays, k=5, **bounds))

    assert mask.shape == (*batch, 12, 30)
    for i in np.ndindex(mask.shape[:-1]):
        assert set(np.flatnonzero(mask[i])) == set(listed[i]) - {-1}


@pytest.mark.parametrize("n", [150, 8 * 128 + 5])
@pytest.mark.parametrize("op", [indexer_topk, indexer_topk_mask])
def test_the_causal_promise_changes_nothing(rng, draw_ranges, n, op):
    arrays = [jnp.asarray(a) for a in draw(rng, (), n, n, heads=2)]
    bounds = ranges(*draw_ranges(rng, (n,), n))

    promised, plain = (op(*arrays, k=16, causal=c, **bounds) for c in (True, False))

    np.testing.assert_array_equal(promised, plain)


def test_a_planted_key_is_found_in_a_long_row(rng):
    n_keys = 20000
    q, k, w = draw(rng, (), 2, n_keys)
    k[12345] = 100.0 * np.sign(q[0].sum(0) + 0.5)
    q[1], w = q[0], np.ones_like(w)

    out = indexer_topk(*map(jnp.asarray, (q, k, w)), k=1, **ranges([0, 0], [n_keys, n_keys]))

    np.testing.assert_array_equal(out, [[12345], [12345]])


FEW_SLOTS = ({"k": 0}, "k=0 must be at least 1")
UNKNOWN = ({"k": 1, "implementation": "magic"}, "implementation='magic' must be one of")
NOT_CAUSAL = ({"k": 1, "causal": True}, "causal=True needs as many queries as keys, got 3 and 4")


@pytest.mark.parametrize("name", ["indexer_topk", "indexer_topk_mask"])
@pytest.mark.parametrize(("option", "message"), [FEW_SLOTS, UNKNOWN, NOT_CAUSAL])
def test_wrong_options_of_the_fused_selection_are_refused(rng, name, option, message):
    arrays = [jnp.asarray(a) for a in draw(rng, (), 3, 4)]
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        getattr(pallas_kernels, name)(*arrays, **ranges([0] * 3, [4] * 3), **option)


@pytest.mark.parametrize(("option", "message"), [FEW_SLOTS, UNKNOWN])
def test_wrong_options_are_refused(option, message):
    with pytest.raises(ValueError, match=f"topk_select: {message}"):
        topk_select(jnp.zeros((3, 4)), **ranges([0] * 3, [4] * 3), **option)


def test_scores_of_16_bits_are_refused():
    with pytest.raises(ValueError, match="topk_select: scores must be float32, got bfloat16"):
        topk_select(jnp.zeros((2, 3), jnp.bfloat16), k=1, **ranges([0, 0], [3, 3]))
