import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import padding


@pytest.mark.parametrize(("value_dim", "dim"), [(3, 5), (4, 4), (4, 6), (1, 3)])
def test_products_of_spread_rows_are_the_rows_and_gathering_undoes_it(rng, value_dim, dim):
    q, k = (jnp.asarray(rng.normal(size=(n, dim))) for n in (2, 7))

    wide_q, wide_k = (padding.spread(x, value_dim, (4, 2)) for x in (q, k))

    assert wide_q.shape == (2, 6)
    np.testing.assert_allclose(wide_q @ wide_k.T, q @ k.T, rtol=1e-6)
    np.testing.assert_array_equal(wide_q[:, :value_dim], q[:, :value_dim])
    np.testing.assert_array_equal(padding.gather(wide_q, value_dim, dim, (4, 2)), q)


def test_rows_that_fit_are_not_copied(rng):
    x = jnp.asarray(rng.normal(size=(2, 6)))
    assert padding.spread(x, 4, (4, 2)) is padding.pad_columns(x, 6) is x


def test_gradients_of_padded_columns_are_dropped(rng):
    x = jnp.asarray(rng.normal(size=(2, 3)))
    got = jax.grad(lambda x: jnp.sum(padding.pad_columns(x, 8) ** 2))(x)
    np.testing.assert_allclose(got, 2 * x)


def test_the_least_width_that_fits_is_taken():
    assert [padding.least(n, (64, 128), "dims") for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
    with pytest.raises(NotImplementedError, match="takes up to 128 dims, got 129"):
        padding.least(129, (64, 128), "dims")
