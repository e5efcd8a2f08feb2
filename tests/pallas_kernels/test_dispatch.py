import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch


def test_the_first_implementation_is_the_default():
    assert dispatch.choose("op", None, ("fast", "slow")) == "fast"


def test_a_named_implementation_is_taken():
    assert dispatch.choose("op", "slow", ("fast", "slow")) == "slow"


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"op: implementation='none' must be one of \('fast', 'slow'\)"
    ):
        dispatch.choose("op", "none", ("fast", "slow"))


@pytest.mark.parametrize("n_batch_axes", [0, 1, 2])
def test_over_batch_maps_every_leading_axis(n_batch_axes):
    x = np.arange(2.0 * 3 * 4).reshape(2, 3, 4)[(0,) * (2 - n_batch_axes)]

    out = dispatch.over_batch(lambda row: row - jnp.max(row), n_batch_axes)(x)

    np.testing.assert_array_equal(out, x - x.max(-1, keepdims=True))


def test_an_option_below_its_minimum_is_refused():
    dispatch.check_keyword("op", "k", 1, 1)
    with pytest.raises(ValueError, match="op: k=0 must be at least 1"):
        dispatch.check_keyword("op", "k", 0, 1)


def test_a_causal_promise_needs_equal_lengths():
    dispatch.check_causal("op", True, 4, 4)
    dispatch.check_causal("op", False, 4, 5)
    with pytest.raises(
        ValueError, match="op: causal=True needs as many queries as keys, got 4 and 5"
    ):
        dispatch.check_causal("op", True, 4, 5)
