from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dsv32_jax import checkpoint_tree


class State(NamedTuple):
    step: jax.Array
    layers: list


def test_every_kind_of_container_becomes_a_dict():
    state = State(step=jnp.int32(3), layers=[{"w": jnp.ones(2)}, {"w": jnp.zeros(2), "none": None}])

    nested = checkpoint_tree.to_nested_dict(state)

    assert jax.tree.map(lambda leaf: leaf.tolist(), nested) == {
        "step": 3,
        "layers": {"0": {"w": [1, 1]}, "1": {"w": [0, 0]}},
    }


def test_an_optimizer_state_comes_back_in_its_own_types():
    state = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": jnp.ones(3)})

    back = checkpoint_tree.from_nested_dict(checkpoint_tree.to_nested_dict(state), state)

    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_a_flax_module_comes_back():
    _, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    nested = checkpoint_tree.to_nested_dict(state)
    back = checkpoint_tree.from_nested_dict(nested, state)

    assert set(nested) == {"kernel", "bias"}
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"state a\.lr is a float; must be an array"):
        checkpoint_tree.to_nested_dict({"a": {"lr": 0.1}})


def test_a_state_without_arrays_is_refused():
    with pytest.raises(ValueError, match="at least one array"):
        checkpoint_tree.to_nested_dict({"a": None})


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two arrays of the state are named a\.b"):
        checkpoint_tree.to_nested_dict({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})


def test_a_leaf_without_a_sharding_goes_to_the_first_device():
    abstract = checkpoint_tree.abstract_of({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})

    assert abstract["w"].sharding.device_set == {jax.local_devices()[0]}


SAVED = {"w": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({**SAVED, "w": np.ones((2, 4), np.float32)}, "w is float32[2, 3] in the checkpoint and"),
        ({**SAVED, "w": np.ones((2, 3), np.int32)}, "and int32[2, 3] here"),
        ({**SAVED, "c": np.ones(1, np.int8)}, "c is int8[1] here and not in the checkpoint"),
        ({"w": SAVED["w"]}, "b is float32[4] in the checkpoint and not in the state here"),
    ],
)
def test_the_first_differing_tensor_is_named(wanted, message):
    assert message in checkpoint_tree.find_mismatch(SAVED, wanted, partial=False)


def test_equal_trees_agree():
    assert checkpoint_tree.find_mismatch(SAVED, SAVED, partial=False) == ""


def test_a_part_may_be_asked_for():
    assert checkpoint_tree.find_mismatch(SAVED, {"w": SAVED["w"]}, partial=True) == ""


def test_a_random_key_agrees_with_the_integers_that_it_is_stored_as():
    key = jax.random.key(0)

    assert (
        checkpoint_tree.find_mismatch({"k": jax.random.key_data(key)}, {"k": key}, partial=False)
        == ""
    )


@pytest.mark.parametrize(
    ("stored", "wanted", "partial", "fits"),
    [
        ("bfloat16", "float32", True, True),
        ("float8_e4m3fn", "float32", True, True),
        ("bfloat16", "float32", False, False),  # a run that goes on must find its own dtypes
        ("float16", "float32", True, False),
        ("float32", "bfloat16", True, False),
        ("int32", "float32", True, False),
    ],
)
def test_parameters_may_be_stored_narrower_where_that_loses_nothing(stored, wanted, partial, fits):
    have = {"w": jax.ShapeDtypeStruct((3, 2), stored)}
    want = {"w": jax.ShapeDtypeStruct((3, 2), wanted)}

    assert (checkpoint_tree.find_mismatch(have, want, partial=partial) == "") == fits
    other = {"w": jax.ShapeDtypeStruct((3, 3), stored)}
    assert checkpoint_tree.find_mismatch(other, want, partial=True)
