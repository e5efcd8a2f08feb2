import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import indexer_kl, sparse_indexer_kl

FLOAT32_TOL = 2e-5  # sums of up to ~100 terms p log(p/q) in float32
GRAD_TOL = 5e-5
BF16_TOL = 2e-3  # inputs are exact in bf16; only float32 sums differ, in logits of ~10
SCALE = 0.3
range_kl = jax.jit(indexer_kl, static_argnames=("scale", "causal", "implementation"))
listed_kl = jax.jit(sparse_indexer_kl, static_argnames=("scale", "implementation"))


def ranges(start, end):
    return {"start": jnp.asarray(start, jnp.int32), "end": jnp.asarray(end, jnp.int32)}


def draw(rng, batch, n_queries, n_keys, shared=False):
    """Draw index q, k, w and attention q, k (one key head for all with `shared`)."""
    heads, dim = 3, 8
    key = (n_keys, dim) if shared else (n_keys, heads, dim)
    shapes = ((n_queries, 2, 4), (n_keys, 4), (n_queries, 2), (n_queries, heads, dim), key)
    return [rng.normal(size=(*batch, *shape)) for shape in shapes]


def allowed_keys(bounds, n_keys, selected=None):
    places = np.arange(n_keys)
    start, end = (np.asarray(b)[:, None] for b in bounds)
    mask = (places >= start) & (places < end)
    return mask if selected is None else mask & selected


def oracle(q, k, w, attn_q, attn_k, allowed):
    """Compute lse, KL and dKL/dI = softmax(I) - p of one sequence in float64, row by row."""
    if attn_k.ndim == 2:
        attn_k = np.repeat(attn_k[:, None], attn_q.shape[1], axis=1)
    lse = np.full(attn_q.shape[:2], -np.inf)
    kl, d_scores = np.zeros(len(q)), np.zeros(allowed.shape)
    for t in range(len(q)):
        keys = np.flatnonzero(allowed[t])
        if not len(keys):
            continue
        logits = SCALE * np.einsum("hd,shd->hs", attn_q[t], attn_k[keys])
        lse[t] = np.log(np.exp(logits).sum(-1))
        p = np.exp(logits - lse[t][:, None]).sum(0)
        p /= p.sum()
        scores = w[t] @ np.maximum(q[t] @ k[keys].T, 0)
        softmax = np.exp(scores - scores.max())
        softmax /= softmax.sum()
        kl[t] = np.sum(p * (np.log(p) - np.log(softmax)))
        d_scores[t, keys] = softmax - p
    return lse, kl, d_scores


def run(arrays, lse, bounds, selected=None, dtype=jnp.float32, **options):
    arrays = [jnp.asarray(a, dtype) for a in arrays]
    mask = None if selected is None else jnp.asarray(selected)
    lse = jnp.asarray(lse, jnp.float32)
    return range_kl(*arrays, lse, scale=SCALE, selected=mask, **ranges(*bounds), **options)


def run_listed(arrays, lse, idx, **options):
    arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
    lse, idx = jnp.asarray(lse, jnp.float32), jnp.asarray(idx, jnp.int32)
    return listed_kl(*arrays, lse, idx, scale=SCALE, **options)


def list_keys(rng, allowed, n_slots):
    """List every row's allowed keys in random order among -1 and out-of-range slots."""
    idx = np.full((len(allowed), n_slots), -1)
    for t, row in enumerate(allowed):
        keys = np.flatnonzero(row)
        slots = rng.permutation(n_slots)[: len(keys)]
        idx[t, slots] = keys
    return np.where(idx == -1, rng.choice([-1, allowed.shape[1], 10**6], idx.shape), idx)


# Regular, then irregular: one token, odd sizes, fewer keys than queries, more than one block.
@pytest.mark.parametrize(("n_queries", "n_keys"), [(16, 16), (1, 1), (5, 95), (13, 5), (131, 37)])
@pytest.mark.parametrize("masked", [False, True])
def test_kl_equals_a_loop_over_rows(rng, draw_ranges, n_queries, n_keys, masked):
    arrays = draw(rng, (), n_queries, n_keys)
    bounds = draw_ranges(rng, (n_queries,), n_keys)
    selected = rng.uniform(size=(n_queries, n_keys)) < 0.4 if masked else None
    lse, expected, _ = oracle(*arrays, allowed_keys(bounds, n_keys, selected))

    np.testing.assert_allclose(run(arrays, lse, bounds, selected), expected, atol=FLOAT32_TOL)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(16, 16), (1, 1), (5, 30), (131, 20)])
def test_kl_over_listed_keys_is_kl_over_the_same_set(rng, draw_ranges, n_queries, n_keys):
    arrays = draw(rng, (), n_queries, n_keys, shared=True)
    bounds = draw_ranges(rng, (n_queries,), n_keys)
    selected = rng.uniform(size=(n_queries, n_keys)) < 0.5
    allowed = allowed_keys(bounds, n_keys, selected)
    lse, expected, _ = oracle(*arrays, allowed)
    expanded = [*arrays[:4], np.repeat(arrays[4][:, None], 3, axis=1)]

    listed = run_listed(arrays, lse, list_keys(rng, allowed, n_keys + 3))

    np.testing.assert_allclose(listed, expected, atol=FLOAT32_TOL)
    np.testing.assert_allclose(run(expanded, lse, bounds, selected), listed, atol=FLOAT32_TOL)


@pytest.mark.parametrize("batch", [(2,), (2, 2)])
def test_leading_batch_axes_are_separate_sequences(rng, draw_ranges, batch):
    arrays = draw(rng, batch, 5, 9, shared=True)
    bounds = draw_ranges(rng, (*batch, 5), 9)
    expanded = [*arrays[:4], np.repeat(arrays[4][..., None, :], 3, axis=-2)]
    lse, kl = np.zeros((*batch, 5, 3)), np.zeros((*batch, 5))
    idx = np.zeros((*batch, 5, 9), int)
    for i in np.ndindex(batch):
        allowed = allowed_keys([b[i] for b in bounds], 9)
        lse[i], kl[i], _ = oracle(*(a[i] for a in arrays), allowed)
        idx[i] = list_keys(rng, allowed, 9)

    np.testing.assert_allclose(run(expanded, lse, bounds), kl, atol=FLOAT32_TOL)
    np.testing.assert_allclose(run_listed(arrays, lse, idx), kl, atol=FLOAT32_TOL)


@pytest.mark.parametrize("listed", [False, True])
def test_the_gradient_is_softmax_minus_target(rng, draw_ranges, listed):
    n_queries, n_keys = 6, 9
    arrays = draw(rng, (), n_queries, n_keys, shared=listed)
    bounds = draw_ranges(rng, (n_queries,), n_keys)
    allowed = allowed_keys(bounds, n_keys)
    lse, _, d_scores = oracle(*arrays, allowed)
    idx = list_keys(rng, allowed, n_keys)
    q, k, w = arrays[:3]
    dots = np.einsum("tjx,sx->tjs", q, k)
    d_w = np.einsum("ts,tjs->tj", d_scores, np.maximum(dots, 0))
    d_dots = np.einsum("ts,tj,tjs->tjs", d_scores, w, dots > 0)
    expected = (np.einsum("tjs,sx->tjx", d_dots, k), np.einsum("tjs,tjx->sx", d_dots, q), d_w)

    def loss(q, k, w):
        tensors = (q, k, w, *arrays[3:])
        rows = run_listed(tensors, lse, idx) if listed else run(tensors, lse, bounds)
        return jnp.sum(rows)

    got = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(a, jnp.float32) for a in (q, k, w)))

    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=GRAD_TOL)


def test_gradients_agree_with_finite_differences(rng):
    arrays = draw(rng, (), 4, 5)
    bounds = ([0, 1, 3, 0], [1, 4, 3, 5])
    lse, _, _ = oracle(*arrays, allowed_keys(bounds, 5))
    moving = tuple(jnp.asarray(a, jnp.float32) for a in arrays[:3])

    def loss(q, k, w):
        return jnp.sum(run((q, k, w, *arrays[3:]), lse, bounds) ** 2)

    check_grads(loss, moving, order=1, modes=["rev"], eps=1e-3, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("listed", [False, True])
def test_no_gradient_reaches_the_main_attention(rng, listed):
    arrays = draw(rng, (), 4, 4, shared=listed)
    bounds = (np.zeros(4, int), np.arange(1, 5))
    lse, _, _ = oracle(*arrays, allowed_keys(bounds, 4))
    idx = np.where(np.tri(4, dtype=bool), np.arange(4), -1)

    def loss(main):
        tensors = (*arrays[:3], *main[:2])
        rows = run_listed(tensors, main[2], idx) if listed else run(tensors, main[2], bounds)
        return jnp.sum(rows)

    for grad in jax.grad(loss)([jnp.asarray(a, jnp.float32) for a in (*arrays[3:], lse)]):
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("n", [150, 8 * 128 + 5])
def test_the_causal_promise_changes_nothing(rng, draw_ranges, n):
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(rng, (), n, n)]
    bounds = draw_ranges(rng, (n,), n)
    selected = rng.uniform(size=(n, n)) < 0.5
    lse = rng.normal(size=(n, 3))  # the target is normalised, so any lse makes a legal teacher

    def loss(index, causal):
        rows = run((*index, *arrays[3:]), lse, bounds, selected, causal=causal)
        return jnp.sum(rows), rows

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    promised, plain = (grad(arrays[:3], causal) for causal in (True, False))

    np.testing.assert_allclose(promised[1], plain[1], atol=FLOAT32_TOL)
    for a, b in zip(promised[0], plain[0], strict=True):
        np.testing.assert_allclose(a, b, atol=GRAD_TOL * max(1.0, np.abs(b).max()))


# Corner.


@pytest.mark.parametrize("listed", [False, True])
def test_an_empty_row_is_zero_with_no_gradient(rng, listed):
    arrays = draw(rng, (), 3, 4, shared=listed)
    lse = np.full((3, 3), -np.inf)

    def loss(index):
        tensors = (*index, *arrays[3:])
        if listed:
            return jnp.sum(run_listed(tensors, lse, [[-1, 4]] * 3))
        return jnp.sum(run(tensors, lse, ([0, 2, 4], [0, 1, 4])))

    value, grads = jax.value_and_grad(loss)([jnp.asarray(a, jnp.float32) for a in arrays[:3]])

    assert value == 0
    for grad in grads:
        np.testing.assert_array_equal(grad, 0.0)


def test_one_key_leaves_nothing_to_learn(rng):
    arrays = draw(rng, (), 1, 1)
    lse, _, _ = oracle(*arrays, np.ones((1, 1), bool))
    np.testing.assert_allclose(run(arrays, lse, ([0], [1])), 0.0, atol=1e-6)


def test_unlisted_rows_that_are_nan_spoil_nothing(rng):
    arrays = draw(rng, (), 2, 5, shared=True)
    allowed = np.array([[False, True, True, False, False], [False, False, True, True, True]])
    lse, expected, _ = oracle(*arrays, allowed)
    arrays[1][0] = arrays[4][0] = np.nan
    idx = np.array([[1, -1, 2, -1], [4, 3, 2, 5]])

    def loss(index):
        rows = run_listed((*index, *arrays[3:]), lse, idx)
        return jnp.sum(rows), rows

    grads, rows = jax.grad(loss, has_aux=True)([jnp.asarray(a) for a in arrays[:3]])

    np.testing.assert_allclose(rows, expected, atol=FLOAT32_TOL)
    assert all(np.all(np.isfinite(g)) for g in grads)


def test_keys_outside_the_set_do_not_move_the_teacher(rng):
    arrays = draw(rng, (), 4, 6)
    bounds = (np.zeros(4, int), np.full(4, 6))
    selected = np.ones((4, 6), bool)
    selected[:, 5] = False
    lse, expected, _ = oracle(*arrays, allowed_keys(bounds, 6, selected))
    arrays[4][5] *= 50.0

    np.testing.assert_allclose(run(arrays, lse, bounds, selected), expected, atol=FLOAT32_TOL)


def test_each_head_counts_by_its_share_of_the_given_denominator(rng):
    arrays = draw(rng, (), 1, 3)
    bounds = ([0], [3])
    lse, _, _ = oracle(*arrays, np.ones((1, 3), bool))
    lse[0, 1] += np.log(4.0)  # the second head keeps a quarter of its weight inside the set
    logits = SCALE * np.einsum("hd,shd->hs", arrays[3][0], arrays[4])
    p = np.exp(logits - lse[0][:, None]).sum(0)
    p /= p.sum()
    scores = arrays[2][0] @ np.maximum(arrays[0][0] @ arrays[1].T, 0)
    expected = np.sum(p * (np.log(p) - scores + np.log(np.exp(scores).sum())))

    np.testing.assert_allclose(run(arrays, lse, bounds), [expected], atol=FLOAT32_TOL)


# Low precision.


def test_bf16_inputs_accumulate_in_float32(rng, draw_ranges):
    arrays = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in draw(rng, (), 20, 64)]
    bounds = draw_ranges(rng, (20,), 64)
    lse, expected, _ = oracle(*arrays, allowed_keys(bounds, 64))

    out = run(arrays, lse, bounds, dtype=jnp.bfloat16)

    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=BF16_TOL)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"implementation": "magic"}, "indexer_kl: implementation='magic' must be one of"),
        ({"causal": True}, "indexer_kl: causal=True needs as many queries as keys, got 3 and 4"),
    ],
)
def test_wrong_options_are_refused(rng, option, message):
    with pytest.raises(ValueError, match=message):
        run(draw(rng, (), 3, 4), np.zeros((3, 3)), ([0] * 3, [4] * 3), **option)


def test_an_unknown_implementation_for_listed_keys_is_refused(rng):
    arrays = draw(rng, (), 3, 4, shared=True)
    with pytest.raises(ValueError, match="sparse_indexer_kl: implementation='magic' must be"):
        run_listed(arrays, np.zeros((3, 3)), np.zeros((3, 2)), implementation="magic")
