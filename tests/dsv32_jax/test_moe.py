import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from dsv32_jax import config, expert_rows, expert_travel, gate, moe, segments, sharding

FLOAT32_TOL = 2e-5  # two products over ~20 values, gated sums of size ~1


def feed_forward(x, w1, w3, w2):
    gate = x @ w1
    return (gate / (1 + np.exp(-gate)) * (x @ w3)) @ w2


@pytest.fixture
def layer(cfg):
    sized = dataclasses.replace(cfg, init_std=0.5)
    return moe.MoE(sized, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("n_groups", [1, 4])
def test_a_layer_adds_the_unscaled_shared_expert_to_the_gated_ones(rng, cfg, n_groups):
    groups = dataclasses.replace(cfg.moe, n_groups=n_groups, n_active_groups=min(n_groups, 2))
    layer = moe.MoE(dataclasses.replace(cfg, moe=groups, init_std=0.3), rngs=nnx.Rngs(0))
    x = rng.normal(size=(2, 9, cfg.dim))
    documents = segments.from_ids(jnp.ones((2, 9), jnp.int32))

    out, routing = jax.jit(lambda x: layer(x, documents))(jnp.asarray(x, jnp.float32))

    w1, w3, w2 = (np.asarray(w[...], np.float64) for w in (layer.w1, layer.w3, layer.w2))
    s1, s3, s2 = (
        np.asarray(w[...], np.float64) for w in (layer.shared.w1, layer.shared.w3, layer.shared.w2)
    )
    flat = x.reshape(18, -1)
    experts, gates = (np.asarray(a).reshape(18, -1) for a in (routing.experts, routing.gates))
    expected = feed_forward(flat, s1, s3, s2)
    for n, a in np.ndindex(experts.shape):
        e = experts[n, a]
        expected[n] += gates[n, a] * feed_forward(flat[n], w1[e], w3[e], w2[e])
    np.testing.assert_allclose(
        np.asarray(out).reshape(18, -1), expected, atol=FLOAT32_TOL * np.abs(expected).max()
    )


def test_the_order_of_experts_does_not_matter(rng, cfg, layer):
    groups = rng.permutation(cfg.moe.n_groups)
    size = cfg.moe.group_size
    order = np.concatenate([g * size + rng.permutation(size) for g in groups])
    x = jnp.asarray(rng.normal(size=(2, 9, cfg.dim)), jnp.float32)
    documents = segments.from_ids(jnp.ones((2, 9), jnp.int32))
    bias = jnp.asarray(0.1 * rng.normal(size=cfg.moe.n_experts), jnp.float32)
    layer.gate.bias = gate.RouterBias(bias)
    run = jax.jit(lambda layer: layer(x, documents))

    out, routing = run(layer)
    for name in ("w1", "w3", "w2"):
        setattr(layer, name, nnx.Param(getattr(layer, name)[...][order]))
    layer.gate.weight = nnx.Param(layer.gate.weight[...][:, order])
    layer.gate.bias = gate.RouterBias(bias[order])
    turned, turned_routing = run(layer)

    np.testing.assert_allclose(turned, out, atol=FLOAT32_TOL * np.abs(out).max())
    np.testing.assert_array_equal(turned_routing.load, routing.load[order])


def test_bf16_tokens_are_summed_in_float32_and_rounded_once(rng, cfg, layer, monkeypatch):
    x = jnp.asarray(rng.normal(size=(2, 9, cfg.dim)), jnp.bfloat16)
    documents = segments.from_ids(jnp.ones((2, 9), jnp.int32))

    out, routing = layer(x, documents)

    flat = [a.reshape(18, -1) for a in (x, routing.experts, routing.gates)]
    routed = expert_rows.run_experts(*flat, (layer.w1[...], layer.w3[...], layer.w2[...]))
    expected = routed.reshape(x.shape) + layer.shared(x).astype(jnp.float32)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize(("kernels", "asked"), [("reference", "reference"), ("auto", None)])
def test_the_config_chooses_what_runs_the_experts(rng, cfg, monkeypatch, kernels, asked):
    seen = []
    plain = expert_rows.pallas_kernels.grouped_matmul

    def record(*arrays, implementation, **options):
        seen.append(implementation)
        return plain(*arrays, **options)

    monkeypatch.setattr(expert_rows.pallas_kernels, "grouped_matmul", record)
    layer = moe.MoE(dataclasses.replace(cfg, kernels=kernels), rngs=nnx.Rngs(0))
    layer(
        jnp.asarray(rng.normal(size=(1, 40, cfg.dim))),
        segments.from_ids(jnp.ones((1, 40), jnp.int32)),
    )
    assert seen == [asked] * 3


def expert_axis(n):
    shape = tuple(n if axis == "expert" else 1 for axis in sharding.AXES)
    mesh = AbstractMesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * len(shape))
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(
    ("platform", "n_devices", "n_tokens", "expected"),
    [
        ("tpu", 16, 4096, "ragged"),
        ("gpu", 16, 4096, "ragged"),
        ("cpu", 16, 4096, "all_to_all"),
        ("tpu", 2, 4096, "all_gather"),  # rows for the worst case are only twice an even load
        ("tpu", 16, 8, "all_gather"),  # 16 * 16 * 64 rows are less than 256 blocks of 128
    ],
)
def test_tokens_travel_on_long_axes_when_they_are_many(
    monkeypatch, platform, n_devices, n_tokens, expected
):
    monkeypatch.setattr(moe.dispatch, "platform", lambda: platform)
    with expert_axis(n_devices):
        n_choices = n_tokens * 8
        assert moe.choose_dispatch(config.v32_671b(), n_choices) == expected
        share = 1 / n_devices if expected == "all_gather" else 1 / expert_travel.SLACK
        assert moe.filled(config.v32_671b(), n_choices) == share


@pytest.mark.parametrize("name", ["ragged", "all_to_all", "all_gather"])
def test_the_config_chooses_how_tokens_travel_whatever_their_number(monkeypatch, name):
    monkeypatch.setattr(moe.dispatch, "platform", lambda: "tpu")
    cfg = dataclasses.replace(config.v32_671b(), expert_dispatch=name)
    for n_devices, n_choices in ((2, 8), (16, 2**15)):
        with expert_axis(n_devices):
            assert moe.choose_dispatch(cfg, n_choices) == name


def test_what_a_platform_lacks_is_an_error_where_it_is_asked_for_and_said_where_not(caplog):
    asked = dataclasses.replace(config.v32_671b(), expert_dispatch="ragged")
    with expert_axis(16), caplog.at_level(logging.INFO, "pallas_kernels.dispatch"):
        with pytest.raises(NotImplementedError, match="no ragged all-to-all on a CPU"):
            moe.choose_dispatch(asked, 2**15)
        moe.dispatch._log_choice.cache_clear()
        for _ in range(2):
            moe.choose_dispatch(config.v32_671b(), 2**15)
    said = [r.message for r in caplog.records if "expert_dispatch" in r.message]
    assert said == [
        "expert_dispatch runs as all_to_all (expert_dispatch: ragged: XLA has no ragged all-to-all on a CPU)"
    ]
