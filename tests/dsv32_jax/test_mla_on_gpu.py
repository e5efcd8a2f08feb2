"""A whole attention layer with the released head sizes: kernels against the definitions, in bf16 on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv32_jax import config, mla, segments, sharding
from pallas_kernels import dispatch

pytestmark = pytest.mark.gpu

T, K = 600, 128
OUT_TOL = 5e-3  # Frobenius; both sides round to bf16 after every product
GRAD_TOL = 2.5e-2  # the same through the backward; small sums over many tokens, as k_norm's bias, cancel most
MESH_TOL = 5e-2  # gradients of weights are added over devices in bf16: 2.3e-2 with plain jnp on two CPU devices
FORMS = {"dense": ("dense", 0), "masked": ("sparse", 2**20), "gathered": ("sparse", 0)}


@pytest.fixture(scope="module")
def cfg():
    """The released attention with fewer heads and a narrow stream."""
    large = config.v32_671b()
    sizes = dataclasses.replace(large.mla, n_heads=64, q_lora_rank=256)
    index = dataclasses.replace(large.indexer, topk=K)
    return dataclasses.replace(large, dim=256, init_std=0.06, mla=sizes, indexer=index)


@pytest.fixture(scope="module")
def arrays(cfg):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, T, cfg.dim))
    d_out = rng.normal(size=(2, T, cfg.dim))
    ids = np.repeat([[1, 2, 0], [3, 3, 3]], [300, 250, 50], axis=1)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(d_out, jnp.bfloat16), jnp.asarray(ids)


def run(cfg, arrays, form, kernels):
    """Return a layer's output and KL, and its gradients."""
    mode, masked_max_len = FORMS[form]
    sizes = dataclasses.replace(cfg.mla, masked_max_len=masked_max_len)
    layer = mla.MLA(dataclasses.replace(cfg, mla=sizes, kernels=kernels), rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    x, d_out, ids = arrays

    @jax.jit
    def outputs(weights, x):
        def loss(weights, x):
            layer = nnx.merge(graph, weights)
            out, kl, _ = layer(x, segments.from_ids(ids), mode=mode, indexer_loss=True)
            scored = jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(kl)
            return scored, (out, kl)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    return outputs(weights, x)


def frobenius(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_on_kernels_equals_one_on_the_definitions(cfg, arrays, form, monkeypatch):
    chosen = {}
    choose = dispatch.choose

    def record(op, implementation, backends):
        name = choose(op, implementation, backends)
        chosen[op] = name
        return name

    expected_grads, expected = run(cfg, arrays, form, "reference")
    monkeypatch.setattr(dispatch, "choose", record)
    grads, got = run(cfg, arrays, form, "auto")

    assert "reference" not in chosen.values(), chosen
    for a, b in zip(got, expected, strict=True):
        assert frobenius(a, b) < OUT_TOL
    flat = jax.tree_util.tree_leaves_with_path(expected_grads)
    for (path, b), a in zip(flat, jax.tree.leaves(grads), strict=True):
        assert frobenius(a, b) < GRAD_TOL, jax.tree_util.keystr(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", ["tensor", "context", "data"])
def test_two_devices_equal_one(cfg, arrays, form, axis):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected_grads, expected = run(cfg, arrays, form, "auto")
    mesh = sharding.make_mesh(sharding.MeshConfig(ici_fsdp=1, **{f"ici_{axis}": 2}))
    with jax.set_mesh(mesh):
        grads, got = run(cfg, arrays, form, "auto")

    for a, b in zip(got, expected, strict=True):
        assert frobenius(a, b) < OUT_TOL
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert frobenius(a, b) < MESH_TOL
