import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8 import op as fp8


def oracle(x, block):
    """Quantise block by block with exact arithmetic on exponents and ml_dtypes' rounding."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, block)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(1e-4))
    mantissa, exponent = np.frexp(amax * np.float32(1 / 448))  # mantissa in [0.5, 1)
    scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    x8 = np.clip(blocks / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return x8.reshape(x.shape), scale.astype(np.float32)


def check(x, block=128):
    x8, scale = fp8.quantize(jnp.asarray(x))
    expected_x8, expected_scale = oracle(np.asarray(x, np.float32), block)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(
        np.asarray(x8).view(np.uint8), np.asarray(expected_x8).view(np.uint8)
    )


@pytest.mark.parametrize(
    ("shape", "block"), [((3, 256), 128), ((2, 5, 128), 128), ((7, 16), 16), ((4, 1), 1)]
)
def test_quantize_equals_the_bit_level_oracle(shape, block):
    rng = np.random.default_rng()  # fresh data every run: the oracle is exact
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 6, size=(*shape[:-1], 1))
    check(x.astype(np.float32), block)


def test_every_e4m3_rounding_boundary_goes_to_even():
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    around = np.concatenate(
        [middles, np.nextafter(middles, np.float32(1e9)), np.nextafter(middles, np.float32(-1e9))]
    )
    x = np.zeros((-(-len(around) // 127), 128), np.float32)
    x[:, 0] = 448  # fixes the scale at 1
    x[:, 1:].flat[: len(around)] = around
    check(x)


def test_the_rounding_alone_does_what_the_conversion_does():
    bits = np.random.default_rng().integers(0, 2**32, size=200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x[np.abs(x) <= 448], np.linspace(-448, 448, 10_001, dtype=np.float32)])
    expected = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    np.testing.assert_array_equal(jax.jit(fp8.round_to_e4m3)(x), expected)


@pytest.mark.gpu
def test_a_compiled_program_keeps_the_rounding():
    x = np.random.default_rng().normal(size=(64, 128)).astype(np.float32)
    x8, scale = oracle(x, 128)
    expected = (x8.astype(np.float32).reshape(64, 1, 128) * scale[..., None]).reshape(x.shape)

    np.testing.assert_array_equal(jax.jit(fp8.simulate)(jnp.asarray(x)), expected)


@pytest.mark.parametrize("k", [-20, -3, 0, 1, 30])
def test_a_maximum_of_448_times_a_power_of_two_keeps_that_power(k):
    x = np.full((1, 128), 2.0**k, np.float32)
    x[0, 5] = -448 * 2.0**k
    _, scale = fp8.quantize(jnp.asarray(x))
    assert scale.tolist() == [[2.0**k]]


def test_just_above_goes_to_the_next_power():
    x = np.full((1, 128), np.nextafter(np.float32(448), np.float32(1e9)), np.float32)
    x *= np.float32(1 + 2**-22)  # past the rounding of the product with 1/448
    _, scale = fp8.quantize(jnp.asarray(x))
    assert scale.tolist() == [[2.0]]


def test_small_blocks_use_the_floor_of_the_maximum():
    # 1e-4 / 448 lies between 2^-23 and 2^-22.
    for value in (0.0, 1e-9, 1e-4):
        _, scale = fp8.quantize(jnp.full((1, 128), value))
        assert scale.tolist() == [[2.0**-22]]


def test_scales_are_one_per_block():
    x = np.ones((1, 256), np.float32)
    x[:, 128:] = 448 * 8
    _, scale = fp8.quantize(jnp.asarray(x))
    assert scale.tolist() == [[2.0**-8, 8.0]]


def test_power_of_two_ceil_rounds_up_and_keeps_powers():
    x = jnp.asarray([1.0, 1.0000001, 1.5, 2.0, 3.0, 2.0**-126, 2.0**-100 * 1.25])
    assert fp8.power_of_two_ceil(x).tolist() == [1, 2, 2, 2, 4, 2.0**-126, 2.0**-99]


def test_dequantize_multiplies_each_block_by_its_scale():
    x8 = jnp.asarray([[1.0, -2.0, 3.0, 0.5]], jnp.float8_e4m3fn)
    out = fp8.dequantize(x8, jnp.asarray([[2.0, 0.25]]))
    assert out.tolist() == [[2.0, -4.0, 0.75, 0.125]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_simulate_keeps_the_dtype_and_is_idempotent(rng, dtype):
    x = jnp.asarray(rng.normal(size=(4, 128)), dtype)

    once = fp8.simulate(x)

    assert once.dtype == dtype
    x8, scale = oracle(np.asarray(x, np.float32), 128)
    np.testing.assert_array_equal(np.asarray(once, np.float32), x8.astype(np.float32) * scale)
    np.testing.assert_array_equal(fp8.simulate(once), once)


def test_the_gradient_of_simulate_passes_straight_through(rng):
    x = jnp.asarray(rng.normal(size=(4, 128)), jnp.float32)
    d_out = jnp.asarray(rng.normal(size=(4, 128)), jnp.float32)
    (grad,) = jax.vjp(fp8.simulate, x)[1](d_out)
    np.testing.assert_array_equal(grad, d_out)


def test_a_block_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"fp8.quantize: block=128 must divide the last axis 200"):
        fp8.quantize(jnp.zeros((2, 200)))
