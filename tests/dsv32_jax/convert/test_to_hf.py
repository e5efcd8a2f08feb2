import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dsv32_jax import config, load_model, parameters
from dsv32_jax.convert import storage
from train import checkpoint, overrides, state

ROOT = Path(__file__).parents[3]
DONE, FAILED, WRONG_USAGE = 0, 1, 2
TINY = dataclasses.replace(config.tiny(), n_layers=2)


@pytest.fixture
def converted(official_fp8, convert, tmp_path):
    """Return an FP8 folder and what it was converted to."""
    folder, _, _ = official_fp8()
    assert convert("from-hf", folder, tmp_path / "converted")[0] == DONE
    return folder, tmp_path / "converted"


@dataclasses.dataclass(frozen=True)
class Run:
    model: config.ModelConfig
    steps: int = 10


@pytest.fixture
def training_run(draw, tmp_path):
    """Make a run with one checkpoint, as the training commands write it."""

    def make(cfg):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(overrides.to_json_dict(Run(cfg))))
        weights = draw(cfg, seed=5)
        whole = state.TrainState(weights, {"mu": weights.weights}, jnp.int32(7))
        checkpoints = checkpoint.Checkpoints(
            folder / "checkpoints", checkpoint.CheckpointConfig(every_steps=1)
        )
        checkpoints.save(7, whole, data_state={}, meta={"stage": "sparse"})
        checkpoints.close()
        return folder, weights

    return make


def test_fp8_files_come_back_to_the_bit(converted, convert, read_official, tmp_path):
    folder, middle = converted

    status, out, err = convert("to-hf", middle, tmp_path / "back")

    assert status == DONE, err
    assert "tensors as fp8" in out
    want, have = read_official(folder), read_official(tmp_path / "back")
    assert have.keys() == want.keys()
    for name in want:
        assert have[name] == want[name], name


@pytest.mark.parametrize(("dtype", "code"), [("bf16", "BF16"), ("float32", "F32")])
def test_fp8_weights_are_dequantised_exactly(
    official_fp8, converted, convert, dequantised, read_official, tmp_path, dtype, code
):
    _, middle = converted
    _, _, tensors = official_fp8()

    assert convert("to-hf", middle, tmp_path / "back", "--dtype", dtype)[0] == DONE

    have = read_official(tmp_path / "back")
    wide = dequantised(tensors)
    assert have.keys() == wide.keys()
    numpy_dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    for name, want in wide.items():
        got_code, shape, data = have[name]
        in_float32 = name.endswith(("norm.weight", "norm.bias", "e_score_correction_bias"))
        assert got_code == ("F32" if in_float32 else code), name
        got = np.frombuffer(data, numpy_dtype[got_code]).reshape(shape).astype(np.float32)
        np.testing.assert_array_equal(got, want, err_msg=name)
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in raw
    assert raw["torch_dtype"] == {"BF16": "bfloat16", "F32": "float32"}[code]


@pytest.mark.parametrize("through", ["bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_requantised_weights_have_power_of_two_scales_and_the_same_values(
    official_fp8, convert, dequantised, read_official, tmp_path, through
):
    folder, _, tensors = official_fp8()
    convert("from-hf", folder, tmp_path / "wide", "--dtype", through)

    status, _, err = convert("to-hf", tmp_path / "wide", tmp_path / "back", "--dtype", "fp8")

    assert status == DONE, err
    have = read_official(tmp_path / "back")
    assert {n: (h[0], h[1]) for n, h in have.items()} == {
        n: (h[0], h[1]) for n, h in read_official(folder).items()
    }
    codes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
    arrays = {n: np.frombuffer(d, codes[c]).reshape(s) for n, (c, s, d) in have.items()}
    n_smaller = 0
    for name, scales in arrays.items():
        if name.endswith("_scale_inv"):
            np.testing.assert_array_equal(np.exp2(np.round(np.log2(scales))), scales)
            n_smaller += (scales < tensors[name]).sum()
    assert n_smaller > 0  # where the source's scales were larger than need be
    for name, want in dequantised(tensors).items():
        np.testing.assert_array_equal(dequantised(arrays)[name], want, err_msg=name)


@pytest.mark.parametrize("has_official", [False, True])
def test_scales_that_are_no_powers_of_two_are_not_said_to_be(
    official_fp8, official, convert, tmp_path, has_official
):
    theirs, raw, tensors = official_fp8(name="theirs")
    del raw["quantization_config"]
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv"
    folder, _, _ = official(raw=raw, tensors=tensors | {name: tensors[name] * np.float32(0.75)})
    status, _, err = convert("from-hf", folder, tmp_path / "dst")
    assert status == DONE, err

    options = ("--official", theirs) if has_official else ()
    status, _, err = convert("to-hf", tmp_path / "dst", tmp_path / "back", *options)

    assert status == DONE, err
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "fp8"
    assert "scale_fmt" not in raw["quantization_config"]


def test_scales_made_on_the_way_in_are_said_to_be_powers_of_two(official, draw, convert, tmp_path):
    folder, _, _ = official(TINY, draw(TINY))
    convert("from-hf", folder, tmp_path / "dst", "--dtype", "fp8")

    assert convert("to-hf", tmp_path / "dst", tmp_path / "back")[0] == DONE

    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert raw["quantization_config"]["scale_fmt"] == "ue8m0"


def test_files_are_named_and_indexed_as_the_official_ones(converted, convert, tmp_path):
    folder, middle = converted

    convert("to-hf", middle, tmp_path / "back", "--shard-gb", "0.0001")

    files = sorted(p.name for p in (tmp_path / "back").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    held = {}
    for file in files:
        with safe_open(tmp_path / "back" / file, framework="np") as opened:
            held |= dict.fromkeys(opened.keys(), file)
    assert index["weight_map"] == held
    theirs = json.loads((folder / "model.safetensors.index.json").read_text())
    assert held.keys() == theirs["weight_map"].keys()
    sizes = [(tmp_path / "back" / file).stat().st_size for file in files]
    assert index["metadata"]["total_size"] < sum(sizes) < index["metadata"]["total_size"] + 1e5
    order = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
             "model.layers.2.eh_proj.weight", "lm_head.weight"]  # fmt: skip
    assert [held[name] for name in order] == sorted(held[name] for name in order)


def test_a_file_is_no_larger_than_asked_for_unless_one_tensor_is(converted, convert, tmp_path):
    _, middle = converted

    convert("to-hf", middle, tmp_path / "back", "--shard-gb", "0.0001")

    limit = 0.0001 * 2**30
    for path in (tmp_path / "back").glob("*.safetensors"):
        with safe_open(path, framework="np") as opened:
            weights = [n for n in opened.keys() if not n.endswith("_scale_inv")]  # noqa: SIM118
        assert path.stat().st_size < limit + 10_000 or len(weights) == 1


def test_the_files_and_config_keys_of_the_source_come_back(converted, convert, tmp_path):
    folder, middle = converted

    convert("to-hf", middle, tmp_path / "back")

    for name in ("tokenizer.json", "encoding/readme.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    want = json.loads((folder / "config.json").read_text())
    have = json.loads((tmp_path / "back" / "config.json").read_text())
    # The same values; a whole number and a float of one value are equal.
    assert have == want
    assert not (tmp_path / "back" / "conversion").exists()


def test_a_training_run_becomes_official_files(training_run, convert, tmp_path, read_official):
    folder, weights = training_run(TINY)

    status, out, err = convert("to-hf", folder, tmp_path / "hf")

    assert status == DONE, err
    assert "tensors as bf16" in out
    have = read_official(tmp_path / "hf")
    code, shape, data = have["model.layers.1.mlp.experts.5.up_proj.weight"]
    want = np.asarray(weights.weights["moe_layers.moe.w3"])[0, 5].T.astype(ml_dtypes.bfloat16)
    assert (code, shape) == ("BF16", want.shape)
    assert data == np.ascontiguousarray(want).tobytes()
    code, shape, data = have["model.layers.0.self_attn.o_proj.weight"]
    wo = np.asarray(weights.weights["dense_layers.attn.wo"])[0]
    want = wo.reshape(-1, wo.shape[-1]).T.astype(ml_dtypes.bfloat16)
    assert data == np.ascontiguousarray(want).tobytes()
    _, _, data = have["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias = np.asarray(weights.router_bias["moe_layers.moe.gate.bias"])[0]
    assert data == bias.tobytes()
    embed, copy = (
        have[n] for n in ("model.embed_tokens.weight", "model.layers.2.embed_tokens.weight")
    )
    assert embed == copy
    assert have["lm_head.weight"] == have["model.layers.2.shared_head.head.weight"]
    model = load_model.load_model(tmp_path / "hf")
    assert parameters.flatten(model).weights.keys() == weights.weights.keys()


def test_the_config_of_a_run_is_the_official_one_of_its_model(training_run, convert, tmp_path):
    folder, _ = training_run(TINY)

    convert("to-hf", folder, tmp_path / "hf", "--dtype", "fp8")

    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["model_type"] == "deepseek_v32"
    assert raw["architectures"] == ["DeepseekV32ForCausalLM"]
    assert (raw["hidden_size"], raw["index_topk"], raw["n_routed_experts"]) == (32, 8, 8)
    assert raw["rope_scaling"] == {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert (raw["max_position_embeddings"], raw["rope_theta"]) == (64, 10000.0)
    assert raw["quantization_config"]["scale_fmt"] == "ue8m0"
    assert raw["quantization_config"]["weight_block_size"] == [128, 128]
    model = load_model.load_model(tmp_path / "hf")
    assert dataclasses.replace(model.cfg, indexer=TINY.indexer) == TINY


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        ({"tokenizer": "bytes"}, (256, 257)),
        ({"tokenizer": "gone/"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_config_of_a_run_names_the_tokens_of_its_tokenizer(
    training_run, convert, tmp_path, data, ids
):
    folder, _ = training_run(TINY)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"data": data}))

    status, _, err = convert("to-hf", folder, tmp_path / "hf")

    assert status == DONE
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == ids
    assert ("will not say which token ends a text" in err) == (data == {"tokenizer": "gone/"})


def test_config_and_tokenizer_may_come_from_an_official_folder(
    official, draw, training_run, convert, tmp_path
):
    theirs, raw, tensors = official(TINY, draw(TINY))
    official(raw=raw | {"eos_token_id": 77}, tensors=tensors)
    (theirs / "tokenizer.json").write_text("{}")
    folder, _ = training_run(TINY)

    status, _, err = convert("to-hf", folder, tmp_path / "hf", "--official", theirs)

    assert status == DONE, err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 77
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_another_models_official_folder_is_refused(official, draw, training_run, convert, tmp_path):
    other = dataclasses.replace(TINY, dim=40)
    theirs, _, _ = official(other, draw(other))
    folder, _ = training_run(TINY)

    status, _, err = convert("to-hf", folder, tmp_path / "hf", "--official", theirs)

    assert (status, "is of a model of other sizes" in err) == (WRONG_USAGE, True)


@pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/7"])
def test_a_runs_checkpoints_or_one_step_will_do(training_run, convert, tmp_path, inside):
    folder, _ = training_run(TINY)

    assert convert("to-hf", folder / inside, tmp_path / "hf")[0] == DONE


def drop_manifest(folder):
    next(folder.rglob("manifest.json")).unlink()


def drop_model(folder):
    (folder / "config.json").write_text("{}")


def flip_bit(folder, name="d/*"):
    path = max((folder / "checkpoints").rglob(name), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_width(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["model"]["dim"] = 40
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("break_it", "status", "message"),
    [
        (drop_manifest, FAILED, r"is whole \(7: manifest\.json is missing\)"),
        (flip_bit, FAILED, r"7 is damaged: .*/d/\S+ does not hold what was written"),
        (
            lambda f: flip_bit(f, "state/_METADATA"),
            FAILED, r"7 is damaged: .*/_METADATA does not hold what was written",
        ),
        (drop_model, WRONG_USAGE, r"config\.json has no model: .* is no training run"),
        (other_width, WRONG_USAGE, r"has shape \[1, 32, 16\], the config asks for \[1, 40, 16\]"),
    ],
)  # fmt: skip
def test_a_bad_checkpoint_is_named(training_run, convert, tmp_path, break_it, status, message):
    folder, _ = training_run(TINY)
    break_it(folder)

    got, _, err = convert("to-hf", folder, tmp_path / "hf")

    assert got == status
    assert re.search(f"error: .*{message}", err), err
    assert not (tmp_path / "hf").exists()


def test_weights_that_are_not_finite_are_named_and_leave_nothing_loadable(
    draw, training_run, convert, tmp_path, monkeypatch
):
    folder, _ = training_run(TINY)
    saved = jax.tree.map(np.array, draw(TINY, seed=5))
    saved.weights["moe_layers.moe.w2"][0, 3, 1, 1] = np.nan
    broken = checkpoint.Checkpoints(
        folder / "checkpoints", checkpoint.CheckpointConfig(every_steps=1)
    )
    broken.save(8, state.TrainState(saved, {}, jnp.int32(8)), data_state={}, meta={})
    broken.close()

    status, _, err = convert("to-hf", folder, tmp_path / "hf", "--dtype", "fp8")

    assert status == FAILED
    assert (
        "model.layers.1.mlp.experts.3.down_proj.weight: the checkpoint's moe_layers.moe.w2" in err
    )
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model.load_model(tmp_path / "hf")


def test_a_full_disk_is_said_in_one_line(training_run, convert, tmp_path, monkeypatch):
    folder, _ = training_run(TINY)

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(storage.Replacing, "__enter__", lambda self: full(self, Full()))
    status, _, err = convert("to-hf", folder, tmp_path / "hf")

    assert status == FAILED
    assert re.search(
        r"error: \S+model-00001-of-000001.safetensors could not be .*disk is full", err
    )
    assert not list((tmp_path / "hf").glob("*.safetensors*"))


def full(replacing, file):
    replacing._file = file
    return file


KILLED_AFTER = """
import os, signal, sys
from dsv32_jax.convert import __main__, safetensors_io
from dsv32_jax.convert.workers import Workers
Workers.__init__.__kwdefaults__["flush_seconds"] = 0.0
real, count = safetensors_io._byte_views, [0]
def byte_views(content):
    for view in real(content):
        count[0] += 1
        if count[0] == 60:
            os.kill(os.getpid(), signal.SIGKILL)
        yield view
safetensors_io._byte_views = byte_views
__main__.main(["to-hf", *sys.argv[1:], "--shard-gb", "0.0001", "--threads", "1"])
"""


def test_a_killed_export_goes_on_and_gives_the_same_bytes(converted, convert, tmp_path):
    _, middle = converted
    options = ("--shard-gb", "0.0001", "--threads", "1")
    convert("to-hf", middle, tmp_path / "whole", *options)

    target = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED_AFTER, str(middle), str(target)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model.load_model(target)
    status, _, err = convert("to-hf", middle, target, *options)

    assert status == DONE, err
    assert int(re.search(r"going on: (\d+) of \d+ parts", err)[1]) > 0
    files = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir() if p.is_file()}
    assert {p.name: p.read_bytes() for p in target.iterdir() if p.is_file()} == files


def test_a_finished_export_is_checked_and_damage_is_named(converted, convert, tmp_path):
    _, middle = converted
    convert("to-hf", middle, tmp_path / "back")

    status, out, _ = convert("to-hf", middle, tmp_path / "back")
    assert (status, "its headers agree, weights were not read again" in out) == (DONE, True)

    status, _, err = convert("to-hf", middle, tmp_path / "back", "--dtype", "bf16")
    assert (status, "holds an export of another checkpoint" in err) == (WRONG_USAGE, True)

    (tmp_path / "back" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    status, _, err = convert("to-hf", middle, tmp_path / "back")
    assert (status, "tokenizer.json is missing; remove it" in err) == (FAILED, True)
    (tmp_path / "tokenizer.json").rename(tmp_path / "back" / "tokenizer.json")

    path = next((tmp_path / "back").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    status, _, err = convert("to-hf", middle, tmp_path / "back")
    assert (status, "is truncated" in err) == (FAILED, True)
