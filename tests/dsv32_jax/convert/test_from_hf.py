import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dsv32_jax import config, load_model, manifest, parameters
from dsv32_jax.convert import new_indexer, slots

ROOT = Path(__file__).parents[3]
DONE = 0


def saved_dtypes(folder):
    tree = ocp.PyTreeCheckpointHandler().metadata(folder / "checkpoints" / "0" / "state").tree
    return {name: str(leaf.dtype) for name, leaf in tree["parameters"]["weights"].items()}, tree


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "float32"])
def test_fp8_files_become_a_checkpoint_with_exactly_their_weights(
    official_fp8, convert, assert_holds, tmp_path, dtype
):
    folder, _, tensors = official_fp8()

    status, out, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)

    assert status == DONE, err
    n_weights = sum(not name.endswith("_scale_inv") for name in tensors)
    assert f"converted and verified {n_weights} tensors as {dtype}, 0.0" in out
    assert_holds(tmp_path / "dst", tensors)
    dtypes, tree = saved_dtypes(tmp_path / "dst")
    name = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "float32": "float32"}[dtype]
    assert dtypes["moe_layers.moe.w1"] == dtypes["mtp.block.attn.wkv_a"] == name
    assert dtypes["head"] == ("float32" if dtype == "float32" else "bfloat16")
    assert dtypes["norm.weight"] == "float32"
    assert ("scales" in tree) == (dtype == "fp8")


@pytest.mark.parametrize(("layout", "dtype"), [("float32", "float32"), ("bf16", "bf16")])
def test_unquantised_files_keep_their_dtype_unless_another_is_asked_for(
    official, draw, convert, assert_holds, tmp_path, layout, dtype
):
    cfg = dataclasses.replace(config.tiny(), n_layers=2)
    folder, raw, tensors = official(cfg, draw(cfg))
    if layout == "bf16":
        tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}  # norms too, as V3
        official(raw=raw, tensors=tensors)

    assert convert("from-hf", folder, tmp_path / "dst")[0] == DONE

    assert_holds(tmp_path / "dst", tensors)
    dtypes, _ = saved_dtypes(tmp_path / "dst")
    assert dtypes["moe_layers.moe.w1"] == {"bf16": "bfloat16", "float32": "float32"}[dtype]
    assert dtypes["norm.weight"] == "float32"


def test_wide_weights_can_be_quantised_on_the_way(official, draw, convert, tmp_path):
    cfg = dataclasses.replace(config.tiny(), n_layers=2)
    folder, _, tensors = official(cfg, draw(cfg))

    assert convert("from-hf", folder, tmp_path / "dst", "--dtype", "fp8")[0] == DONE

    arrays = parameters.flatten(load_model.load_model(tmp_path / "dst")).weights
    have = np.asarray(arrays["moe_layers.moe.w2"])[0, 2]
    want = tensors["model.layers.1.mlp.experts.2.down_proj.weight"].T
    assert not np.array_equal(have, want)
    np.testing.assert_allclose(have, want, rtol=1 / 16, atol=np.abs(want).max() / 448 / 64)


def test_the_files_beside_the_weights_are_carried_along(official_fp8, convert, tmp_path):
    folder, raw, _ = official_fp8()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")

    os.mkfifo(folder / "pipe")
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")

    _, _, err = convert("from-hf", folder, tmp_path / "dst")

    for name in ("pipe", "gone.txt"):
        assert f"leaving out {folder / name}, which is no regular file" in err
    beside = tmp_path / "dst" / "official"
    names = sorted(str(p.relative_to(beside)) for p in beside.rglob("*") if p.is_file())
    assert names == ["config.json", "encoding/readme.txt", "tokenizer.json"]
    assert json.loads((beside / "config.json").read_text()) == raw
    assert (beside / "encoding" / "readme.txt").read_text() == "how to encode"


def test_every_file_is_in_the_manifest_with_its_checksum(official_fp8, convert, tmp_path):
    folder, _, _ = official_fp8()
    convert("from-hf", folder, tmp_path / "dst")
    step = tmp_path / "dst" / "checkpoints" / "0"

    assert manifest.find_damage(step, checksums=True) is None
    listed = set(manifest.read_manifest(step)["files"])
    there = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    marks = {f"{item}commit_success.txt" for item in ("", "state/", "data_state/", "meta/")}
    assert there - listed == {"manifest.json", "_CHECKPOINT_METADATA"} | marks

    for path in step.rglob("parameters.weights.moe_layers.moe.w1/0.2.0.0"):
        content = bytearray(path.read_bytes())
        content[5] ^= 1
        path.write_bytes(content)
    assert "moe.w1/0.2.0.0" in manifest.find_damage(step, checksums=True)


def v3(official, draw, tmp_path, **changes):
    """Write a V3 folder: no indexers, norms in bf16."""
    cfg = dataclasses.replace(config.tiny(), n_layers=2)
    folder, raw, tensors = official(cfg, draw(cfg))
    raw = {key: value for key, value in raw.items() if not key.startswith("index_")}
    raw |= {"model_type": "deepseek_v3", "auto_map": {"AutoConfig": "x.Y"}, **changes}
    tensors = {
        name: x.astype(ml_dtypes.bfloat16) if "norm" in name else x
        for name, x in tensors.items()
        if ".indexer." not in name
    }
    for path in folder.iterdir():
        path.unlink()
    official(raw=raw, tensors=tensors)
    return folder, tensors


V3_OPTIONS = ("--index-heads", 16, "--index-head-dim", 16, "--index-topk", 8)


def test_a_v3_source_gets_new_indexers(official, draw, convert, tmp_path):
    folder, tensors = v3(official, draw, tmp_path, initializer_range=0.25)

    status, _, err = convert("from-hf", folder, tmp_path / "dst", *V3_OPTIONS, "--seed", 3)

    assert status == DONE, err
    assert "15 tensors are drawn, seed 3" in err  # five in each of two layers and the MTP layer
    model = load_model.load_model(tmp_path / "dst")
    assert model.cfg.indexer == config.IndexerConfig(n_heads=16, head_dim=16, topk=8)
    arrays = parameters.flatten(model).weights
    for stack in ("dense_layers", "moe_layers", "mtp.block"):
        at = f"{stack}.attn.indexer"
        np.testing.assert_array_equal(arrays[f"{at}.k_norm.weight"], 1)
        np.testing.assert_array_equal(arrays[f"{at}.k_norm.bias"], 0)
        wq_b = np.asarray(arrays[f"{at}.wq_b"])
        assert wq_b.std() == pytest.approx(0.25, rel=0.05)
        assert abs(wq_b.mean()) < 0.02
    drawn = [
        np.asarray(arrays[f"{s}.attn.indexer.wk"]).ravel() for s in ("dense_layers", "mtp.block")
    ]
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.2
    norm = tensors["model.layers.1.input_layernorm.weight"].astype(np.float32)
    np.testing.assert_array_equal(arrays["moe_layers.attn_norm.weight"][0], norm)
    raw = json.loads((tmp_path / "dst" / "official" / "config.json").read_text())
    assert raw["model_type"] == "deepseek_v32"
    assert raw["architectures"] == ["DeepseekV32ForCausalLM"]
    assert (raw["index_topk"], "auto_map" in raw) == (8, False)


def test_new_indexers_depend_on_the_seed_alone(official, draw, convert, tmp_path):
    folder, _ = v3(official, draw, tmp_path)
    draws = []
    for name, seed, threads in (("a", 0, 1), ("b", 0, 3), ("c", 1, 1)):
        options = (*V3_OPTIONS, "--seed", seed, "--threads", threads)
        assert convert("from-hf", folder, tmp_path / name, *options)[0] == DONE
        arrays = parameters.flatten(load_model.load_model(tmp_path / name)).weights
        draws.append(np.asarray(arrays["moe_layers.attn.indexer.wk"]))

    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_a_new_indexer_in_parts_is_drawn_once(official, draw, convert, tmp_path, monkeypatch):
    folder, _ = v3(official, draw, tmp_path)
    convert("from-hf", folder, tmp_path / "whole", *V3_OPTIONS)
    drawn = []

    def draw_indexer(slot, **options):
        drawn.append(slot.name)
        return draw_for_real(slot, **options)

    draw_for_real = new_indexer.draw
    monkeypatch.setattr(new_indexer, "draw", draw_indexer)
    monkeypatch.setattr(slots, "PART_ELEMENTS", 1)
    convert("from-hf", folder, tmp_path / "parts", *V3_OPTIONS)

    assert len(drawn) == len(set(drawn)) == 15
    whole, parts = (
        parameters.flatten(load_model.load_model(tmp_path / name)).weights
        for name in ("whole", "parts")
    )
    for name, want in whole.items():
        np.testing.assert_array_equal(parts[name], want, err_msg=name)


def test_scales_of_v3_may_be_any_positive_number(
    official_fp8, official, convert, assert_holds, tmp_path
):
    folder, raw, tensors = official_fp8()
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv"
    del raw["quantization_config"]["scale_fmt"]
    changed = tensors | {name: tensors[name] * np.float32(0.123)}
    official(raw=raw, tensors=changed, n_files=3)

    for dtype in ("float32", "fp8"):
        assert convert("from-hf", folder, tmp_path / dtype, "--dtype", dtype)[0] == DONE
        assert_holds(tmp_path / dtype, changed)


ON_A_MESH = """
import sys
from pathlib import Path
import jax, numpy as np
from dsv32_jax import load_model, parameters, sharding
from dsv32_jax.config_json import config_from_json
from dsv32_jax.config import ModelConfig
from train import checkpoint, state
import json
folder = Path(sys.argv[1])
cfg = config_from_json(ModelConfig, json.loads((folder / "config.json").read_text())["model"])
mesh = sharding.make_mesh(sharding.MeshConfig(**json.loads(sys.argv[2])))
wanted = state.on_devices(parameters.abstract(cfg), parameters.shardings(cfg, mesh))
found = checkpoint.Checkpoints(folder / "checkpoints", checkpoint.CheckpointConfig())
got = found.restore_latest({"parameters": wanted}, partial=True).state["parameters"]
w1 = got.weights["moe_layers.moe.w1"]
assert len(w1.sharding.device_set) == 8 and w1.addressable_shards[0].data.size < w1.size, w1.sharding
np.savez(sys.argv[3], **{k: np.asarray(v) for group in got for k, v in group.items()})
"""


@pytest.mark.parametrize("dtype", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_converted_checkpoint_loads_on_eight_devices(official_fp8, convert, tmp_path, dtype):
    folder, _, _ = official_fp8()
    convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)
    model = load_model.load_model(tmp_path / "dst")

    flags = "--xla_force_host_platform_device_count=8"
    mesh = json.dumps({"ici_data": 1, "ici_fsdp": 2, "ici_expert": 2, "ici_tensor": 2})
    command = [sys.executable, "-c", ON_A_MESH, tmp_path / "dst", mesh, tmp_path / "got.npz"]
    subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=True,
    )  # fmt: skip

    got = np.load(tmp_path / "got.npz")
    for group in parameters.flatten(model):
        for name, array in group.items():
            assert got[name].dtype == np.float32
            np.testing.assert_array_equal(got[name], np.asarray(array), err_msg=name)
