import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import config, parameters, sharding


@pytest.fixture(scope="module")
def params(model):
    return parameters.flatten(model)


def test_flatten_and_assemble_are_inverses(cfg, model, params):
    again = parameters.flatten(parameters.assemble(cfg, params))
    assert again.weights.keys() == params.weights.keys()
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_router_bias_is_no_weight(params):
    assert set(params.router_bias) == {"moe_layers.moe.gate.bias", "mtp.block.moe.gate.bias"}
    assert not any("gate.bias" in name for name in params.weights)
    for group in params._fields:
        assert {parameters.group_of(name) for name in getattr(params, group)} == {group}


@pytest.mark.parametrize(("change", "name"), [("drop", "embed"), ("add", "extra")])
def test_a_missing_or_unknown_name_is_refused(cfg, params, change, name):
    weights = dict(params.weights)
    if change == "drop":
        del weights[name]
    else:
        weights[name] = jnp.zeros(1)
    message = f"parameters do not fit the model: 1 names differ, first {name}"
    with pytest.raises(ValueError, match=message):
        parameters.assemble(cfg, params._replace(weights=weights))


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_parameter_has_one_logical_axis_per_dimension(preset):
    for group in parameters.abstract(config.PRESETS[preset]()):
        for name, leaf in group.items():
            axes = parameters.logical_axes(name)
            assert len(axes) == leaf.ndim, name
            assert all(axis is None or axis in sharding.RULES for axis in axes), name


def test_stacked_layers_have_a_leading_axis_that_is_not_sharded():
    assert parameters.logical_axes("moe_layers.moe.w1") == (None, "experts", "expert_embed", "ffn")
    assert parameters.logical_axes("mtp.block.moe.w1") == ("experts", "expert_embed", "ffn")
    assert parameters.logical_axes("mtp.enorm.weight") == (None,)
    assert parameters.logical_axes("dense_layers.attn.indexer.k_norm.bias") == (None, None)


def test_an_unknown_parameter_has_no_axes():
    with pytest.raises(KeyError):
        parameters.logical_axes("moe_layers.attn.new")


def test_indexer_weights_are_told_apart(params):
    indexer = {name for name in params.weights if parameters.is_indexer(name)}
    ends = {"wq_b", "wk", "k_norm.weight", "k_norm.bias", "weights_proj"}
    assert len(indexer) == 3 * len(ends)
    assert {name.split(".indexer.")[1] for name in indexer} == ends


def test_initialise_draws_by_the_seed(cfg):
    cfg = dataclasses.replace(cfg, n_layers=1, n_dense_layers=0, mtp=False)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    first, again, other = (parameters.initialise(cfg, seed, mesh) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(np.asarray(first.weights["embed"] != other.weights["embed"]))
    assert np.std(first.weights["moe_layers.moe.w1"]) == pytest.approx(cfg.init_std, rel=0.05)
    experts = np.asarray(first.weights["moe_layers.moe.w1"])[0]
    assert np.any(experts[0] != experts[1])
    assert np.all(np.asarray(first.router_bias["moe_layers.moe.gate.bias"]) == 0)


def test_the_router_bias_moves_against_the_load():
    bias = {"a": jnp.asarray([[0.5, 0.0, -1.0, 0.25]]), "b": jnp.zeros(2)}
    loads = {"a": jnp.asarray([[10.0, 4.0, 2.0, 8.0]]), "b": jnp.asarray([3.0, 3.0])}

    out = parameters.load_balance_step(bias, loads, 0.125)

    # Mean load 6 in "a", 3 in "b".
    np.testing.assert_array_equal(out["a"], [[0.375, 0.125, -0.875, 0.125]])
    np.testing.assert_array_equal(out["b"], [0, 0])


def test_the_expert_axis_cuts_every_matrix_in_training_and_only_experts_in_running():
    mesh = jax.sharding.AbstractMesh(
        (1, 2, 2, 1, 1), sharding.AXES, (jax.sharding.AxisType.Auto,) * len(sharding.AXES)
    )
    for training in (True, False):
        found = parameters.shardings(config.tiny(), mesh, training=training).weights
        cut = {name for name, where in found.items() if "expert" in str(where.spec)}
        experts = {name for name in found if ".moe.w" in name}
        assert experts <= cut
        assert ("dense_layers.attn.wo" in cut) == training
        assert not any("norm" in name for name in cut)
        if not training:
            assert cut == experts
