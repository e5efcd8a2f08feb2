import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from train import state as states
from train.optimizer import AdamConfig, make_optimizer

STAGES = ("dense", "warmup", "sparse", "window", "rl", "rl_indexer")


@pytest.fixture(scope="module")
def optimizer():
    return make_optimizer(AdamConfig())


def moment_names(opt_state):
    """Name what the optimizer holds an array for."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {path[-1].key for path, leaf in leaves if leaf.ndim}


def test_indexers_train_in_the_warmup_in_sparse_and_where_asked_in_rl_which_leaves_mtp_alone(
    tiny_model,
):
    names = parameters.abstract(tiny_model).weights
    indexers = {name for name in names if ".indexer." in name}

    trained = {s: set(states.trainable(s, names)) for s in STAGES}

    assert {n.split(".attn.")[0] for n in indexers} == {"dense_layers", "moe_layers", "mtp.block"}
    assert trained["warmup"] == indexers
    assert trained["dense"] == trained["window"] == set(names) - indexers
    assert trained["sparse"] == set(names)
    mtp = {name for name in names if name.startswith("mtp.")}
    assert trained["rl"] == set(names) - indexers - mtp
    assert trained["rl_indexer"] == set(names) - mtp


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_holds_moments_of_what_trains_and_of_nothing_else(
    tiny_model, optimizer, stage
):
    state = states.abstract(tiny_model, optimizer, stage)

    assert moment_names(state.opt_state) == set(states.trainable(stage, state.parameters.weights))


def test_moments_live_beside_their_weights(tiny_model, optimizer, mesh):
    layout = states.shardings(tiny_model, optimizer, "sparse", mesh)
    shapes = states.abstract(tiny_model, optimizer, "sparse")
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(shapes.opt_state),
        jax.tree.leaves(layout.opt_state),
        strict=True,
    )

    for (path, leaf), where in pairs:
        if leaf.ndim:
            assert where == layout.parameters.weights[path[-1].key]
        else:
            assert where.is_fully_replicated
    split = layout.parameters.weights["moe_layers.moe.w1"].spec
    assert "expert" in jax.tree.leaves(tuple(split))


def test_a_stage_begins_with_fresh_moments_at_step_0(tiny_model, tiny_parameters, optimizer, mesh):
    layout = states.shardings(tiny_model, optimizer, "warmup", mesh)
    params = jax.tree.map(jnp.array, tiny_parameters)

    state = states.create(params, optimizer, "warmup", layout)

    assert (state.step.dtype, int(state.step)) == (jnp.int32, 0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    assert jax.tree.structure(state) == jax.tree.structure(
        states.abstract(tiny_model, optimizer, "warmup")
    )


def test_shapes_and_places_are_joined_leaf_by_leaf(tiny_model, optimizer, mesh):
    shapes = states.abstract(tiny_model, optimizer, "dense")
    layout = states.shardings(tiny_model, optimizer, "dense", mesh)

    joined = states.on_devices(shapes, layout)

    assert jax.tree.map(lambda x: (x.shape, x.dtype), joined) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert jax.tree.map(lambda x: x.sharding, joined) == layout
