import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul

pytestmark = pytest.mark.gpu

BF16_TOL = (
    3e-3  # relative Frobenius error: exact products, float32 sums, one rounding to bfloat16 of 2^-9
)
K, N = (
    448,
    320,
)  # multiples of 64 that no tile of 128 or 256 divides; 7 and 5 steps wrap the 4 slots


@functools.partial(jax.jit, static_argnames="align")
def kernel(x, w, sizes, d_out, *, align):
    """Return (out, gradient by x, gradient by w)."""
    out, pull = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes, align=align, implementation="pallas_gpu"), x, w
    )
    return out, *pull(d_out)


def draw(rng, sizes, n_rows, depth=K, columns=N):
    shapes = (n_rows, depth), (len(sizes), depth, columns), (n_rows, columns)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def oracle(x, w, sizes, d_out):
    """Loop over the groups in float32, from operands that are exact in it."""
    x, w, d_out = (np.asarray(a, np.float32) for a in (x, w, d_out))
    out, d_x, d_w = np.zeros(d_out.shape), np.zeros(x.shape), np.zeros(w.shape)
    end = 0
    for group, size in enumerate(sizes):
        rows = slice(end, end + size)
        out[rows], d_x[rows] = x[rows] @ w[group], d_out[rows] @ w[group].T
        d_w[group] = x[rows].T @ d_out[rows]
        end += size
    return out, d_x, d_w


def check(rng, sizes, n_rows, align, depth=K, columns=N):
    x, w, d_out = draw(rng, sizes, n_rows, depth, columns)
    total = sum(sizes)
    x, d_out = (a.at[total:].set(jnp.nan) for a in (x, d_out))  # nothing of these rows may show
    got = kernel(x, w, jnp.asarray(sizes, jnp.int32), d_out, align=align)
    want = oracle(x, w, sizes, d_out)
    for name, a, b in zip(("out", "dx", "dw"), got, want, strict=True):
        assert a.dtype == jnp.bfloat16, name
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= BF16_TOL * np.linalg.norm(b), name
    for rows in got[:2]:
        assert np.all(np.asarray(rows[total:]) == 0)
    for group, size in enumerate(sizes):
        assert size or np.all(np.asarray(got[2][group]) == 0)
    return got


# Regular: groups of whole tiles, then uneven ones; M is 1536 everywhere, so that a kernel is compiled once an align.
SIZES = {
    128: [(384, 384, 384, 384), (128, 1024, 256, 128), (0, 640, 0, 896), (0, 0, 0, 1536)],
    64: [(64, 960, 448, 64), (192, 64, 0, 320)],
    32: [(32, 992, 416, 96), (0, 96, 32, 0)],
    8: [(8, 1000, 520, 8), (72, 0, 136, 200), (1536, 0, 0, 0), (120, 128, 136, 1152)],
}
CASES = [(sizes, align) for align, several in SIZES.items() for sizes in several]


@pytest.mark.parametrize(("sizes", "align"), CASES, ids=str)
def test_products_and_gradients_equal_a_loop_over_groups(rng, sizes, align):
    check(rng, sizes, 1536, align)


@pytest.mark.parametrize("align", [1, 4, 12])
def test_groups_that_do_not_start_at_eights(rng, align):
    check(rng, tuple(align * n for n in (5, 0, 31, 1)), 600, align)


# Corner.


def test_no_rows_in_any_group_give_zeros(rng):
    check(rng, (0, 0, 0, 0), 1536, 8)


def test_one_group(rng):
    check(rng, (1000,), 1000, 8)


@pytest.mark.parametrize("n_rows", [64, 136])
def test_fewer_rows_than_multiprocessors_have_tiles(rng, n_rows):
    check(rng, (n_rows,), n_rows, 8, 256, 256)


def test_many_small_groups(rng):
    sizes = tuple(8 * int(n) for n in rng.integers(0, 6, 256))
    check(rng, sizes, -(-sum(sizes) // 64) * 64, 8, 320, 256)


@pytest.mark.parametrize("shape", [(7168, 2048), (2048, 7168)], ids=str)
def test_the_experts_of_the_671b_model(rng, shape):
    sizes = tuple(128 * int(n) for n in rng.integers(0, 6, 8))
    check(rng, sizes, 128 * 40, 128, *shape)


def test_a_nan_stays_in_its_group(rng):
    sizes = (200, 312)
    x, w, d_out = draw(rng, sizes, 512)
    x, d_out = x.at[203, 5].set(jnp.nan), d_out.at[203, 7].set(jnp.nan)

    out, d_x, d_w = kernel(x, w, jnp.asarray(sizes, jnp.int32), d_out, align=8)

    for rows in (out, d_x):
        bad = np.any(np.isnan(np.asarray(rows, np.float32)), axis=1)
        np.testing.assert_array_equal(np.flatnonzero(bad), [203])
    assert np.all(np.isfinite(np.asarray(d_w[0], np.float32)))


# Repeatable.


@pytest.mark.parametrize("align", [8, 128])
def test_repeated_runs_are_equal_bit_for_bit(rng, align):
    sizes = (128, 1024, 256, 128)
    x, w, d_out = draw(rng, sizes, 1536)
    sizes = jnp.asarray(sizes, jnp.int32)
    first = kernel(x, w, sizes, d_out, align=align)
    for _ in range(20):
        for a, b in zip(kernel(x, w, sizes, d_out, align=align), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_group_does_not_depend_on_the_rows_around_it(rng):
    x, w, d_out = draw(rng, (0, 0), 1024)
    alone = kernel(x[:512], w, jnp.asarray((512, 0), jnp.int32), d_out[:512], align=128)
    among = kernel(x, w, jnp.asarray((512, 512), jnp.int32), d_out, align=128)
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(among[0][:512]))
    np.testing.assert_array_equal(np.asarray(alone[2][0]), np.asarray(among[2][0]))
