import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fixed_point


def test_counts_of_either_sign_and_any_size_keep_their_bits():
    sums = np.array([0, 5, -5, -1000, 2**31 - 1, -(2**31), 2**33 + 2**31, 2**40 + 1, -(2**61)])
    words = jnp.asarray(sums[:, None].view(np.int32).reshape(1, -1, 2))

    found = fixed_point.to_float32(words, jnp.full((1,), 4.0))

    np.testing.assert_allclose(found[0], sums / 4.0, rtol=1e-6)


@pytest.mark.parametrize("bound", [1e-30, 0.7, 1.0, 3.0, 1e20])
def test_the_bound_fits_and_uses_most_of_int64(bound):
    (counts,) = fixed_point.counts_per_one(jnp.float32(bound))
    assert bound * float(counts) < 2**62
    assert float(counts) == 2.0**120 or bound * float(counts) >= 2**60


@pytest.mark.parametrize("bound", [np.inf, np.nan])
def test_a_bound_that_is_not_finite_is_not_hidden(bound):
    assert jnp.isnan(fixed_point.counts_per_one(jnp.float32(bound)))[0]
