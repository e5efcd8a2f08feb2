import math

import ml_dtypes
import numpy as np
import pytest

from dsv32_jax.convert import fp8_blocks

SHAPES = [(128, 128), (1, 1), (300, 130), (128, 257), (576, 96)]


def draw(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(0, 2, shape))).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_weight_is_multiplied_by_the_scale_of_its_block(shape):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x7F, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    q = codes.view(ml_dtypes.float8_e4m3fn)
    n_blocks = [math.ceil(n / 128) for n in shape]
    scales = rng.normal(size=n_blocks).astype(np.float32)

    got = fp8_blocks.dequantise(q, scales)

    for i, j in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0), (0, shape[1] // 2)]:
        assert got[i, j] == np.float32(q[i, j]) * scales[i // 128, j // 128]
    spread = np.kron(scales, np.ones((128, 128), np.float32))[: shape[0], : shape[1]]
    np.testing.assert_array_equal(got, q.astype(np.float32) * spread)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_is_the_smallest_power_of_two_without_overflow(shape):
    x = draw(shape)

    _, scales = fp8_blocks.quantise(x)

    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            largest = np.abs(x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max()
            assert 224 < largest / scales[i, j] <= 448
            assert math.log2(scales[i, j]).is_integer()


@pytest.mark.parametrize("exponent", [-100, -20, 0, 3, 100, 119])
def test_448_times_a_power_of_two_has_that_power_as_its_scale(exponent):
    x = np.full((1, 1), 448 * 2.0**exponent, np.float32)
    q, scales = fp8_blocks.quantise(x)
    assert (float(q[0, 0]), scales[0, 0]) == (448, 2.0**exponent)

    q, scales = fp8_blocks.quantise(np.nextafter(x, np.float32(np.inf)))
    assert (float(q[0, 0]), scales[0, 0]) == (224, 2.0 ** (exponent + 1))


def test_values_are_rounded_to_the_nearest_with_ties_to_even():
    # With 448 in the block the scale is 1; between 16 and 32 neighbours differ by 2.
    x = np.array([[448, 17, 19, 20.9, 21.1, -17]], np.float32)

    q, scales = fp8_blocks.quantise(x)

    assert scales.tolist() == [[1]]
    assert q.astype(np.float32).tolist() == [[448, 16, 20, 20, 22, -16]]


def test_a_block_of_zeros_has_scale_one():
    q, scales = fp8_blocks.quantise(np.zeros((130, 5), np.float32))

    assert not q.astype(np.float32).any()
    assert scales.tolist() == [[1], [1]]


def test_the_smallest_numbers_keep_a_normal_scale():
    q, scales = fp8_blocks.quantise(np.full((1, 1), 1e-45, np.float32))

    assert scales[0, 0] == 2.0**-126
    assert float(q[0, 0]) == 0


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_weights_that_were_fp8_come_back_exactly(extra):
    q, scales = fp8_blocks.quantise(draw((300, 200)))
    weights = fp8_blocks.dequantise(q, scales * np.float32(2**extra))
    as_bf16 = weights.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_bf16.astype(np.float32), weights)

    again = fp8_blocks.dequantise(*fp8_blocks.quantise(as_bf16.astype(np.float32)))

    np.testing.assert_array_equal(again, weights)


@pytest.mark.parametrize(
    ("code", "is_nan"), [(0x7F, True), (0xFF, True), (0x7E, False), (0xFE, False), (0, False)]
)
def test_both_nans_are_found(code, is_nan):
    q = np.zeros((3, 3), np.uint8)
    q[1, 2] = code

    assert fp8_blocks.has_nan(q.view(ml_dtypes.float8_e4m3fn)) == is_nan
