import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv32_jax import config, errors, parameters
from dsv32_jax.convert.load import load_official

CFG = dataclasses.replace(config.tiny(), n_layers=3, n_dense_layers=1)
NO_MTP = dataclasses.replace(CFG, mtp=False)
INDEX = "model.safetensors.index.json"


def assert_holds(model, want):
    got = parameters.flatten(model)
    for have_group, want_group in zip(got, want, strict=True):
        assert have_group.keys() == want_group.keys()
        for name in want_group:
            np.testing.assert_array_equal(have_group[name], want_group[name], err_msg=name)


@pytest.mark.parametrize("n_files", [1, 3])
def test_every_tensor_lands_in_its_parameter(official, draw, n_files):
    params = draw(CFG)
    folder, _, _ = official(CFG, params, n_files=n_files)

    model = load_official(folder)

    assert_holds(model, params)
    assert model.cfg == dataclasses.replace(CFG)


@pytest.mark.parametrize("n_dense", [0, 2])
def test_all_layers_may_be_of_one_kind(official, draw, n_dense):
    cfg = dataclasses.replace(NO_MTP, n_layers=2, n_dense_layers=n_dense)
    params = draw(cfg)
    folder, _, _ = official(cfg, params)

    assert_holds(load_official(folder), params)


def test_bfloat16_files_are_widened_exactly(official, draw):
    params = draw(NO_MTP)
    folder, raw, tensors = official(NO_MTP, params)
    narrow = {
        name: tensor if "norm" in name else tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in tensors.items()
    }
    official(raw=raw, tensors=narrow)

    model = load_official(folder)

    arrays = parameters.flatten(model).weights
    want = params.weights["moe_layers.attn.wo"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(arrays["moe_layers.attn.wo"], want)
    assert {x.dtype for x in jax.tree.leaves(parameters.flatten(model))} == {jnp.dtype("float32")}


def test_the_config_may_be_replaced(official, draw):
    folder, _, _ = official(CFG, draw(CFG))
    cfg = dataclasses.replace(CFG, dtype="bfloat16")

    assert load_official(folder, cfg).cfg == cfg


def test_an_mtp_layer_that_the_config_does_not_declare_is_left_out(official, draw):
    params = draw(CFG)
    folder, raw, tensors = official(CFG, params)
    official(raw=raw | {"num_nextn_predict_layers": 0}, tensors=tensors)

    model = load_official(folder)

    assert model.mtp is None
    kept = {name: x for name, x in params.weights.items() if not name.startswith("mtp.")}
    assert parameters.flatten(model).weights.keys() == kept.keys()


def test_the_config_is_needed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_official(tmp_path)


def test_the_tensors_are_needed(official, draw):
    folder, _, _ = official(NO_MTP, draw(NO_MTP))
    (folder / "model.safetensors").unlink()

    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors\.index\.json nor"):
        load_official(folder)


def test_a_missing_file_of_several_is_named(official, draw):
    folder, _, _ = official(NO_MTP, draw(NO_MTP), n_files=3)
    (folder / "model-00002-of-000003.safetensors").unlink()

    with pytest.raises(FileNotFoundError, match=r"missing: \['model-00002-of-000003"):
        load_official(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"lm_head.weight": 3}}', "\x00"])
def test_a_broken_index_is_named(official, draw, text):
    folder, _, _ = official(NO_MTP, draw(NO_MTP), n_files=2)
    (folder / INDEX).write_text(text)

    with pytest.raises(ValueError, match=r"index\.json must hold a weight_map of names"):
        load_official(folder)


def test_a_file_without_a_tensor_that_the_index_promises_is_named(official, draw):
    folder, _, _ = official(NO_MTP, draw(NO_MTP), n_files=2)
    index = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])
    index["weight_map"][name] = other
    (folder / INDEX).write_text(json.dumps(index))

    with pytest.raises(ValueError, match=rf"{other} does not hold {name}"):
        load_official(folder)


def test_a_missing_tensor_is_named(official, draw):
    folder, raw, tensors = official(NO_MTP, draw(NO_MTP))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    official(raw=raw, tensors=tensors)

    with pytest.raises(ValueError, match=r"lacks 1 tensors .*layers\.1\.mlp\.experts\.2\.up_proj"):
        load_official(folder)


def test_a_v3_checkpoint_without_indexers_is_refused(official, draw):
    folder, raw, tensors = official(NO_MTP, draw(NO_MTP))
    without = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    official(raw=raw, tensors=without)
    with pytest.raises(ValueError, match=r"lacks 15 tensors .* first .*\.indexer\.k_norm\.bias"):
        load_official(folder)

    official(raw=raw | {"model_type": "deepseek_v3"}, tensors=without)
    with pytest.raises(ValueError, match="model_type='deepseek_v3' is not supported"):
        load_official(folder)


@pytest.mark.parametrize(
    ("cfg", "name"),
    [
        (NO_MTP, "model.layers.0.self_attn.q_a_proj.bias"),
        (NO_MTP, "model.extra.weight"),
        (CFG, "model.layers.4.eh_proj.weight"),
    ],
)
def test_an_unknown_tensor_is_named(official, draw, cfg, name):
    folder, raw, tensors = official(cfg, draw(cfg))
    tensors[name] = np.zeros(3, np.float32)
    official(raw=raw, tensors=tensors)

    with pytest.raises(ValueError, match=rf"has 1 tensors the model does not know, first {name}"):
        load_official(folder)


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("model.embed_tokens.weight", [96, 32], "[97, 32]"),
        ("model.norm.weight", [31], "[32]"),
        ("model.norm.weight", [32, 1], "[32]"),
        ("model.layers.0.self_attn.o_proj.weight", [24, 32], "[32, 24]"),
        ("model.layers.0.self_attn.q_b_proj.weight", [24, 32], "[32, 24]"),
        ("model.layers.1.mlp.experts.0.down_proj.weight", [24, 32], "[32, 24]"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", [1], "[8]"),
    ],
)
def test_a_wrong_shape_is_told_with_the_right_one(official, draw, name, shape, want):
    folder, raw, tensors = official(NO_MTP, draw(NO_MTP))
    tensors[name] = np.zeros(shape, np.float32)
    official(raw=raw, tensors=tensors)

    with pytest.raises(ValueError, match="the config asks for") as caught:
        load_official(folder)

    assert f"{name} has shape {shape}, the config asks for {want}" in str(caught.value)


def test_fp8_weights_are_multiplied_by_their_block_scales(official_fp8):
    folder, _, tensors = official_fp8()

    arrays = parameters.flatten(load_official(folder)).weights

    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    q, scales = tensors[name].astype(np.float32), tensors[f"{name}_scale_inv"]
    want = [
        [q[i, j] * scales[i // 128, j // 128] for i in range(q.shape[0])] for j in range(q.shape[1])
    ]
    np.testing.assert_array_equal(arrays["moe_layers.moe.w2"][0, 3], np.array(want, np.float32))


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5])
def test_a_truncated_file_is_named(official, draw, keep):
    folder, _, _ = official(NO_MTP, draw(NO_MTP), n_files=2)
    path = folder / "model-00002-of-000002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])

    with pytest.raises(
        ValueError, match=r"00002-of-000002.safetensors is (not a readable|truncated)"
    ):
        load_official(folder)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_an_mtp_copy_that_differs_from_the_main_model_is_named(official, draw, copy):
    folder, raw, tensors = official(CFG, draw(CFG))
    name = f"model.layers.3.{copy}.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][5, 7] += 1
    official(raw=raw, tensors=tensors)

    message = rf"{name} differs from the main model's (model.embed_tokens|lm_head).weight in"
    with pytest.raises(errors.WorkFailedError, match=message):
        load_official(folder)
