import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import pallas_gpu_score_gradients

TOL = 4e-3  # relative; cotangents are rounded to bfloat16 before they multiply, dq after too
USUAL = (65, 705)  # of the tests that are about something else: compiled once

kernel = jax.jit(pallas_gpu_score_gradients.score_gradients)


def oracle(q, k, w, d):
    """Differentiate the definition by hand, in float32 with NumPy."""
    q, k, w, d = (np.asarray(x, np.float32) for x in (q, k, w, d))
    dots_tjs = q @ np.swapaxes(k, -1, -2)[..., None, :, :]
    d_dots_tjs = np.where(dots_tjs > 0, d[..., None, :] * w[..., None], np.float32(0))
    dq = d_dots_tjs @ k[..., None, :, :]
    dk = np.einsum("...tjs,...tjx->...sx", d_dots_tjs, q, optimize=True)
    dw = np.sum(np.maximum(dots_tjs, 0) * d[..., None, :], axis=-1)
    return dq, dk, dw


def draw(rng, n_queries, n_keys, heads=64, dim=128, batch=()):
    """Return operands, a cotangent that is 0 outside the bounds, and the bounds; half of the rows are empty."""
    shapes = ((n_queries, heads, dim), (n_keys, dim), (n_queries, heads), (n_queries, n_keys))
    q, k, w, d = (rng.normal(size=(*batch, *s)) for s in shapes)
    start, end = (rng.integers(0, n_keys + 1, (*batch, n_queries)) for _ in range(2))
    s = np.arange(n_keys)
    d = np.where((s >= start[..., None]) & (s < end[..., None]), d, 0.0)
    return (
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(k, jnp.bfloat16),
        jnp.asarray(w / np.sqrt(heads * dim), jnp.float32),
        jnp.asarray(d, jnp.float32),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(end, jnp.int32),
    )


def assert_close(out, expected):
    for a, b in zip(out, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= TOL * np.linalg.norm(b)


# Regular, then irregular: one query, odd sizes, fewer keys than a stage, long rows.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n_queries", "n_keys"), [(64, 512), (1, 64), (65, 705), (7, 3), (9, 8320)]
)
def test_gradients_equal_the_definition(rng, n_queries, n_keys):
    arrays = draw(rng, n_queries, n_keys)

    assert_close(kernel(*arrays), oracle(*arrays[:4]))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (16, 128)])
def test_fewer_heads_or_channels(rng, heads, dim):
    arrays = draw(rng, 37, 321, heads, dim)

    assert_close(kernel(*arrays), oracle(*arrays[:4]))


@pytest.mark.gpu
def test_leading_batch_axes_are_separate_sequences(rng):
    arrays = draw(rng, 13, 200, batch=(2, 3))

    assert_close(kernel(*arrays), oracle(*arrays[:4]))


@pytest.mark.gpu
def test_all_empty_rows_give_zero_gradients(rng):
    q, k, w, d, start, _ = draw(rng, *USUAL)

    for gradient in kernel(q, k, w, jnp.zeros_like(d), start, start):
        assert np.all(np.asarray(gradient, np.float32) == 0)


@pytest.mark.gpu
def test_twenty_launches_are_bitwise_equal(rng):
    arrays = draw(rng, *USUAL)
    first = kernel(*arrays)

    for _ in range(20):
        again = kernel(*arrays)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(("n_queries", "n_keys"), [(64, 512), (1, 3), (65, 705)])
def test_the_kernels_lower_without_a_gpu(rng, n_queries, n_keys):
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(rng, n_queries, n_keys, batch=(2,))
    ]

    text = kernel.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    assert text.count("mosaic_gpu_v2") == 2


def test_key_spans_hold_every_query_that_sees_the_block():
    query_spans = jnp.asarray([[[0, 2], [0, 0], [1, 3], [2, 3]]], jnp.int32)

    spans = pallas_gpu_score_gradients.key_spans(query_spans, 4)

    np.testing.assert_array_equal(spans, [[[0, 1], [0, 3], [2, 4], [0, 0]]])
