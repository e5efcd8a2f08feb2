import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import dense_mla

FLOAT32_TOL = 1e-5  # weighted means of values ~1, a few float32 roundings
GRAD_TOL = 1e-4  # the same after two more products and sums over up to 150 rows
BF16_DIFF = 2e-5  # calc_diff; weights and output are rounded to 8 bits of mantissa
SCALE = 0.3
attend = jax.jit(dense_mla, static_argnames=("scale", "causal", "implementation"))


def ranges(start, end):
    return {"start": jnp.asarray(start, jnp.int32), "end": jnp.asarray(end, jnp.int32)}


def oracle(q, k, v, start, end, selected=None, scale=SCALE):
    """Attend in float64, row by row, one sequence."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    for t in range(len(q)):
        keys = np.arange(max(start[t], 0), min(end[t], len(k)))
        keys = keys if selected is None else keys[selected[t, keys]]
        if len(keys):
            for h in range(q.shape[1]):
                logits = scale * k[keys, h] @ q[t, h]
                weights = np.exp(logits - logits.max())
                out[t, h] = weights @ v[keys, h] / weights.sum()
                lse[t, h] = logits.max() + np.log(weights.sum())
    return out, lse


def draw(rng, batch, n_queries, n_keys, heads=3, dim=8, value_dim=5):
    shapes = ((n_queries, heads, dim), (n_keys, heads, dim), (n_keys, heads, value_dim))
    return [rng.normal(size=(*batch, *shape)) for shape in shapes]


def run(arrays, bounds, selected=None, dtype=jnp.float32, scale=SCALE, **options):
    q, k, v = (jnp.asarray(a, dtype) for a in arrays)
    mask = None if selected is None else jnp.asarray(selected)
    return attend(q, k, v, scale=scale, selected=mask, **ranges(*bounds), **options)


def check(arrays, bounds, selected=None):
    for got, expected in zip(
        run(arrays, bounds, selected), oracle(*arrays, *bounds, selected), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=FLOAT32_TOL)


# Regular, then irregular: one token, odd sizes, fewer keys than queries, more than one block.
@pytest.mark.parametrize(("n_queries", "n_keys"), [(16, 32), (1, 1), (5, 95), (13, 5), (131, 37)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_a_loop_over_rows(rng, draw_ranges, n_queries, n_keys, masked):
    selected = rng.uniform(size=(n_queries, n_keys)) < 0.4 if masked else None
    bounds = draw_ranges(rng, (n_queries,), n_keys)
    check(draw(rng, (), n_queries, n_keys), bounds, selected)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_leading_batch_axes_are_separate_sequences(rng, draw_ranges, batch):
    arrays = draw(rng, batch, 5, 9)
    bounds = draw_ranges(rng, (*batch, 5), 9)
    selected = rng.uniform(size=(*batch, 5, 9)) < 0.6

    out, lse = run(arrays, bounds, selected)

    for i in np.ndindex(batch):
        expected = oracle(*(a[i] for a in (*arrays, *bounds, selected)))
        np.testing.assert_allclose(out[i], expected[0], atol=FLOAT32_TOL)
        np.testing.assert_allclose(lse[i], expected[1], atol=FLOAT32_TOL)


def test_gradients_agree_with_finite_differences(rng):
    arrays = tuple(jnp.asarray(a, jnp.float32) for a in draw(rng, (), 4, 5, 2, 3, 2))
    bounds = ([0, 1, 3, 0], [1, 4, 3, 5])
    selected = np.ones((4, 5), bool)
    selected[3, 1] = False

    def both(*arrays):
        out, lse = run(arrays, bounds, selected)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    check_grads(both, arrays, order=1, modes=["rev"], eps=1e-2, atol=1e-2, rtol=1e-2)


# 150 rows take two spans, 1029 take eight, each of them a rematerialised loop over two blocks.
@pytest.mark.parametrize("n", [150, 8 * 128 + 5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_causal_promise_changes_nothing(rng, draw_ranges, n, masked):
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(rng, (), n, n, 1, 4, 3)]
    bounds = draw_ranges(rng, (n,), n)
    selected = rng.uniform(size=(n, n)) < 0.5 if masked else None

    def loss(arrays, causal):
        out, lse = run(arrays, bounds, selected, causal=causal)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), (out, lse)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    promised, plain = (grad(arrays, causal) for causal in (True, False))

    for a, b in zip(promised[1], plain[1], strict=True):
        np.testing.assert_allclose(a, b, atol=FLOAT32_TOL)
    for a, b in zip(promised[0], plain[0], strict=True):
        np.testing.assert_allclose(a, b, atol=GRAD_TOL * np.abs(b).max())


# Corner.


def test_an_empty_row_gives_zero_and_minus_infinity_and_no_gradient(rng):
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(rng, (), 4, 6)]
    bounds = ([0, 2, 0, 0], [3, 2, 6, 4])
    selected = np.ones((4, 6), bool)
    selected[2] = False

    out, lse = (np.asarray(a) for a in run(arrays, bounds, selected))
    grads = jax.grad(lambda a: jnp.sum(run(a, bounds, selected)[0] ** 2))(arrays)

    check([np.asarray(a, np.float64) for a in arrays], bounds, selected)
    assert np.all(out[1:3] == 0)
    assert np.all(np.isneginf(lse[1:3]))
    assert all(np.all(np.isfinite(g)) for g in grads)
    assert np.all(np.asarray(grads[0])[1:3] == 0)
    assert np.all(np.asarray(grads[1])[4:] == 0)


def test_gradients_are_zero_when_every_row_is_empty(rng):
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(rng, (), 3, 4)]

    def loss(arrays):
        out, lse = run(arrays, ([0, 1, 4], [0, 0, 4]))
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    for grad in jax.grad(loss)(arrays):
        np.testing.assert_array_equal(grad, 0.0)


def test_late_starts_leave_earlier_keys_out(rng):
    check(draw(rng, (), 3, 20), (np.array([4, 10, 17]), np.array([20, 12, 18])))


def test_equal_logits_average_the_values(rng):
    q, k, v = draw(rng, (), 2, 6)
    out, lse = run((q, 0 * k, v), ([0, 0], [6, 6]))
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(0), out.shape), atol=FLOAT32_TOL)
    np.testing.assert_allclose(lse, np.log(6), atol=FLOAT32_TOL)


def test_large_logits_stay_accurate(rng):
    q, k, v = draw(rng, (), 5, 9)
    bounds = (np.zeros(5, int), np.full(5, 9))
    out, lse = run((100 * q, k, v), bounds)
    expected_out, expected_lse = oracle(100 * q, k, v, *bounds)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(out, expected_out, atol=1e-3)  # logits ~100 are known to 1e-5


# Low precision.


def test_bf16_inputs_accumulate_in_float32(rng, draw_ranges, calc_diff):
    arrays = draw(rng, (), 40, 300, 4, 48, 32)
    arrays = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in arrays]
    bounds = draw_ranges(rng, (40,), 300)

    out, lse = run(arrays, bounds, dtype=jnp.bfloat16, scale=0.15)
    expected_out, expected_lse = oracle(*arrays, *bounds, scale=0.15)

    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert calc_diff(out, expected_out) < BF16_DIFF
    np.testing.assert_allclose(lse, expected_lse, atol=FLOAT32_TOL)


def test_attention_is_repeatable(rng, draw_ranges):
    arrays, bounds = draw(rng, (), 150, 150), draw_ranges(rng, (150,), 150)
    for first, second in zip(run(arrays, bounds), run(arrays, bounds), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"implementation": "magic"}, "dense_mla: implementation='magic' must be one of"),
        ({"causal": True}, "dense_mla: causal=True needs as many queries as keys, got 3 and 4"),
    ],
)
def test_wrong_options_are_refused(rng, option, message):
    with pytest.raises(ValueError, match=message):
        run(draw(rng, (), 3, 4), ([0] * 3, [4] * 3), **option)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 4), (3, 0)])
def test_an_empty_axis_gives_empty_rows(n_queries, n_keys):
    arrays = (jnp.ones((n, 2, d)) for n, d in ((n_queries, 6), (n_keys, 6), (n_keys, 5)))
    bound = jnp.zeros(n_queries, jnp.int32)

    out, lse = dense_mla(*arrays, scale=1.0, start=bound, end=bound)

    assert out.shape == (n_queries, 2, 5)
    assert not np.any(out)
    assert np.all(lse == -np.inf)
