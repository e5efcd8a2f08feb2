import ast
from pathlib import Path

import pytest

from dsv32_jax import config
from train import config_file
from train.evaluation.config import EvaluateConfig
from train.rl.run_config import GrpoConfig
from train.run_config import RunConfig
from train.sft_config import SftConfig

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(FOLDER.rglob("[!_]*.py"))
COMMANDS = {
    RunConfig: "pretrain",
    GrpoConfig: "grpo",
    SftConfig: "sft",
    EvaluateConfig: "evaluate",
}
DEFAULTS = ("grpo", "cold_start", "evaluate")  # of their commands, which need not name them


def test_speciale_is_the_reasoning_run_without_a_penalty_on_length():
    reasoning, speciale = map(config_file.load_config, ("v32_671b_grpo", "v32_671b_speciale"))

    assert reasoning.rewards.length is not None
    assert reasoning.rewards.weights[0].length > 0
    assert speciale.rewards.length is None
    assert speciale.rewards.weights[0].length == 0
    assert speciale.rl.rollouts.max_tokens > reasoning.rl.rollouts.max_tokens


def test_the_three_stages_have_a_config():
    assert {"dense.py", "warmup.py", "sparse.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_builds_a_run(path):
    assert type(config_file.load_config(str(path))) in COMMANDS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_says_how_and_on_what_it_is_run(path):
    text = ast.get_docstring(ast.parse(path.read_text()))

    command = COMMANDS[type(config_file.load_config(str(path)))]
    assert f"Command: python -m train.{command}" in text
    assert path.name in text or path.stem in DEFAULTS
    assert "\nHardware: " in text


@pytest.mark.parametrize(("name", "stages"), [
    ("dense", ("dense",)), ("warmup", ("dense", "warmup")), ("sparse", ("dense", "warmup", "sparse")),
])  # fmt: skip
def test_a_config_alone_runs_the_stages_before_its_own(name, stages):
    cfg = config_file.load_config(name)

    assert cfg.stages == stages
    assert cfg.init_from is None


@pytest.mark.parametrize("name", ["sparse", "sparse_gpu"])
def test_the_selection_leaves_out_most_keys(name):
    cfg = config_file.load_config(name)

    # Below 8 times the selected keys sparse attention is not put to the test.
    assert cfg.stage_data("sparse").seq_len >= 8 * cfg.model.indexer.topk


@pytest.mark.parametrize("name", ["sparse", "sparse_gpu"])
def test_the_selection_is_measured_against_both_controls(name):
    cfg = config_file.load_config(name)

    assert cfg.evidence.controls
    assert cfg.evidence.rows >= 64
    assert "does not show" in cfg.evidence.caveat


def test_the_default_runs_train_a_model_of_their_size():
    assert config_file.load_config("sparse").model == config.cpu_1m()
