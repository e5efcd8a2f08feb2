import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsv32_jax import indexer, rope

FLOAT32_TOL = 2e-5  # two projections and a norm of values ~1


def cos_sin(cfg, n):
    positions = jnp.tile(jnp.arange(n), (2, 1))
    return rope.rotation(cfg.rope, cfg.mla.rope_dim, positions)


def rotate(x, angles):
    """Turn the pairs (i, i + R/2) of the last axis, R twice the number of angles, as complex numbers."""
    half = angles.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def walsh(dim):
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])


def oracle(module, cfg, x, qr):
    """Compute q, k and w in float64."""
    weights = [
        np.asarray(w[...], np.float64) for w in (module.wq_b, module.wk, module.weights_proj)
    ]
    gain, bias = (
        np.asarray(w[...], np.float64) for w in (module.k_norm.weight, module.k_norm.bias)
    )
    angles = np.arange(x.shape[1])[:, None] * rope.inverse_frequencies(cfg.rope, cfg.mla.rope_dim)
    q = np.einsum("btq,qjx->btjx", qr, weights[0])
    k = x @ weights[1]
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6) * gain + bias
    dim, heads = cfg.indexer.head_dim, cfg.indexer.n_heads
    q, k = rotate(q, angles[:, None]), rotate(k, angles)
    if cfg.indexer.hadamard:
        q, k = (a @ walsh(dim) / np.sqrt(dim) for a in (q, k))
    return q, k, x @ weights[2] / np.sqrt(heads * dim)


@pytest.fixture
def inputs(cfg, rng):
    return rng.normal(size=(2, 7, cfg.dim)), rng.normal(size=(2, 7, cfg.mla.q_lora_rank))


def run(module, cfg, x, qr, dtype=jnp.float32):
    return module(jnp.asarray(x, dtype), jnp.asarray(qr, dtype), *cos_sin(cfg, 7))


def draw(cfg, new_bias=0.3, **options):
    cfg = dataclasses.replace(cfg, indexer=dataclasses.replace(cfg.indexer, **options))
    module = indexer.Indexer(cfg, rngs=nnx.Rngs(0))
    module.k_norm.bias = nnx.Param(jnp.full(cfg.indexer.head_dim, new_bias))
    return module, cfg


@pytest.mark.parametrize("hadamard", [False, True])
def test_tensors_follow_the_published_steps(cfg, inputs, hadamard):
    module, cfg = draw(cfg, hadamard=hadamard)
    for got, expected in zip(run(module, cfg, *inputs), oracle(module, cfg, *inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=FLOAT32_TOL)


def test_hadamard_changes_no_score(cfg, inputs):
    scores = []
    for hadamard in (False, True):
        q, k, _ = run(*draw(cfg, hadamard=hadamard), *inputs)
        scores.append(jnp.einsum("btjx,bsx->btjs", q, k))
    np.testing.assert_allclose(scores[0], scores[1], atol=5 * FLOAT32_TOL)


def test_fp8_rounds_queries_and_keys_only(cfg, inputs):
    module, plain_cfg = draw(cfg)
    rounded, cfg = draw(cfg, fp8=True)
    plain, low = run(module, plain_cfg, *inputs), run(rounded, cfg, *inputs)
    np.testing.assert_array_equal(low.w, plain.w)
    for got, wide in ((low.q, plain.q), (low.k, plain.k)):
        amax = np.maximum(np.abs(wide).max(-1, keepdims=True), 1e-4)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        expected = (np.asarray(wide) / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale
        np.testing.assert_array_equal(got, expected)


def test_head_weights_stay_in_float32(cfg, inputs):
    module, cfg = draw(cfg)
    q, k, w = run(module, cfg, *inputs, dtype=jnp.bfloat16)
    assert (q.dtype, k.dtype, w.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    x, qr = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in inputs)
    np.testing.assert_allclose(w, oracle(module, cfg, x, qr)[2], atol=FLOAT32_TOL)


def test_no_gradient_leaves_through_the_inputs(cfg, inputs):
    module, cfg = draw(cfg)

    def loss(x, qr):
        return sum(jnp.sum(a**2) for a in run(module, cfg, x, qr))

    for grad in jax.grad(loss, (0, 1))(*(jnp.asarray(a, jnp.float32) for a in inputs)):
        np.testing.assert_array_equal(grad, 0.0)


def test_the_rotation_depends_on_the_position_in_the_document(cfg, inputs):
    module, cfg = draw(cfg, hadamard=False)
    x, qr = (jnp.asarray(np.broadcast_to(a[:, :1], a.shape), jnp.float32) for a in inputs)
    q, k, _ = module(x, qr, *cos_sin(cfg, 7))
    dots = np.einsum("btjx,bsx->btjs", q, k)
    rope_dim = cfg.mla.rope_dim
    np.testing.assert_allclose(dots[0, 5, :, 3], dots[0, 3, :, 1], atol=FLOAT32_TOL)
    np.testing.assert_array_equal(q[:, 1:, :, rope_dim:], q[:, :-1, :, rope_dim:])
    assert np.all(np.any(np.abs(q[:, 1:] - q[:, :-1])[..., :rope_dim] > 1e-3, axis=-1))
