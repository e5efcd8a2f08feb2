import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from dsv32_jax import config, errors, load_model, parameters, sharding
from train import checkpoint, overrides, state

CFG = dataclasses.replace(config.tiny(), n_layers=2, dtype="bfloat16")
SETTINGS = checkpoint.CheckpointConfig(every_steps=1, keep_last=5)


@dataclasses.dataclass(frozen=True)
class Run:
    model: config.ModelConfig = CFG
    steps: int = 10


@functools.cache
def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = parameters.abstract(CFG)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Make a run with checkpoints of steps 9 and 10, as the training commands write them."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(overrides.to_json_dict(Run())))
    checkpoints = checkpoint.Checkpoints(folder / "checkpoints", SETTINGS)
    for step in (9, 10):
        weights = draw(step)
        moments = {"mu": weights.weights, "count": jnp.zeros((), jnp.int32)}
        whole = state.TrainState(weights, moments, jnp.int32(step))
        checkpoints.save(step, whole, data_state={}, meta={})
    checkpoints.close()
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


def assert_is_step(model, step):
    got = parameters.flatten(model)
    for have, want in zip(got, draw(step), strict=True):
        assert have.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(have[name], want[name])


def flip_a_bit(step_folder):
    path = max((p for p in step_folder.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("inside", "step"), [("", 10), ("checkpoints", 10), ("checkpoints/9", 9)])
def test_each_folder_of_a_run_gives_its_weights(run, inside, step):
    assert_is_step(load_model.load_model(run / inside), step)


def test_the_folder_may_be_the_working_directory(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints" / "9")

    assert_is_step(load_model.load_model(Path(".")), 9)


def test_the_dtype_is_the_callers_and_the_rest_of_the_config_the_runs(run):
    assert load_model.load_model(run).cfg == dataclasses.replace(CFG, dtype="float32")
    assert load_model.load_model(run, "bfloat16").cfg == CFG


def test_for_running_only_weights_are_kept_as_their_products_have_them(run):
    narrow = load_model.load_model(run, "bfloat16", narrow=True)
    wide = load_model.load_model(run, "bfloat16")
    for have, full in zip(parameters.flatten(narrow), parameters.flatten(wide), strict=True):
        for name, value in full.items():
            kept = have[name]
            float32 = name.split(".")[-2:][0] in ("gate",) or "norm" in name or name == "head"
            float32 |= name.endswith("weights_proj")
            assert kept.dtype == (jnp.float32 if float32 else jnp.bfloat16), name
            np.testing.assert_array_equal(kept, value.astype(kept.dtype), err_msg=name)


def test_on_a_mesh_every_parameter_lies_where_the_table_says(run):
    mesh = sharding.make_mesh(sharding.MeshConfig())
    model = load_model.load_model(run, mesh=mesh)
    assert_is_step(model, 10)
    places = parameters.shardings(model.cfg, mesh, training=False)
    found = jax.tree.map(lambda x: x.sharding, parameters.flatten(model))
    assert found == places


def test_steps_are_compared_as_numbers_and_damaged_ones_passed_over(run, caplog):
    flip_a_bit(run / "checkpoints" / "10")

    assert_is_step(load_model.load_model(run), 9)
    assert "passing over checkpoint" in caplog.text
    assert "its checksum differs" in caplog.text


def test_an_unfinished_step_is_passed_over(run):
    (run / "checkpoints" / "11.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints" / "12").mkdir()

    assert_is_step(load_model.load_model(run), 10)


def test_a_run_without_a_whole_step_says_what_is_wrong_with_each(run):
    flip_a_bit(run / "checkpoints" / "10")
    (run / "checkpoints" / "9" / "manifest.json").unlink()

    with pytest.raises(errors.WorkFailedError, match=r"is whole \(10: .* 9: manifest\.json is mi"):
        load_model.load_model(run)


def test_a_damaged_step_that_was_asked_for_is_not_replaced(run):
    flip_a_bit(run / "checkpoints" / "10")

    with pytest.raises(errors.WorkFailedError, match=r"checkpoints/10 is damaged: .*differs"):
        load_model.load_model(run / "checkpoints" / "10")


def change_config(run, **fields):
    raw = json.loads((run / "config.json").read_text())
    raw["model"] |= fields
    (run / "config.json").write_text(json.dumps(raw))


def test_weights_of_another_model_are_named_with_both_shapes(run):
    change_config(run, dim=40)

    with pytest.raises(ValueError, match=r"does not fit the run's config.json: parameters\..*here"):
        load_model.load_model(run)


def test_a_config_with_a_field_of_another_version_is_named(run):
    change_config(run, widgets=3)

    with pytest.raises(ValueError, match="ModelConfig has no field 'widgets'"):
        load_model.load_model(run)


def test_there_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        load_model.load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a file; needed is a folder in the official layout"):
        load_model.load_model(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no config\.json; needed is a folder"):
        load_model.load_model(tmp_path)


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": 3}')

    with pytest.raises(ValueError, match=r"no model_type in its config\.json, as the official"):
        load_model.load_model(tmp_path)


def test_checkpoints_beside_another_programs_config_are_refused(run):
    (run / "config.json").write_text('{"model_type": "other"}')

    with pytest.raises(ValueError, match=r"has no model: .*run is no training run"):
        load_model.load_model(run / "checkpoints")


def test_a_config_must_be_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: Expecting"):
        load_model.load_model(tmp_path)

    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json must hold an object"):
        load_model.load_model(tmp_path)


def test_a_run_that_has_saved_nothing_is_told_apart_from_a_damaged_one(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="no checkpoints folder, as a training run that has saved"):
        load_model.load_model(run)

    (run / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="checkpoints holds no checkpoint"):
        load_model.load_model(run)


def test_checkpoints_without_their_runs_config_are_refused(run):
    (run / "config.json").unlink()

    with pytest.raises(FileNotFoundError, match=r"run has no config\.json"):
        load_model.load_model(run / "checkpoints")


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/10"])
def test_the_dtype_to_run_in_is_a_runs_own_or_the_official_configs(run, inside):
    assert load_model.saved_dtype(run / inside) == "bfloat16"
    change_config(run, dtype="float32")
    assert load_model.saved_dtype(run / inside) == "float32"
    (run / "official").mkdir()
    for key, value, expected in (
        ("torch_dtype", "bfloat16", "bfloat16"), ("dtype", "float32", "float32"), ("x", 1, "bfloat16"),
    ):  # fmt: skip
        raw = {"model_type": "deepseek_v32", key: value}
        (run / "official" / "config.json").write_text(json.dumps(raw))
        assert load_model.saved_dtype(run / inside) == expected


def write_tokenizer(folder, *words):
    """Save a tokenizer of a few words."""
    vocab = {word: i for i, word in enumerate(("<s>", "</s>", *words))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))


def name_bytes(run):
    raw = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(raw | {"data": {"tokenizer": "bytes"}}))


@pytest.mark.parametrize("place", [".", "official"])
@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/10"])
def test_a_folders_own_tokenizer_comes_before_the_one_it_names(run, place, inside):
    name_bytes(run)
    write_tokenizer(run / place, "one", "two", "three")
    assert load_model.load_tokenizer_of(run / inside).vocab_size == 5


def test_a_runs_tokenizer_is_the_one_it_was_trained_with(run):
    name_bytes(run)
    assert load_model.load_tokenizer_of(run / "checkpoints" / "9").vocab_size == 259


def test_a_run_of_reinforcement_learning_names_its_tokenizer_at_the_top(run, tmp_path):
    write_tokenizer(tmp_path, "one", "two", "three")
    raw = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(raw | {"tokenizer": str(tmp_path)}))

    assert load_model.load_tokenizer_of(run).vocab_size == 5


def test_a_given_tokenizer_comes_first(run, tmp_path):
    write_tokenizer(run, "one")
    write_tokenizer(tmp_path / "other", "one", "two")
    assert load_model.load_tokenizer_of(run, str(tmp_path / "other")).vocab_size == 4
    assert load_model.load_tokenizer_of(run, "bytes").vocab_size == 259


def test_without_any_tokenizer_the_option_is_named(run):
    with pytest.raises(FileNotFoundError, match="give --tokenizer"):
        load_model.load_tokenizer_of(run)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_model.load_tokenizer_of(run / "nowhere")
