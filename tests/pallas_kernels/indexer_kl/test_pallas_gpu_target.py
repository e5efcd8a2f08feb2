import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_mla import reference as dense_reference
from pallas_kernels.indexer_kl import pallas_gpu_target

SCALE = 192**-0.5
TOL = 2e-6  # relative Frobenius error: float32 exponentials, summed over heads in float32


def definition(q, k, lse, start, end):
    allowed = dense_reference.allowed_keys(start, end, None, k.shape[0])
    logits = dense_reference.head_logits(q, k, SCALE)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0).T[..., None]
    return jnp.sum(jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0.0) - lse), 0.0), axis=0)


def draw(rng, n_queries, n_keys, heads, dim=192):
    q, k = (
        jnp.asarray(rng.normal(size=(n, heads, dim)), jnp.bfloat16) for n in (n_queries, n_keys)
    )
    end = np.minimum(np.arange(n_queries) + n_keys - n_queries + 1, n_keys)
    start = np.where(np.arange(n_queries) < n_queries // 2, 0, n_keys // 3)
    end[3] = 0  # an empty row
    start, end = (jnp.asarray(x, jnp.int32) for x in (start, end))
    allowed = dense_reference.allowed_keys(start, end, None, n_keys)
    values = jnp.zeros((n_keys, heads, 1))
    wide = (x.astype(jnp.float32) for x in (q, k))
    return q, k, dense_reference.dense_mla(*wide, values, allowed, SCALE)[1], start, end


def test_the_kernel_lowers_for_cuda_without_a_gpu():
    shape = jax.ShapeDtypeStruct
    q, k = shape((300, 4, 192), jnp.bfloat16), shape((500, 4, 192), jnp.bfloat16)
    lse, bound = shape((300, 4), jnp.float32), shape((300,), jnp.int32)
    target = jax.jit(functools.partial(pallas_gpu_target.attention_target, scale=0.1))
    text = target.trace(q, k, lse, bound, bound).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "scale", "message"),
    [
        ((8, 2, 192), jnp.float32, 0.1, "takes bfloat16, got float32"),
        ((8, 2, 200), jnp.bfloat16, 0.1, "takes up to 192 dims, got 200"),
        ((0, 2, 192), jnp.bfloat16, 0.1, "an axis of length 0"),
        ((8, 2, 192), jnp.bfloat16, 0.0, "scale=0.0 must be positive"),
    ],
)
def test_what_it_does_not_take_is_said(shape, dtype, scale, message):
    x = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu_target.check(x, x, scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "heads", "dim"),
    [(301, 1501, 3, 192), (256, 256, 128, 192), (130, 300, 8, 96)],
)
def test_the_target_agrees_with_its_definition(rng, n_queries, n_keys, heads, dim):
    q, k, *rest = draw(rng, n_queries, n_keys, heads, dim)
    target = jax.jit(functools.partial(pallas_gpu_target.attention_target, scale=SCALE))

    got = np.asarray(target(q, k, *rest), np.float64)

    with jax.default_matmul_precision("highest"):
        want = np.asarray(jax.jit(definition)(*(x.astype(jnp.float32) for x in (q, k)), *rest))
    assert np.linalg.norm(got - want) < TOL * np.linalg.norm(want)
    np.testing.assert_array_equal(got, target(q, k, *rest))
    np.testing.assert_allclose(got.sum(axis=1)[4:], heads, rtol=1e-4)
    assert not np.any(got[3])
