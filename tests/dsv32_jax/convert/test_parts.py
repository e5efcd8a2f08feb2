"""Tensors so large that they are moved in parts, here by making parts small."""

import dataclasses

import numpy as np
import pytest

from dsv32_jax import config, load_model, parameters
from dsv32_jax.convert import slots

# Widths of several whole FP8 blocks, so that all kinds of matrices can be cut.
CFG = dataclasses.replace(
    config.tiny(),
    vocab_size=384,
    dim=256,
    ffn_dim=384,
    n_layers=2,
    mla=config.MLAConfig(
        n_heads=4, q_lora_rank=256, kv_lora_rank=128, nope_dim=48, rope_dim=16, v_dim=80
    ),
    indexer=config.IndexerConfig(n_heads=4, head_dim=64, topk=8),
    moe=config.MoEConfig(n_experts=2, n_active=1, n_groups=1, n_active_groups=1, expert_dim=256),
)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(slots, "PART_ELEMENTS", 1)
    cut = {
        slot.place.path.split(".", 1)[-1] for slot in slots.slots(CFG).values() if slot.parts > 1
    }
    # kv_a has 144 rows, the indexer's wk and weights_proj fewer than two blocks.
    assert cut >= {"embed", "head", "attn.wq_a", "attn.wq_b", "attn.wkv_b", "attn.wo", "ffn.w1",
                   "ffn.w2", "moe.w1", "moe.w2", "moe.shared.w3", "attn.indexer.wq_b"}  # fmt: skip


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", ["fp8", "bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_checkpoint_in_parts_is_the_same_model(
    official_fp8, convert, dequantised, read_official, tmp_path, dtype
):
    folder, _, tensors = official_fp8(CFG)

    status, _, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)
    assert status == 0, err

    wide = dequantised(tensors)
    places = {
        "model.embed_tokens.weight": ("embed", ()),
        "lm_head.weight": ("head", ()),
        "model.layers.0.self_attn.q_b_proj.weight": ("dense_layers.attn.wq_b", (0,)),
        "model.layers.0.self_attn.o_proj.weight": ("dense_layers.attn.wo", (0,)),
        "model.layers.0.mlp.up_proj.weight": ("dense_layers.ffn.w3", (0,)),
        "model.layers.1.mlp.experts.1.down_proj.weight": ("moe_layers.moe.w2", (0, 1)),
        "model.layers.2.self_attn.kv_b_proj.weight": ("mtp.block.attn.wkv_b", ()),
    }
    for source in (tmp_path / "dst", folder):
        arrays = parameters.flatten(load_model.load_model(source)).weights
        for name, (path, at) in places.items():
            have = np.asarray(arrays[path][at])
            want = wide[name] if path == "embed" else wide[name].T
            np.testing.assert_array_equal(have, want.reshape(have.shape), err_msg=name)


@pytest.mark.usefixtures("small_parts")
def test_fp8_files_come_back_from_parts_to_the_bit(official_fp8, convert, read_official, tmp_path):
    folder, _, _ = official_fp8(CFG)

    convert("from-hf", folder, tmp_path / "dst")
    assert convert("to-hf", tmp_path / "dst", tmp_path / "back")[0] == 0

    assert read_official(tmp_path / "back") == read_official(folder)


@pytest.mark.usefixtures("small_parts")
def test_parts_are_quantised_as_the_whole_is(
    official_fp8, convert, read_official, tmp_path, monkeypatch
):
    folder, _, _ = official_fp8(CFG)
    convert("from-hf", folder, tmp_path / "parts", "--dtype", "bf16")
    convert("to-hf", tmp_path / "parts", tmp_path / "a", "--dtype", "fp8")
    monkeypatch.undo()
    convert("from-hf", folder, tmp_path / "whole", "--dtype", "bf16")
    convert("to-hf", tmp_path / "whole", tmp_path / "b", "--dtype", "fp8")

    assert read_official(tmp_path / "a") == read_official(tmp_path / "b")


@pytest.mark.usefixtures("small_parts")
def test_a_value_that_is_not_finite_is_named_by_its_row_in_the_whole(
    official_fp8, official, convert, tmp_path
):
    folder, raw, tensors = official_fp8(CFG)
    name = "model.layers.0.mlp.up_proj.weight"
    changed = tensors[name].copy()
    changed.view(np.uint8)[300, 7] = 0x7F
    official(raw=raw, tensors=tensors | {name: changed}, n_files=3)

    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert (status, f"{name}[300, 7]=nan" in err) == (1, True)
