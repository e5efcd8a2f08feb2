"""Continued pre-training from a converted checkpoint: DeepSeek-V3 weights, then warm-up of its new indexers."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv32_jax.convert import __main__ as convert
from train import overrides, pretrain, start
from train.checkpoint import Checkpoints
from train.state import TrainState


@pytest.fixture
def v3_folder(tiny_run, tiny_parameters, tmp_path):
    """Export a drawn model and take what V3 does not have out of it."""
    drawn = tiny_parameters
    run = tmp_path / "drawn"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(overrides.to_json_dict(tiny_run)))
    checkpoints = Checkpoints(run / "checkpoints", tiny_run.checkpoint)
    checkpoints.save(2, TrainState(drawn, {}, jnp.int32(2)), data_state={}, meta={"stage": "dense"})
    checkpoints.close()
    folder = tmp_path / "v3"
    assert convert.main(["to-hf", str(run), str(folder), "--dtype", "float32"]) == 0
    strip_indexers(folder)
    return folder, drawn


def strip_indexers(folder):
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if not key.startswith("index_")}
    (folder / "config.json").write_text(json.dumps(kept | {"model_type": "deepseek_v3"}))
    tensors = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        n = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + n]).items():
            if name != "__metadata__" and ".indexer." not in name:
                begin, end = (8 + n + offset for offset in entry["data_offsets"])
                data = np.frombuffer(content[begin:end], np.float32)
                tensors[name] = data.reshape(entry["shape"])
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")


INDEXER = ["--index-heads", "2", "--index-head-dim", "8", "--index-topk", "4"]


@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp8"])
def test_the_warm_up_of_a_converted_v3_trains_the_new_indexers_alone(
    v3_folder, tiny_run, mesh, tmp_path, dtype
):
    folder, drawn = v3_folder
    converted = tmp_path / "converted"
    options = [*INDEXER, "--dtype", dtype, "--seed", "5"]
    assert convert.main(["from-hf", str(folder), str(converted), *options]) == 0
    cfg = replace(tiny_run, dense=None, sparse=None, init_from=str(converted))
    (tmp_path / "run").mkdir()
    begin = jax.tree.map(np.asarray, start.find_start(cfg, mesh).load())

    assert pretrain.main(cfg, tmp_path / "run") == 0

    end = jax.tree.map(np.asarray, start.restore_parameters(cfg, tmp_path / "run", mesh))
    for name, array in begin.weights.items():
        assert array.dtype == np.float32
        trains = ".indexer." in name
        assert (not np.array_equal(end.weights[name], array)) == trains, name
        if dtype == "float32" and ".indexer." not in name:
            np.testing.assert_array_equal(array, drawn.weights[name], err_msg=name)
    for name, array in drawn.router_bias.items():
        np.testing.assert_array_equal(begin.router_bias[name], array)


def test_an_unfinished_conversion_is_no_start(v3_folder, tiny_run, mesh, tmp_path):
    folder, _ = v3_folder
    converted = tmp_path / "converted"
    assert convert.main(["from-hf", str(folder), str(converted), *INDEXER]) == 0
    (converted / "checkpoints" / "0" / "manifest.json").unlink()
    cfg = replace(tiny_run, dense=None, sparse=None, init_from=str(converted))

    with pytest.raises(Exception, match=r"manifest\.json is missing"):
        start.find_start(cfg, mesh)


def test_a_converted_checkpoint_of_another_model_is_refused(v3_folder, tiny_run, mesh, tmp_path):
    folder, _ = v3_folder
    converted = tmp_path / "converted"
    assert convert.main(["from-hf", str(folder), str(converted), "--index-topk", "4"]) == 0
    cfg = replace(tiny_run, dense=None, sparse=None, init_from=str(converted))

    with pytest.raises(ValueError, match=r"is of another model \(.*model\.indexer\.head_dim"):
        start.find_start(cfg, mesh)
