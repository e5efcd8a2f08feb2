import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_mla import layout

N = 20
FORMATS = [
    layout.Format(512, 64, "bfloat16"),
    layout.Format(512, 64, "bfloat16", quantised=True),
    layout.Format(40, 8, "float32"),
    layout.Format(48, 130, "bfloat16", quantised=True),
    layout.Format(130, 8, "float16"),
]


def draw(rng, row, n=N):
    return [jnp.asarray(rng.normal(size=(n, d)), row.dtype) for d in (row.latent_dim, row.rope_dim)]


@pytest.mark.parametrize("row", FORMATS)
@pytest.mark.parametrize("empty", [layout.empty_parts, layout.empty_records])
def test_what_is_written_is_read(rng, row, empty):
    latent, rope = draw(rng, row)
    order = rng.permutation(N).astype(np.int32)
    cache = layout.write(empty(N, row), jnp.asarray(order), latent, rope)
    want = fp8.dequantize(*fp8.quantize(latent)).astype(row.dtype) if row.quantised else latent

    got = layout.read(cache, jnp.asarray(order[:6].reshape(2, 3)))

    for read, given in zip(got, (want, rope), strict=True):
        assert read.dtype == given.dtype
        np.testing.assert_array_equal(read, given[:6].reshape(2, 3, -1))
    assert cache.format == row
    assert cache.n_rows == N


@pytest.mark.parametrize("row", FORMATS[:2])
@pytest.mark.parametrize("empty", [layout.empty_parts, layout.empty_records])
def test_rows_outside_are_not_written_and_read_as_zeros(rng, row, empty):
    latent, rope = draw(rng, row)
    cache = layout.write(empty(N, row), jnp.arange(N), latent, rope)
    rows = jnp.asarray([-1, 3], jnp.int32)
    after = layout.write(cache, rows, latent[:2], rope[:2])

    for new, old in zip(*(layout.read(c, jnp.arange(N)) for c in (after, cache)), strict=True):
        changed = np.flatnonzero(np.any(np.asarray(new != old), axis=1))
        np.testing.assert_array_equal(changed, [3])
    for part in layout.read(cache, jnp.asarray([-1, N, 10**6])):
        assert not np.any(part)


def test_a_bfloat16_record_is_three_lines_of_two_tiles_each(rng):
    row = FORMATS[0]
    latent, rope = draw(rng, row)
    cache = layout.write(layout.empty_records(N, row), jnp.arange(N), latent, rope)

    values = np.zeros((N, 6, 128), np.uint16)
    values[:, :4] = np.asarray(latent).view(np.uint16).reshape(N, 4, 128)
    values[:, 4, :64] = np.asarray(rope).view(np.uint16)
    halves = values.reshape(N, 3, 2, 128).astype(np.uint32)
    want = halves[:, :, 0] | halves[:, :, 1] << 16
    np.testing.assert_array_equal(np.asarray(cache.words).view(np.uint32), want.reshape(-1, 128))


def test_a_quantised_record_is_a_line_of_codes_and_one_of_the_rope_key_and_the_scales(rng):
    row = FORMATS[1]
    latent, rope = draw(rng, row)
    cache = layout.write(layout.empty_records(N, row), jnp.arange(N), latent, rope)
    codes, scales = fp8.quantize(latent)

    words = np.asarray(cache.words).reshape(N, 2, 128)
    found = words[:, 0].view(np.uint8).reshape(N, 128, 4).swapaxes(1, 2)
    np.testing.assert_array_equal(found.reshape(N, 512), np.asarray(codes).view(np.uint8))
    low, high = (words[:, 1].view(np.uint16).reshape(N, 128, 2)[..., i] for i in range(2))
    np.testing.assert_array_equal(low[:, :64], np.asarray(rope).view(np.uint16))
    exponents = np.asarray(scales).view(np.uint32) >> 16  # a power of two has no more bits
    np.testing.assert_array_equal(high[:, :4], exponents)


@pytest.mark.parametrize(("row", "size"), [*zip(FORMATS, (1536, 1024, 1024), strict=False)])
def test_the_bytes_of_a_record(row, size):
    words = layout.empty_records(N, row).words
    assert words.size * words.dtype.itemsize == N * size
