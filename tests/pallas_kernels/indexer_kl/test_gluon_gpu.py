import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.indexer_kl import gluon_gpu

SCALE = 576**-0.5
KL_TOL = 1e-5  # sums of up to 2048 terms p log(p/q) in float32
STEEP_KL_TOL = 1e-3  # the same at index scores of several hundred
GRAD_TOL = 6e-3  # relative norm; u and the gradients are rounded to 8 bits
GRAD_FLOOR = 1e-6  # an element's error where softmax equals target and float32 leaves 1e-7 of it
DW_TOL = 1e-4  # relative norm; all in float32

gpu = pytest.mark.gpu


def draw(
    rng, n_queries, n_keys, n_slots, *, heads=128, index_heads=64, dim=128, attn_dim=576, bad=0.0
):
    """Draw bf16 q, k, float32 w, bf16 attention q and kv, and distinct keys, a share `bad` of them invalid."""
    shapes = ((n_queries, index_heads, dim), (n_keys, dim), (n_queries, index_heads))
    shapes += ((n_queries, heads, attn_dim), (n_keys, attn_dim))
    dtypes = [jnp.float32 if i == 2 else jnp.bfloat16 for i in range(5)]
    arrays = [jnp.asarray(rng.normal(size=s), d) for s, d in zip(shapes, dtypes, strict=True)]
    arrays[2] /= (index_heads * dim) ** 0.5
    idx = np.full((n_queries, n_slots), -1, np.int32)
    for row in idx:
        row[:n_keys] = rng.permutation(n_keys)[:n_slots]
    invalid = rng.uniform(size=idx.shape) < bad
    idx[invalid] = rng.choice([-1, -7, n_keys, 2**31 - 1], np.sum(invalid))
    return arrays, idx


def oracle(arrays, lse, idx, d_kl):
    """Compute lse where it is None, KL, dq, dk and dw row by row: logits in float32, the rest in float64."""
    q, k, w = (np.asarray(a, np.float64) for a in arrays[:3])
    attn_q, kv = (np.asarray(a, np.float32) for a in arrays[3:])
    found_lse = np.full(attn_q.shape[:2], -np.inf, np.float32)
    kl, dq, dk, dw = np.zeros(len(q)), np.zeros(q.shape), np.zeros(k.shape), np.zeros(w.shape)
    for t, row in enumerate(idx):
        keys = row[(row >= 0) & (row < len(k))]
        if not len(keys):
            continue
        logits = SCALE * (attn_q[t] @ kv[keys].T).astype(np.float64)
        peak = logits.max(1)
        found_lse[t] = peak + np.log(np.exp(logits - peak[:, None]).sum(1))
        p = np.exp(logits - (found_lse if lse is None else lse)[t][:, None]).sum(0)
        p /= p.sum()
        dots = k[keys] @ q[t].T
        scores = np.maximum(dots, 0) @ w[t]
        log_softmax = scores - scores.max()
        log_softmax -= np.log(np.exp(log_softmax).sum())
        kl[t] = np.sum(p * (np.log(p) - log_softmax))
        g = (np.exp(log_softmax) - p) * d_kl[t]
        dw[t] = g @ np.maximum(dots, 0)
        u = g[:, None] * w[t] * (dots > 0)
        dq[t] = u.T @ k[keys]
        np.add.at(dk, keys, u @ q[t])
    return found_lse if lse is None else lse, kl, dq, dk, dw


@functools.partial(jax.jit, static_argnums=(4, 5))
def loss_and_gradients(arrays, lse, idx, d_kl, deterministic, rows_per_call):
    del rows_per_call  # read by kl_rows; it is here to be part of the jit's key
    kl, residuals = gluon_gpu.kl_rows(*arrays, lse, idx, scale=SCALE)
    return kl, *gluon_gpu.gradients(residuals, d_kl, deterministic=deterministic)


def run(arrays, lse, idx, d_kl, *, deterministic=False):
    options = (deterministic, gluon_gpu.ROWS_PER_CALL)
    out = loss_and_gradients(arrays, lse, jnp.asarray(idx), d_kl, *options)
    return [np.asarray(x, np.float32) for x in out]


def check_run(rng, arrays, idx, *, lse=None, kl_tol=KL_TOL, told=None):
    """Compare both modes with the oracle, which is `told` other arrays if some that are not listed are not finite."""
    d_kl = np.asarray(rng.normal(size=len(idx)), np.float32)
    lse, *expected = oracle(told or arrays, lse, idx, d_kl)
    for deterministic in (False, True):
        found = run(arrays, lse, idx, d_kl, deterministic=deterministic)
        assert_near(found, expected, kl_tol)
    return found


def assert_near(found, expected, kl_tol):
    kl, *gradients = expected
    np.testing.assert_allclose(found[0], kl, atol=kl_tol, rtol=1e-5)
    tolerances = (GRAD_TOL, GRAD_TOL, DW_TOL)
    for name, a, b, tol in zip(("dq", "dk", "dw"), found[1:], gradients, tolerances, strict=True):
        assert np.isfinite(a).all(), name
        limit = tol * np.linalg.norm(b) + GRAD_FLOOR * b.size**0.5
        assert np.linalg.norm(a - b) <= limit, name


# Regular, then irregular: one token, odd sizes, more slots than keys, few heads.
@gpu
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((20, 4096, 2048), {}),
        ((65, 3000, 120), {}),
        ((1, 300, 100), {}),
        ((20, 705, 705), {}),
        ((9, 95, 2048), {}),
        ((20, 600, 100), {"heads": 16, "index_heads": 4}),
        ((20, 600, 100), {"heads": 80, "index_heads": 20, "dim": 64}),
        ((5, 70, 1), {"heads": 1, "index_heads": 1}),
        ((20, 600, 100), {"heads": 8, "index_heads": 8, "dim": 64, "attn_dim": 160}),
    ],
)
def test_loss_and_gradients_are_the_definition(rng, sizes, options):
    check_run(rng, *draw(rng, *sizes, **options))


@gpu
def test_slots_without_a_key_count_for_nothing(rng):
    arrays, idx = draw(rng, 20, 4096, 2048, bad=0.3)
    idx[0], idx[1, 7:], idx[2, :1990], idx[3], idx[4, 5] = -1, -1, -1, idx[3, 0], idx[4, 6]
    idx[5, ::2], idx[19] = 4096, 2**31 - 1
    kl, dq, _, dw = check_run(rng, arrays, idx)
    for t in (0, 19):
        assert kl[t] == 0
        assert not dq[t].any()
        assert not dw[t].any()


@gpu
def test_no_rows_at_all_and_no_keys_listed(rng):
    arrays, idx = draw(rng, 65, 3000, 120)
    for a in check_run(rng, arrays, np.full_like(idx, -1)):
        assert not a.any()
    arrays, idx = draw(rng, 0, 70, 100)
    kl, *_ = run(arrays, np.zeros((0, 128), np.float32), idx, np.zeros(0, np.float32))
    assert kl.shape == (0,)


@gpu
def test_keys_that_are_not_listed_are_not_read(rng):
    told, idx = draw(rng, 65, 3000, 120)
    idx[idx == 0] = 1
    arrays = list(told)
    arrays[1], arrays[4] = told[1].at[0].set(jnp.nan), told[4].at[0].set(jnp.nan)
    check_run(rng, arrays, idx, told=told)


@gpu
def test_a_listed_nan_shows_in_its_row_only(rng):
    arrays, idx = draw(rng, 65, 3000, 120)
    idx[idx == 7] = 8
    lse, *_ = oracle(arrays, None, idx, np.ones(65))
    idx[1, 5] = 7
    arrays[1] = arrays[1].at[7].set(jnp.nan)
    kl, *_ = run(arrays, lse, idx, np.ones(65, np.float32))
    np.testing.assert_array_equal(np.isnan(kl), np.arange(65) == 1)


@gpu
def test_steep_scores_stay_near(rng):
    arrays, idx = draw(rng, 65, 3000, 120)
    arrays[2] *= 100.0
    check_run(rng, arrays, idx, kl_tol=STEEP_KL_TOL)


@gpu
def test_each_head_counts_by_its_share_of_the_given_denominator(rng):
    arrays, idx = draw(rng, 65, 3000, 120)
    lse, *_ = oracle(arrays, None, idx, np.ones(65))
    lse[:, 3] += np.log(400.0)  # this head keeps 1 / 400 of its weight inside the set
    lse[:, 100] -= np.log(50.0)
    check_run(rng, arrays, idx, lse=lse)


@gpu
def test_all_queries_may_list_the_same_keys(rng):
    arrays, idx = draw(rng, 300, 3000, 120)
    check_run(rng, arrays, np.broadcast_to(idx[:1], idx.shape))


@gpu
def test_twenty_runs_are_equal(rng):
    arrays, idx = draw(rng, 300, 3000, 120)
    lse = np.full((300, 128), 6.0, np.float32)
    d_kl = np.asarray(rng.normal(size=300), np.float32)
    free = run(arrays, lse, idx, d_kl)
    fixed = run(arrays, lse, idx, d_kl, deterministic=True)
    for i in range(20):
        again = run(arrays, lse, idx, d_kl, deterministic=i % 2 == 0)
        for name, a, b in zip(("kl", "dq", "dk", "dw"), again, fixed, strict=True):
            if name != "dk" or i % 2 == 0:
                np.testing.assert_array_equal(a, b, err_msg=name)
    # Both round to bf16 in the end: a last bit may differ.
    np.testing.assert_allclose(free[2], fixed[2], rtol=2**-7, atol=1e-7)


@gpu
def test_blocks_of_rows_change_nothing(rng, monkeypatch):
    arrays, idx = draw(rng, 65, 3000, 120)
    lse, d_kl = np.full((65, 128), 6.0, np.float32), np.ones(65, np.float32)
    whole = run(arrays, lse, idx, d_kl, deterministic=True)
    # Three blocks of 22 rows, one of them past the end.
    monkeypatch.setattr(gluon_gpu, "ROWS_PER_CALL", 30)
    for a, b in zip(run(arrays, lse, idx, d_kl, deterministic=True), whole, strict=True):
        np.testing.assert_array_equal(a, b)


@gpu
def test_rows_beyond_two_gib_are_reached(rng):
    n_rows = 29_200  # of 128 x 576 elements: more than 2**31
    arrays, idx = draw(rng, 65, 3000, 120)
    lse, d_kl = np.full((65, 128), 6.0, np.float32), np.ones(65, np.float32)
    expected = run(arrays, lse, idx, d_kl)
    many = [
        a if i in (1, 4) else jnp.zeros((n_rows, *a.shape[1:]), a.dtype)
        for i, a in enumerate(arrays)
    ]
    for i in (0, 2, 3):
        many[i] = many[i].at[-65:].set(arrays[i])
    pad = ((n_rows - 65, 0), (0, 0))
    found = run(many, np.pad(lse, pad), np.pad(idx, pad, constant_values=-1), np.pad(d_kl, pad[0]))
    for name, a, b in zip(("kl", "dq", "dk", "dw"), found, expected, strict=True):
        if name == "dk":
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-7)
        else:
            np.testing.assert_array_equal(a[-65:], b)
            assert not a[:-65].any()


# What needs no GPU.


def test_a_row_ends_at_its_last_key():
    idx = jnp.array([[1, -1, 9], [-1, -1, -1], [0, 4, -1]])
    np.testing.assert_array_equal(gluon_gpu.used_lengths(idx, 5), [1, 0, 2])


@pytest.mark.parametrize(("n_slots", "padded"), [(1, 128), (128, 128), (705, 1024), (2048, 2048)])
def test_slots_are_padded_to_a_power_of_two(n_slots, padded):
    assert gluon_gpu.padded_slots(n_slots) == padded


@pytest.mark.parametrize("d_kl", [1e-30, 1e-6, 1.0, 1e20])
def test_no_sum_leaves_int64(d_kl):
    q, w = jnp.full((7, 3, 64), 3.0, jnp.bfloat16), jnp.full((7, 3), -2.0)
    (grid,) = gluon_gpu.integer_grid(q, w, jnp.full((7,), d_kl))
    bound = 7 * 2 * 3 * 6.0 * d_kl
    assert bound * float(grid) < 2**62
    assert float(grid) == 2.0**120 or bound * float(grid) > 2**59


def test_a_cotangent_that_is_not_finite_is_not_hidden():
    q, w = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.ones((2, 3))
    assert jnp.isnan(gluon_gpu.integer_grid(q, w, jnp.array([1.0, jnp.inf])))[0]


@pytest.mark.parametrize(
    ("index_shape", "attn_shape", "n_slots", "dtype", "message"),
    [
        ((2, 64, 128), (2, 128, 576), 64, jnp.float32, "must be bfloat16"),
        ((2, 65, 128), (2, 128, 576), 64, jnp.bfloat16, "got 65 of 128"),
        ((2, 64, 32), (2, 128, 576), 64, jnp.bfloat16, "got 64 of 32"),
        ((2, 64, 128), (2, 192, 576), 64, jnp.bfloat16, "got 192 of 576"),
        ((2, 64, 128), (2, 128, 640), 64, jnp.bfloat16, "got 128 of 640"),
        ((2, 64, 128), (2, 128, 576), 4097, jnp.bfloat16, "got 4097"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(
    monkeypatch, index_shape, attn_shape, n_slots, dtype, message
):
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    arrays = jnp.zeros(index_shape, dtype), jnp.zeros(attn_shape, dtype)
    with pytest.raises(NotImplementedError, match=message):
        gluon_gpu.check(*arrays, jnp.zeros((2, n_slots), jnp.int32))


@pytest.mark.parametrize("kernel", ["target", "loss", "gradient"])
def test_kernels_compile_without_spills_or_serialised_products(kernel, compile_for_hopper):
    from pallas_kernels.indexer_kl import gluon_gpu_rows, gluon_gpu_target

    spills, memory = 32, 232_448  # a few bytes a query, outside the loop over tiles
    if kernel == "target":
        pointers, scalars = "bf16 bf16 fp32 i32 i32 i32 fp32", "i32 i32 i32 i32 i32 fp32"
        function, constants = gluon_gpu_target.target_kernel, {}
    elif kernel == "loss":
        pointers, scalars = "bf16 bf16 fp32 i32 i32 i32 fp32 fp32 fp32", "i32 i32 i32 i32"
        function, constants = gluon_gpu_rows.loss_kernel, {"X": 128, "SLOTS": 2048}
        spills, memory = 0, 233_472 // 3 - 1024  # three programs share a multiprocessor
    else:
        pointers = "bf16 bf16 fp32 i32 i32 fp32 fp32 fp32 bf16 fp32 fp32"
        function, scalars = gluon_gpu_rows.gradient_kernel, "i32 i32 i32"
        constants = {"X": 128, "SLOTS": 2048, "FIXED": False}
        spills, memory = 0, 233_472 // 2 - 1024
    compiled = compile_for_hopper(function, pointers, scalars, constants)
    assert not compiled.warnings
    assert compiled.spilled_bytes <= spills
    assert compiled.shared_bytes <= memory
