import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import rope
from dsv32_jax.config import YarnConfig

FLOAT32_TOL = 1e-6  # one rotation of values ~1
OFFICIAL = YarnConfig()


def test_yarn_keeps_the_fast_divides_the_slow_and_ramps_between():
    # Source: the released model's settings give low = 10, high = 23.
    theta = 10000.0 ** (-2 * np.arange(32) / 64)
    ramp = np.clip((np.arange(32) - 10) / (23 - 10), 0, 1)
    expected = theta * (1 - ramp) + theta / 40 * ramp

    out = rope.inverse_frequencies(OFFICIAL, 64)

    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(out[:11], theta[:11], rtol=1e-6)
    np.testing.assert_allclose(out[23:], theta[23:] / 40, rtol=1e-6)


def test_a_factor_of_one_is_plain_rope():
    out = rope.inverse_frequencies(YarnConfig(factor=1.0), 8)
    np.testing.assert_allclose(out, 10000.0 ** (-np.arange(4) / 4), rtol=1e-6)


def test_a_ramp_of_no_width_is_a_step():
    # 2 / (2 pi 0.35) turns lie just below index 0: both bounds of the ramp come out as 0.
    cfg = YarnConfig(original_len=2, beta_fast=0.5, beta_slow=0.35)
    theta = 10000.0 ** (-np.arange(4) / 4)
    expected = theta / [1, 40, 40, 40]
    np.testing.assert_allclose(rope.inverse_frequencies(cfg, 8), expected, rtol=1e-6)


def test_angles_are_position_times_frequency():
    positions = jnp.asarray([[0, 1, 5, 100000]])
    cos, sin = rope.rotation(OFFICIAL, 64, positions)
    freq = rope.inverse_frequencies(OFFICIAL, 64).astype(np.float64)
    angles = np.asarray(positions)[..., None] * freq
    assert cos.shape == (1, 4, 32)
    np.testing.assert_allclose(cos[0, :3], np.cos(angles)[0, :3], atol=FLOAT32_TOL)
    np.testing.assert_allclose(sin[0, :3], np.sin(angles)[0, :3], atol=FLOAT32_TOL)
    # At 1e5 radians float32 angles are 8e-3 apart.
    np.testing.assert_allclose(cos[0, 3], np.cos(angles)[0, 3], atol=8e-3)


def test_the_amplitude_multiplies_cos_and_sin():
    cfg = YarnConfig(mscale=0.0, mscale_all_dim=0.0)
    cos, sin = rope.rotation(cfg, 8, jnp.asarray([0, 3]))
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * np.log(40) + 1) ** 2, rtol=1e-6)


@pytest.fixture
def angles():
    return np.random.default_rng(0).uniform(-3, 3, size=(5, 4))


def test_interleaved_pairs_are_neighbours(rng, angles):
    x = rng.normal(size=(5, 8)).astype(np.float32)
    expected = np.zeros((5, 8))
    for t in range(5):
        for i in range(4):
            turned = (x[t, 2 * i] + 1j * x[t, 2 * i + 1]) * np.exp(1j * angles[t, i])
            expected[t, 2 * i], expected[t, 2 * i + 1] = turned.real, turned.imag

    out = rope.rotate_interleaved(
        jnp.asarray(x), jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    )

    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL)


def test_half_split_pairs_are_half_the_width_apart(rng, angles):
    x = rng.normal(size=(5, 8)).astype(np.float32)
    expected = np.zeros((5, 8))
    for t in range(5):
        for i in range(4):
            turned = (x[t, i] + 1j * x[t, i + 4]) * np.exp(1j * angles[t, i])
            expected[t, i], expected[t, i + 4] = turned.real, turned.imag

    out = rope.rotate_half_split(
        jnp.asarray(x), jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    )

    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL)


@pytest.mark.parametrize("rotate", [rope.rotate_interleaved, rope.rotate_half_split])
def test_rotation_happens_in_float32_and_keeps_the_dtype(rng, rotate):
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16)
    cos, sin = rope.rotation(OFFICIAL, 8, jnp.asarray([3, 50, 4000]))

    out = rotate(x, cos, sin)

    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


@pytest.mark.parametrize("rotate", [rope.rotate_interleaved, rope.rotate_half_split])
def test_dot_products_depend_on_the_distance_only(rng, rotate):
    q, k = (jnp.asarray(rng.normal(size=8), jnp.float32) for _ in range(2))

    def dot(t, s):
        (cos_t, sin_t), (cos_s, sin_s) = (
            (c[0], n[0]) for c, n in (rope.rotation(OFFICIAL, 8, jnp.asarray([p])) for p in (t, s))
        )
        return rotate(q, cos_t, sin_t) @ rotate(k, cos_s, sin_s)

    np.testing.assert_allclose(dot(9, 4), dot(25, 20), atol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 16, 128])
def test_hadamard_is_the_walsh_matrix_in_natural_order(dim):
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])
    out = rope.hadamard(jnp.eye(dim))
    np.testing.assert_allclose(out, matrix / np.sqrt(dim), atol=1e-6)


def test_hadamard_keeps_the_dtype(rng):
    x = jnp.asarray(rng.normal(size=(2, 16)), jnp.bfloat16)
    out = rope.hadamard(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rope.hadamard(x.astype(jnp.float32)).astype(jnp.bfloat16))
