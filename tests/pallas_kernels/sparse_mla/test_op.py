import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import sparse_mla

FLOAT32_TOL = 1e-5  # weighted means of values ~1, a few float32 roundings
GRAD_TOL = 5e-5  # the same after one more product and sum
BF16_DIFF = 2e-5  # calc_diff; weights and output are rounded to 8 bits of mantissa
SCALE = 0.3
attend = jax.jit(sparse_mla, static_argnames=("scale", "value_dim"))


def oracle(q, kv, idx, value_dim, scale=SCALE):
    """Attend in float64, slot by slot, one sequence."""
    n_queries, n_heads, _ = q.shape
    out = np.zeros((n_queries, n_heads, value_dim))
    lse = np.full((n_queries, n_heads), -np.inf)
    for t in range(n_queries):
        rows = kv[[i for i in idx[t] if 0 <= i < len(kv)]]
        if len(rows):
            logits = scale * q[t] @ rows.T
            peak = logits.max(-1, keepdims=True)
            total = np.exp(logits - peak).sum(-1, keepdims=True)
            lse[t] = (peak + np.log(total))[:, 0]
            out[t] = np.exp(logits - peak) / total @ rows[:, :value_dim]
    return out, lse


def oracle_gradient(q, kv, idx, value_dim, d_out):
    """Differentiate sum(out * d_out) in float64 by dS = P (dP - Delta)."""
    out, _ = oracle(q, kv, idx, value_dim)
    dq, dkv = np.zeros(q.shape), np.zeros(kv.shape)
    for t in range(len(q)):
        slots = [i for i in idx[t] if 0 <= i < len(kv)]
        for h in range(q.shape[1]):
            if not slots:
                continue
            logits = SCALE * kv[slots] @ q[t, h]
            p = np.exp(logits - logits.max())
            p /= p.sum()
            ds = p * (kv[slots, :value_dim] @ d_out[t, h] - out[t, h] @ d_out[t, h])
            dq[t, h] = SCALE * ds @ kv[slots]
            for slot, i in enumerate(slots):  # a loop, as a duplicate adds up
                dkv[i] += SCALE * ds[slot] * q[t, h]
                dkv[i, :value_dim] += p[slot] * d_out[t, h]
    return dq, dkv


def draw(rng, batch, n_queries, n_keys, k, heads=3, dim=10):
    q = rng.normal(size=(*batch, n_queries, heads, dim))
    kv = rng.normal(size=(*batch, n_keys, dim))
    idx = rng.integers(-1, n_keys + 1, size=(*batch, n_queries, k))  # some -1, some past the end
    return q, kv, idx


def run(q, kv, idx, value_dim, dtype=jnp.float32, scale=SCALE):
    q, kv = jnp.asarray(q, dtype), jnp.asarray(kv, dtype)
    return attend(q, kv, jnp.asarray(idx, jnp.int32), scale=scale, value_dim=value_dim)


def check(q, kv, idx, value_dim=6):
    out, lse = run(q, kv, idx, value_dim)
    expected_out, expected_lse = oracle(q, kv, np.asarray(idx), value_dim)
    np.testing.assert_allclose(out, expected_out, atol=FLOAT32_TOL)
    np.testing.assert_allclose(lse, expected_lse, atol=FLOAT32_TOL)


def check_gradient(q, kv, idx, value_dim=6):
    d_out = np.random.default_rng(1).normal(size=(*q.shape[:2], value_dim))

    def loss(q, kv):
        out, _ = run(q, kv, idx, value_dim)
        return jnp.sum(out * d_out)

    arrays = (jnp.asarray(q, jnp.float32), jnp.asarray(kv, jnp.float32))
    got = jax.grad(loss, argnums=(0, 1))(*arrays)
    expected = oracle_gradient(q, kv, np.asarray(idx), value_dim, d_out)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=GRAD_TOL * max(1.0, np.abs(b).max()))


# Regular, then irregular: one token, odd sizes, fewer keys than slots, more than one block.
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "k"),
    [(16, 32, 8), (1, 1, 1), (1, 7, 3), (5, 95, 128), (62, 32, 70), (131, 40, 9)],
)
def test_attention_equals_a_loop_over_slots(rng, n_queries, n_keys, k):
    check(*draw(rng, (), n_queries, n_keys, k))


@pytest.mark.parametrize(("n_queries", "n_keys", "k"), [(1, 1, 1), (5, 9, 4), (131, 20, 6)])
def test_gradients_equal_a_loop_over_slots(rng, n_queries, n_keys, k):
    check_gradient(*draw(rng, (), n_queries, n_keys, k))


def test_gradients_agree_with_finite_differences(rng):
    q, kv, idx = draw(rng, (), 3, 5, 3, heads=2, dim=4)
    idx[0], idx[1] = [0, 4, 2], [1, 1, -1]
    idx[2] = [0, 3, 9]

    def both(q, kv):
        out, lse = run(q, kv, idx, 3)
        return jnp.sum(out**2) + jnp.sum(lse)

    arrays = (jnp.asarray(q, jnp.float32), jnp.asarray(kv, jnp.float32))
    check_grads(both, arrays, order=1, modes=["rev"], eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_leading_batch_axes_are_separate_sequences(rng, batch):
    q, kv, idx = draw(rng, batch, 5, 9, 4)

    out, lse = run(q, kv, idx, 6)

    for i in np.ndindex(batch):
        expected_out, expected_lse = oracle(q[i], kv[i], idx[i], 6)
        np.testing.assert_allclose(out[i], expected_out, atol=FLOAT32_TOL)
        np.testing.assert_allclose(lse[i], expected_lse, atol=FLOAT32_TOL)


@pytest.mark.parametrize("value_dim", [1, 10])
def test_values_are_the_first_columns(rng, value_dim):
    check(*draw(rng, (), 4, 6, 3), value_dim=value_dim)


# Corner.


def test_an_empty_row_gives_zero_and_minus_infinity_and_no_gradient(rng):
    q, kv, idx = draw(rng, (), 4, 6, 3)
    idx[1], idx[2] = -1, 6

    out, lse = run(q, kv, idx, 6)

    assert np.all(np.asarray(out)[1:3] == 0)
    assert np.all(np.isneginf(np.asarray(lse)[1:3]))
    check_gradient(q, kv, idx)


def test_gradients_are_zero_when_every_row_is_empty(rng):
    q, kv, _ = draw(rng, (), 4, 6, 3)

    def loss(q, kv):
        out, lse = run(q, kv, np.full((4, 3), -1), 6)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    for grad in jax.grad(loss, argnums=(0, 1))(jnp.asarray(q), jnp.asarray(kv)):
        np.testing.assert_array_equal(grad, 0.0)


def test_a_duplicate_counts_once_a_slot(rng):
    q, kv, _ = draw(rng, (), 3, 6, 4)
    idx = np.array([[2, 2, 2, 5], [0, 0, -1, 0], [1, 3, 1, 3]])
    check(q, kv, idx)
    check_gradient(q, kv, idx)


def test_every_query_may_pick_the_same_keys(rng):
    q, kv, _ = draw(rng, (), 150, 20, 4)
    idx = np.broadcast_to(np.arange(8), (150, 8))
    check(q, kv, idx)
    check_gradient(q, kv, idx)


def test_the_order_of_slots_does_not_matter(rng):
    q, kv, idx = draw(rng, (), 5, 9, 6)

    out, lse = run(q, kv, idx, 6)
    turned_out, turned_lse = run(q, kv, rng.permuted(idx, axis=1), 6)

    np.testing.assert_allclose(out, turned_out, atol=FLOAT32_TOL)
    np.testing.assert_allclose(lse, turned_lse, atol=FLOAT32_TOL)


def test_unlisted_rows_that_are_nan_spoil_nothing(rng):
    q, kv, idx = draw(rng, (), 5, 9, 6)
    # No valid slot reads the first or the last row, but there are -1 and 9.
    idx = np.where((idx == 0) | (idx == 8), 3, idx)
    idx[:, 0] = -1
    check_gradient(q, kv, idx)
    kv[0] = kv[8] = np.nan

    loss = lambda q, kv: jnp.sum(run(q, kv, idx, 6)[0])  # noqa: E731
    grads = jax.grad(loss, argnums=(0, 1))(jnp.asarray(q), jnp.asarray(kv))

    check(q, kv, idx)
    assert all(np.all(np.isfinite(g)) for g in grads)


def test_large_logits_stay_accurate(rng):
    q, kv, idx = draw(rng, (), 5, 9, 6)
    out, lse = run(100 * q, kv, idx, 6)
    expected_out, expected_lse = oracle(100 * q, kv, idx, 6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(out, expected_out, atol=1e-3)  # logits ~100 are known to 1e-5


def test_all_causal_keys_equal_dense_attention_with_one_key_head(rng):
    n, value_dim = 150, 6
    q, kv, _ = draw(rng, (), n, n, 1)
    idx = np.where(np.arange(n) <= np.arange(n)[:, None], np.arange(n), -1)
    logits = SCALE * np.einsum("thd,sd->hts", q, kv)
    logits = np.where(np.tri(n, dtype=bool), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("hts,su->thu", p / p.sum(-1, keepdims=True), kv[:, :value_dim])

    out, _ = run(q, kv, idx, value_dim)

    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL)


# Low precision.


def test_bf16_inputs_accumulate_in_float32(rng, calc_diff):
    q, kv, idx = draw(rng, (), 16, 300, 128, heads=4, dim=64)
    q, kv = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (q, kv))

    out, lse = run(q, kv, idx, 48, jnp.bfloat16, scale=0.125)
    expected_out, expected_lse = oracle(q, kv, idx, 48, scale=0.125)

    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert calc_diff(out, expected_out) < BF16_DIFF
    np.testing.assert_allclose(lse, expected_lse, atol=FLOAT32_TOL)


def test_attention_is_repeatable(rng):
    q, kv, idx = draw(rng, (), 131, 40, 9)
    for first, second in zip(run(q, kv, idx, 6), run(q, kv, idx, 6), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("value_dim", [0, 11])
def test_a_value_dim_outside_the_row_is_refused(rng, value_dim):
    with pytest.raises(ValueError, match=rf"value_dim={value_dim} must be in \[1, 10\]"):
        run(*draw(rng, (), 2, 3, 2), value_dim)


def test_an_unknown_implementation_is_refused(rng):
    q, kv, idx = (jnp.asarray(a) for a in draw(rng, (), 2, 3, 2))
    with pytest.raises(ValueError, match="sparse_mla: implementation='magic' must be one of"):
        sparse_mla(q, kv, idx, scale=1.0, value_dim=2, implementation="magic")


@pytest.mark.parametrize("empty", ["queries", "keys", "slots"])
def test_an_empty_axis_gives_empty_rows(empty):
    n = {"queries": 3, "keys": 4, "slots": 2} | {empty: 0}
    q, kv = jnp.ones((n["queries"], 2, 6)), jnp.ones((n["keys"], 6))
    idx = jnp.zeros((n["queries"], n["slots"]), jnp.int32)

    out, lse = sparse_mla(q, kv, idx, scale=1.0, value_dim=5)

    assert out.shape == (n["queries"], 2, 5)
    assert not np.any(out)
    assert np.all(lse == -np.inf)
