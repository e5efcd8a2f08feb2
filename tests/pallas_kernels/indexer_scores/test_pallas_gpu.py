import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.indexer_scores import pallas_gpu

BF16_TOL = 1e-6  # relative; exact products, float32 sums in another order
FP8_TOL = 2e-4  # relative; Hopper's tensor cores keep about 14 bits of a sum of e4m3 products


@functools.partial(jax.jit, static_argnames=("fp8",))
def kernel(q, k, w, start, end, fp8=False):
    return pallas_gpu.scores(q, k, w, start, end, fp8=fp8)


def oracle(q, k, w, start, end):
    """Score in float32 with NumPy, from operands that are exact in it."""
    q, k, w, start, end = (np.asarray(x, np.float32) for x in (q, k, w, start, end))
    dots = q @ np.swapaxes(k, -1, -2)[..., None, :, :]
    scores = np.sum(np.maximum(dots, 0.0) * w[..., None], axis=-2, dtype=np.float32)
    s = np.arange(k.shape[-2])
    allowed = (s >= start[..., None]) & (s < end[..., None])
    return np.where(allowed, scores, -np.inf)


def draw(rng, n_queries, n_keys, heads=64, dim=128, batch=(), scale=1.0):
    shapes = ((n_queries, heads, dim), (n_keys, dim), (n_queries, heads))
    q, k, w = (rng.normal(size=(*batch, *s)) for s in shapes)
    return (
        jnp.asarray(q * scale, jnp.bfloat16),
        jnp.asarray(k * scale, jnp.bfloat16),
        jnp.asarray(w / np.sqrt(heads * dim), jnp.float32),
    )


def draw_bounds(rng, shape, n_keys):
    """Any start and end, so that about half of the rows are empty."""
    return [jnp.asarray(rng.integers(0, n_keys + 1, shape), jnp.int32) for _ in range(2)]


def everything(n_queries, n_keys):
    return jnp.zeros(n_queries, jnp.int32), jnp.full(n_queries, n_keys, jnp.int32)


def assert_close(out, expected, tolerance):
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(expected))
    finite = np.isfinite(expected)
    error = np.linalg.norm(out[finite] - expected[finite])
    assert error <= tolerance * np.linalg.norm(expected[finite])


def rounded(*arrays):
    """Round each row as FP8 storage with a power-of-two scale does, by NumPy."""
    out = []
    for x in arrays:
        x = np.asarray(x, np.float32)
        amax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-4))
        scale = np.exp2(np.ceil(np.log2(amax / 448)))
        out.append((x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale)
    return out


# Regular, then irregular: one query, odd sizes, fewer keys than a stage, many key splits, long rows.
SHAPES = [(64, 512), (1, 64), (65, 705), (7, 3), (9, 8320), (3, 262209)]
USUAL = (65, 705)  # of the tests that are about something else: compiled once


@pytest.mark.gpu
@pytest.mark.parametrize(("n_queries", "n_keys"), SHAPES)
def test_scores_equal_the_definition(rng, n_queries, n_keys):
    arrays = draw(rng, n_queries, n_keys)
    bounds = draw_bounds(rng, n_queries, n_keys)

    assert_close(kernel(*arrays, *bounds), oracle(*arrays, *bounds), BF16_TOL)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_queries", "n_keys"), SHAPES)
def test_fp8_scores_equal_the_definition_on_rounded_inputs(rng, n_queries, n_keys):
    q, k, w = draw(rng, n_queries, n_keys)
    bounds = draw_bounds(rng, n_queries, n_keys)

    out = kernel(q, k, w, *bounds, fp8=True)

    assert_close(out, oracle(*rounded(q, k), w, *bounds), FP8_TOL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim", "fp8"),
    [
        (1, 64, False),
        (4, 128, True),
        (8, 64, False),
        (12, 64, True),
        (16, 128, False),
        (32, 128, False),
        (64, 64, True),
    ],
)
def test_any_number_of_heads_of_64_or_128(rng, heads, dim, fp8):
    q, k, w = draw(rng, 37, 321, heads, dim)
    bounds = draw_bounds(rng, 37, 321)

    out = kernel(q, k, w, *bounds, fp8=fp8)

    q, k = rounded(q, k) if fp8 else (q, k)
    assert_close(out, oracle(q, k, w, *bounds), FP8_TOL if fp8 else BF16_TOL)


@pytest.mark.gpu
def test_leading_batch_axes_are_separate_sequences(rng):
    arrays = draw(rng, 13, 200, batch=(2, 3))
    bounds = draw_bounds(rng, (2, 3, 13), 200)

    assert_close(kernel(*arrays, *bounds), oracle(*arrays, *bounds), BF16_TOL)


@pytest.mark.gpu
def test_causal_documents_see_their_own_keys(rng, draw_ranges):
    arrays = draw(rng, *USUAL)
    start, end = (jnp.asarray(x) for x in draw_ranges(rng, USUAL[:1], USUAL[1]))

    assert_close(kernel(*arrays, start, end), oracle(*arrays, start, end), BF16_TOL)


@pytest.mark.gpu
def test_bounds_outside_the_keys_are_cut(rng):
    arrays = draw(rng, *USUAL)
    start, end = (jnp.full(USUAL[0], x, jnp.int32) for x in (-5, 1000))

    assert_close(kernel(*arrays, start, end), oracle(*arrays, start, end), BF16_TOL)


@pytest.mark.gpu
def test_empty_rows_are_all_minus_infinity(rng):
    arrays = draw(rng, *USUAL)
    end = jnp.arange(USUAL[0], dtype=jnp.int32)

    assert np.all(np.isneginf(kernel(*arrays, end, end)))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_large_inputs_accumulate_in_float32(rng, fp8):
    q, k, w = draw(rng, *USUAL, scale=1e3)
    bounds = everything(*USUAL)

    out = kernel(q, k, w, *bounds, fp8=fp8)

    q, k = rounded(q, k) if fp8 else (q, k)
    assert_close(out, oracle(q, k, w, *bounds), FP8_TOL if fp8 else BF16_TOL)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_keys_no_head_likes_score_exactly_zero(rng, fp8):
    q, k, w = draw(rng, *USUAL)
    q, k = jnp.abs(q), jnp.abs(k)
    k = k.at[::2].set(0.0).at[1::4].multiply(-1)

    out = np.asarray(kernel(q, k, w, *everything(*USUAL), fp8=fp8))

    assert np.all(out[:, ::2] == 0)
    assert np.all(out[:, 1::4] == 0)
    assert np.all(out[:, 3::4] != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_nan_spoils_its_own_row_or_column_only(rng, fp8):
    q, k, w = draw(rng, *USUAL)
    k = k.at[17, 3].set(jnp.nan)
    q = q.at[5, 2, 1].set(jnp.nan)
    w = w.at[9, 0].set(jnp.nan)

    out = np.asarray(kernel(q, k, w, *everything(*USUAL), fp8=fp8))

    assert np.all(np.isnan(out[:, 17]))
    assert np.all(np.isnan(out[[5, 9]]))
    rest = np.delete(np.delete(out, 17, axis=1), [5, 9], axis=0)
    assert np.all(np.isfinite(rest))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_twenty_launches_are_bitwise_equal(rng, fp8):
    arrays = draw(rng, *USUAL)
    bounds = draw_bounds(rng, *USUAL)
    first = kernel(*arrays, *bounds, fp8=fp8)

    for _ in range(20):
        again = kernel(*arrays, *bounds, fp8=fp8)
        np.testing.assert_array_equal(first, again)


@pytest.mark.gpu
@pytest.mark.slow
def test_scores_past_two_to_the_31_have_their_own_places(rng):
    n_queries, n_keys = 16640, 131072  # 2^31 + 33.5M scores, 8.7 GB
    q, k, w = draw(rng, n_queries, n_keys, heads=8, dim=64)
    tail = slice(n_queries - 64, None)

    bounds = everything(n_queries, n_keys)
    out = kernel(q, k, w, *bounds)[tail]

    expected = oracle(q[tail], k, w[tail], *(x[tail] for x in bounds))
    assert_close(out, expected, BF16_TOL)


@pytest.mark.parametrize(("n_queries", "n_keys"), SHAPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_kernel_lowers_without_a_gpu(n_queries, n_keys, fp8):
    shapes = [
        jax.ShapeDtypeStruct((2, *s), t)
        for s, t in (
            ((n_queries, 64, 128), jnp.bfloat16),
            ((n_keys, 128), jnp.bfloat16),
            ((n_queries, 64), jnp.float32),
            ((n_queries,), jnp.int32),
            ((n_queries,), jnp.int32),
        )
    ]

    traced = kernel.trace(*shapes, fp8=fp8)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "message"),
    [
        (65, 128, jnp.bfloat16, "65 heads x 128"),
        (64, 96, jnp.bfloat16, "64 heads x 96"),
        (64, 128, jnp.float32, "takes bfloat16"),
    ],
)
def test_other_operands_are_refused(heads, dim, dtype, message):
    q, k = jnp.zeros((2, heads, dim), dtype), jnp.zeros((4, dim), dtype)

    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu.check(q, k)


def test_registers_the_launch_does_not_have_are_refused():
    with pytest.raises(ValueError, match="math_registers=120"):
        pallas_gpu.Config(stage_keys=128, stages=3, math_registers=120)


def test_spans_cover_the_rows_that_see_keys():
    first = jnp.asarray([[0, 130, 5, 9, 64, 200]], jnp.int32)
    last = jnp.asarray([[0, 131, 5, 2, 65, 999]], jnp.int32)

    spans = pallas_gpu.stage_spans(first, last, 2, 64, 300)

    np.testing.assert_array_equal(spans, [[[2, 3], [0, 0], [1, 5]]])


@pytest.mark.parametrize(("n_blocks", "n_stages"), [(512, 64), (1, 1024), (9, 6), (1, 1), (131, 3)])
def test_splits_fill_the_chip_without_empty_parts(n_blocks, n_stages):
    splits = pallas_gpu.choose_splits(n_blocks, n_stages, 132)

    assert 1 <= splits <= n_stages
    assert n_blocks * splits <= 132 or splits == 1 or n_blocks * (splits - 1) < 2 * 132
