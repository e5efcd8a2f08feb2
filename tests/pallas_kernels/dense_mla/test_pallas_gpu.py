import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_mla import pallas_gpu, reference

pytestmark = pytest.mark.gpu

OUT_TOL = 3e-3  # relative Frobenius error: weights and output rounded to bfloat16, each 2^-9
GRAD_TOL = 6e-3  # the same after two more products of rounded factors
# out . d_out is made of the rounded output, as in every flash kernel: where one key has nearly all of the weight, the
# small dS inherits that rounding. A float64 model of these roundings gives 5.7e-3 here.
LARGE_GRAD_TOL = 8e-3
LSE_TOL = 1e-5
SCALE = 192**-0.5


def attend(q, k, v, start, end, selected):
    return pallas_gpu.dense_mla(q, k, v, scale=SCALE, start=start, end=end, selected=selected)


def expected(q, k, v, start, end, selected):
    with jax.default_matmul_precision("highest"):
        allowed = reference.allowed_keys(start, end, selected, k.shape[0])
        return reference.dense_mla(q, k, v, allowed, SCALE)


def both_ways(fn):
    """Return jitted (q, k, v, masks, cotangents) -> (out, lse, gradients)."""

    def run(q, k, v, masks, d_out, d_lse):
        (out, lse), pull = jax.vjp(lambda *x: fn(*x, *masks), q, k, v)
        d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0.0)
        return out, lse, pull((d_out.astype(out.dtype), d_lse))

    return jax.jit(run)


kernel, oracle = both_ways(attend), both_ways(expected)


# Most tests share one shape, 2049 queries and keys of 3 heads, which divides no tile; compiling is most of their time.
N = 2049


def draw(rng, batch=(), n_queries=N, n_keys=N, heads=3, dim=192, value_dim=128):
    shapes = [(n_queries, heads, dim), (n_keys, heads, dim), (n_keys, heads, value_dim)]
    arrays = [rng.normal(size=(*batch, *shape)) for shape in shapes]
    arrays.append(rng.normal(size=(*batch, n_queries, heads, value_dim)))
    d_lse = jnp.asarray(rng.normal(size=(*batch, n_queries, heads)), jnp.float32)
    return [jnp.asarray(a, jnp.bfloat16) for a in arrays], d_lse


def bounds(start, end, selected=None):
    mask = None if selected is None else jnp.asarray(selected)
    return jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32), mask


def causal(n_queries=N, n_keys=N):
    end = np.arange(n_queries) + n_keys - n_queries + 1
    return np.zeros(n_queries, int), end


def documents(*lengths):
    start = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    return start, np.arange(len(start)) + 1


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(arrays, d_lse, masks, grad_tol=GRAD_TOL, lse_tol=LSE_TOL):
    q, k, v, d_out = arrays
    out, lse, grads = kernel(q, k, v, masks, d_out, d_lse)
    full = [x.astype(jnp.float32) for x in arrays]
    want_out, want_lse, want_grads = oracle(*full[:3], masks, full[3], d_lse)
    assert relative_error(out, want_out) < OUT_TOL
    np.testing.assert_allclose(lse, want_lse, atol=lse_tol, rtol=1e-6)
    for name, got, want in zip(("dq", "dk", "dv"), grads, want_grads, strict=True):
        assert np.all(np.isfinite(np.asarray(got, np.float32))), name
        assert relative_error(got, want) < grad_tol, name
    return out, lse, grads


# Regular and irregular: odd lengths, documents, more keys than queries as in chunked prefill, any heads, a batch.


@pytest.mark.parametrize("masks", [causal(), documents(1023, 1025, 1)], ids=["causal", "documents"])
def test_output_and_gradients_agree_with_float32(rng, masks):
    check(*draw(rng), bounds(*masks))


def test_selected_keys_agree_with_float32(rng):
    selected = rng.uniform(size=(N, N)) < 0.3
    selected[7] = False
    selected[300, :290] = False
    check(*draw(rng), bounds(*causal(), selected))


def test_one_head_and_more_keys_than_queries(rng):
    check(*draw(rng, (), 301, 1501, 1), bounds(*causal(301, 1501)))


@pytest.mark.parametrize("n", [1, 5, 60])
def test_fewer_rows_than_a_tile(rng, n):
    check(*draw(rng, (), n, n, 2), bounds(*causal(n, n)))


def test_128_heads(rng):
    check(*draw(rng, (), 256, 256, 128), bounds(*causal(256, 256)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (40, 24)])
def test_other_dims(rng, dims):
    check(*draw(rng, (), 300, 300, 2, *dims), bounds(*causal(300, 300)))


@pytest.mark.parametrize("masked", [False, True])
def test_sequences_of_a_batch_are_apart(rng, masked):
    arrays, d_lse = draw(rng, (2,), 300, 300, 2, 64, 64)
    start, end = causal(300, 300)
    start = np.stack([start, np.arange(300) // 100 * 100])
    selected = rng.uniform(size=(2, 300, 300)) < 0.5 if masked else None
    masks = bounds(start, np.stack([end, end]), selected)

    out, _, grads = kernel(*arrays[:3], masks, arrays[3], d_lse)

    for i in range(2):
        one = tuple(None if m is None else m[i] for m in masks)
        q, k, v, d_out = (a[i].astype(jnp.float32) for a in arrays)
        want_out, _, want = oracle(q, k, v, one, d_out, d_lse[i])
        assert relative_error(out[i], want_out) < OUT_TOL
        for got, wanted in zip(grads, want, strict=True):
            assert relative_error(got[i], wanted) < GRAD_TOL


# Corner.


def test_empty_rows_give_zero_and_minus_infinity_and_no_gradient(rng):
    start, end = causal()
    start, end = start.copy(), end.copy()
    end[5] = 0
    end[100:180] = 0  # across a tile's edge
    start[1200:1500] = 1400  # some of these are empty
    end[1900:] = 0  # whole tiles
    arrays, d_lse = draw(rng)

    out, lse, grads = check(arrays, d_lse, bounds(start, end))

    empty = end <= start
    assert np.all(np.asarray(out, np.float32)[empty] == 0)
    assert np.all(np.isneginf(np.asarray(lse)[empty]))
    assert np.all(np.asarray(grads[0], np.float32)[empty] == 0)


def test_all_rows_empty(rng):
    (q, k, v, d_out), d_lse = draw(rng)
    zero = np.zeros(N, int)
    out, lse, grads = kernel(q, k, v, bounds(zero, zero), d_out, d_lse)
    assert not np.any(np.asarray(out, np.float32))
    assert np.all(np.isneginf(lse))
    assert not any(np.any(np.asarray(g, np.float32)) for g in grads)


def test_large_logits(rng):
    (q, *rest), d_lse = draw(rng)
    arrays = [(100 * q).astype(jnp.bfloat16), *rest]
    check(arrays, d_lse, bounds(*causal()), grad_tol=LARGE_GRAD_TOL, lse_tol=1e-3)


def test_later_keys_change_nothing(rng):
    (q, k, v, d_out), d_lse = draw(rng)
    masks = bounds(*causal())
    first = kernel(q, k, v, masks, d_out, d_lse)[:2]
    second = kernel(q, k.at[1500:].set(3.0), v.at[1500:].set(3.0), masks, d_out, d_lse)[:2]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[:1500], b[:1500])


def test_repeats_bit_for_bit(rng):
    (q, k, v, d_out), d_lse = draw(rng)
    runs = [kernel(q, k, v, bounds(*causal()), d_out, d_lse) for _ in range(20)]
    for out, lse, grads in runs[1:]:
        np.testing.assert_array_equal(out, runs[0][0])
        np.testing.assert_array_equal(lse, runs[0][1])
        for got, want in zip(grads[1:], runs[0][2][1:], strict=True):
            np.testing.assert_array_equal(got, want)
        assert relative_error(grads[0], runs[0][2][0]) < 1e-3  # dq is summed in no fixed order
