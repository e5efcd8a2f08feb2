import itertools
import math

import jax
import numpy as np
import pytest
from etils import epath

from dsv32_jax import load_model, parameters
from dsv32_jax.convert import restore
from dsv32_jax.convert.orbax_arrays import ArrayTree


@pytest.fixture
def converted(official_fp8, convert, dequantised, tmp_path):
    folder, _, tensors = official_fp8()
    assert convert("from-hf", folder, tmp_path / "dst")[0] == 0
    return tmp_path / "dst", dequantised(tensors)


@pytest.mark.parametrize(
    ("path", "name", "at"),
    [
        ("dense_layers.attn.wq_b", "model.layers.0.self_attn.q_b_proj.weight", (0,)),
        ("dense_layers.attn.wo", "model.layers.0.self_attn.o_proj.weight", (0,)),
        ("dense_layers.ffn.w1", "model.layers.0.mlp.gate_proj.weight", (0,)),
        ("moe_layers.moe.w2", "model.layers.1.mlp.experts.3.down_proj.weight", (0, 3)),
        ("mtp.block.attn.wkv_b", "model.layers.2.self_attn.kv_b_proj.weight", ()),
    ],
)
def test_any_slice_has_the_scales_of_its_own_blocks(converted, path, name, at):
    folder, wide = converted
    tree = ArrayTree(epath.Path(folder / "checkpoints" / "0" / "state"))
    keys = ("parameters", "weights", path)
    own = tree.shape(keys)[len(at) :]
    want = wide[name].T.reshape(own)

    for cuts in itertools.product((0, 1, 2), repeat=len(own)):
        spans = {0: (0, 1), 1: (0.3, 0.9), 2: (0.5, 1)}
        index = tuple(
            slice(math.floor(spans[c][0] * n), math.ceil(spans[c][1] * n))
            for c, n in zip(cuts, own, strict=True)
        )
        stack = tuple(slice(i, i + 1) for i in at)
        got = restore._read(tree, keys, (*stack, *index), np.dtype(np.float32))
        np.testing.assert_array_equal(got[(0,) * len(at)], want[index])


def test_reading_a_stored_chunk_equals_reading_through_tensorstore(converted):
    folder, _ = converted
    tree = ArrayTree(epath.Path(folder / "checkpoints" / "0" / "state"))
    keys = ("parameters", "weights", "moe_layers.moe.w1")
    whole = [slice(0, 1), slice(2, 3), slice(None), slice(None)]

    chunk = tree.read(keys, whole)
    through = np.asarray(tree._open(keys)[tuple(whole)].read().result())

    np.testing.assert_array_equal(chunk.view(np.uint8), through.view(np.uint8))
    with pytest.raises(KeyError, match=r"parameters\.weights\.nothing"):
        tree.read(("parameters", "weights", "nothing"), [])


def test_a_cut_chunk_is_named(converted):
    folder, _ = converted
    tree = ArrayTree(epath.Path(folder / "checkpoints" / "0" / "state"))
    path = next(folder.rglob("parameters.weights.moe_layers.moe.w1/0.2.0.0"))
    path.write_bytes(path.read_bytes()[:-1])

    index = [slice(0, 1), slice(2, 3), slice(None), slice(None)]
    with pytest.raises(ValueError, match=r"0\.2\.0\.0 is truncated at byte"):
        tree.read(("parameters", "weights", "moe_layers.moe.w1"), index)


def test_a_tree_without_its_metadata_is_named(tmp_path):
    with pytest.raises(ValueError, match="_METADATA cannot be read"):
        ArrayTree(epath.Path(tmp_path))


def test_the_loader_gives_float32_on_one_device(converted):
    folder, _ = converted

    arrays = parameters.flatten(load_model.load_model(folder))

    for array in jax.tree.leaves(arrays):
        assert array.dtype == np.float32
        assert len(array.sharding.device_set) == 1
