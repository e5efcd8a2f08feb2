import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, paged_mla
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_mla import pallas_tpu

FLOAT32_TOL = 1e-5
BF16_TOL = 6e-3  # relative Frobenius error: weights and output are rounded to bfloat16
SCALE = 0.2
attend = jax.jit(paged_mla, static_argnames=("scale", "implementation"))


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def draw(rng, batch, n_slots, n_rows=70, heads=3, dims=(40, 8), dtype=jnp.float32):
    q = jnp.asarray(rng.normal(size=(*batch, heads, sum(dims))), dtype)
    latent, rope = (jnp.asarray(rng.normal(size=(n_rows, d)), dtype) for d in dims)
    rows = rng.integers(-2, n_rows + 2, size=(*batch, n_slots)).astype(np.int32)
    return q, latent, rope, rows


def check(arrays, tol, **options):
    q, latent, rope, rows = arrays
    run = functools.partial(attend, rows_TK=jnp.asarray(rows), scale=SCALE, **options)
    out, lse = run(q, latent, rope, implementation="pallas_tpu")
    want, want_lse = run(q, latent, rope, implementation="reference")
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    some = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[some], np.asarray(want_lse)[some], atol=1e-4)
    out, want = (np.asarray(x, np.float64) for x in (out, want))
    assert np.linalg.norm(out - want) < tol * np.linalg.norm(want)
    return out


@pytest.mark.parametrize(("batch", "n_slots"), [((5,), 1), ((2, 3), 40), ((3, 1), 130)])
def test_output_equals_the_definition(rng, on_tpu, batch, n_slots):
    check(draw(rng, batch, n_slots), FLOAT32_TOL)


def test_the_released_widths_in_bfloat16(rng, on_tpu):
    q, *rest = draw(rng, (3,), 100, 500, 16, (512, 64), jnp.bfloat16)
    check((0.3 * q, *rest), BF16_TOL)


def test_a_quantised_cache(rng, on_tpu):
    q, latent, rope, rows = draw(rng, (3,), 50, 90, 4, (256, 32), jnp.bfloat16)
    latent, scale = fp8.quantize(latent.astype(jnp.float32))
    check((q, latent, rope, rows), BF16_TOL, latent_scale_NG=scale)


def test_blocks_of_queries_are_apart_and_unlisted_rows_are_not_read(rng, on_tpu, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "MAX_BLOCK_BYTES", 2 * 64 * 128 * 4)  # two queries
    q, latent, rope, rows = draw(rng, (5,), 50)
    rows[3] = -1
    rows[rows == 7] = 8
    out = check((q, latent.at[7].set(jnp.nan), rope, rows), FLOAT32_TOL)
    assert not np.any(out[3])


def test_what_it_does_not_take_is_said(rng):
    q, latent, rope, rows = draw(rng, (2,), 4, dtype=jnp.float16)
    with pytest.raises(NotImplementedError, match="takes bfloat16 or float32"):
        pallas_tpu.check(q, latent, rope, rows, scale=SCALE, latent_scale_NG=None)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_queries", "heads"), [(128, 128), (8, 8)])
@pytest.mark.parametrize("quantised", [False, True])
def test_it_compiles_at_the_released_widths(compile_for_tpu, n_queries, heads, quantised):
    n_rows = 2**20
    shapes = (n_queries, heads, 576), (n_rows, 512), (n_rows, 64)
    q, latent, rope = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    scale = jax.ShapeDtypeStruct((n_rows, 4), jnp.float32)
    if quantised:
        latent = jax.ShapeDtypeStruct(latent.shape, jnp.float8_e4m3fn)
    rows = jax.ShapeDtypeStruct((n_queries, 2048), jnp.int32)

    def run(q, latent, rope, rows, scale):
        scale = scale if quantised else None
        return pallas_tpu.paged_mla(q, latent, rope, scale, rows, SCALE)

    compiled = compile_for_tpu(run, q, latent, rope, rows, scale)

    # No copy of the cache: only gathered rows, a block of queries at a time, and few such arrays.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 2**30
