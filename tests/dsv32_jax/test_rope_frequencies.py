import numpy as np
import pytest

from dsv32_jax import rope
from dsv32_jax.config import YarnConfig


@pytest.mark.parametrize(
    ("theta", "dim", "i", "frequency"),
    [
        (10000.0, 64, 5, 0.23713736236095428),
        (10000.0, 64, 27, 0.00042169648804701865),
        (500000.0, 32, 12, 5.3182957344688475e-05),
    ],
)
def test_frequencies_are_the_references_to_the_last_bit(theta, dim, i, frequency):
    # Values of transformers with torch on a CPU, at places where NumPy's float32 power is an ulp off.
    got = rope.inverse_frequencies(YarnConfig(theta=theta, factor=1.0), dim)

    assert got.dtype == np.float32
    assert got[i] == np.float32(frequency)
