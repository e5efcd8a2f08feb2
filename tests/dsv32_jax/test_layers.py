import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv32_jax import layers

FLOAT32_TOL = 1e-5  # products and means of ~10 values of size 1


def test_rms_norm_divides_by_the_root_mean_square(rng):
    x = rng.normal(size=(2, 3, 8))
    norm = layers.RMSNorm(8, eps=1e-2)
    norm.weight = nnx.Param(jnp.arange(8.0))
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-2) * np.arange(8.0)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, atol=FLOAT32_TOL)


def test_rms_norm_answers_in_float32(rng):
    x = jnp.asarray(rng.normal(size=(2, 8)), jnp.bfloat16)
    norm = layers.RMSNorm(8, eps=1e-6)
    assert norm(x).dtype == jnp.float32
    np.testing.assert_array_equal(norm(x), norm(x.astype(jnp.float32)))


def test_layer_norm_centres_scales_and_adds_the_bias(rng):
    x = rng.normal(size=(2, 3, 8)) + 5
    norm = layers.LayerNorm(8)
    norm.weight, norm.bias = nnx.Param(jnp.arange(8.0)), nnx.Param(jnp.arange(8.0) - 3)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
    expected = scaled * np.arange(8.0) + np.arange(8.0) - 3
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, atol=FLOAT32_TOL)


def test_layer_norm_keeps_the_dtype_but_works_in_float32(rng):
    x = jnp.asarray(rng.normal(size=(2, 8)), jnp.bfloat16)
    norm = layers.LayerNorm(8)
    expected = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), expected)


def test_layer_norm_of_a_constant_is_the_bias():
    norm = layers.LayerNorm(4)
    norm.bias = nnx.Param(jnp.arange(4.0))
    np.testing.assert_array_equal(norm(jnp.full((1, 4), 7.0)), [[0, 1, 2, 3]])


def test_swiglu_is_silu_times_up_rounded_once(rng):
    gate, up = rng.normal(size=(2, 5, 6))
    out = layers.swiglu(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, atol=FLOAT32_TOL)

    low = [jnp.asarray(a, jnp.bfloat16) for a in (gate, up)]
    wide = layers.swiglu(*(a.astype(jnp.float32) for a in low))
    assert layers.swiglu(*low).dtype == jnp.bfloat16
    np.testing.assert_array_equal(layers.swiglu(*low), wide.astype(jnp.bfloat16))


def test_feed_forward_gates_w1_and_multiplies_by_w3(rng):
    ffn = layers.FeedForward(4, 6, 0.5, rngs=nnx.Rngs(0))
    x = rng.normal(size=(2, 3, 4))
    w1, w3, w2 = (np.asarray(w[...], np.float64) for w in (ffn.w1, ffn.w3, ffn.w2))
    gate = x @ w1
    expected = (gate / (1 + np.exp(-gate)) * (x @ w3)) @ w2
    np.testing.assert_allclose(ffn(jnp.asarray(x, jnp.float32)), expected, atol=FLOAT32_TOL)


def test_weights_are_float32_of_the_asked_deviation():
    weight = layers.normal(nnx.Rngs(0), (200, 300), 0.02)[...]
    assert weight.dtype == jnp.float32
    np.testing.assert_allclose(jnp.std(weight), 0.02, rtol=0.02)  # 60,000 draws


def test_project_casts_the_weight_to_the_input(rng):
    weight = nnx.Param(jnp.asarray(rng.normal(size=(4, 5)), jnp.float32))
    x = jnp.asarray(rng.normal(size=(2, 4)), jnp.bfloat16)
    out = layers.project("bd,de->be", x, weight)
    assert out.dtype == jnp.bfloat16
    expected = jnp.einsum("bd,de->be", x, weight[...].astype(jnp.bfloat16))
    np.testing.assert_array_equal(out, jax.device_get(expected))
