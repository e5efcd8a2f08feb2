import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from dsv32_jax import joining

HERE = pathlib.Path(__file__).parent


def start(n, folder, cache, config=HERE / "small_grpo.py"):
    """Start n processes of one run, with two devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "train.grpo", "--config", str(config)]
    command += ["--workdir", str(folder), f"distributed={str(n > 1).lower()}"]
    processes = []
    for i in range(n):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // n}",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
            "PYTHONPATH": str(HERE.parents[1]),
            joining.ADDRESS: f"127.0.0.1:{port}",
            joining.COUNT: str(n),
            joining.INDEX: str(i),
        }
        out, err = subprocess.PIPE, subprocess.STDOUT
        processes.append(subprocess.Popen(command, env=env, text=True, stdout=out, stderr=err))
    return processes


@pytest.mark.slow
def test_two_processes_learn_what_one_does(compilation_cache, tmp_path):
    rows, summaries = [], []
    for n in (1, 2):
        folder = tmp_path / str(n)
        for process in start(n, folder, compilation_cache):
            out, _ = process.communicate(timeout=600)
            assert process.returncode == 0, out[-3000:]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
        summaries.append(json.loads((folder / "summary.json").read_text()))

    one, two = rows
    assert [row["step"] for row in two] == [1, 2]
    for name in ("reward/mean", "length", "entropy", "loss", "grad_norm", "ratio/mean"):
        expected = [row[name] for row in one]
        np.testing.assert_allclose([row[name] for row in two], expected, rtol=1e-3, atol=1e-5)
    assert summaries[0].keys() == summaries[1].keys()


# Appended to the small run: its tasks have a rubric, and a judge that has no key, or is not there. A cold start long
# enough that responses end: one that is cut has no answer to be judged.
JUDGED = """
from train.rl.judge import JudgeConfig
from train.rl.rewards import Weights
from train.rl.task_source import TaskFile

plain = get_config


def get_config():
    base = plain()
    judge = JudgeConfig(base_url="http://127.0.0.1:9/v1", model="m", give_up_s=0.1, api_key_env={key!r})
    rewards = dataclasses.replace(base.rewards, weights=(Weights(correct=0.0, judge=1.0),), judge=judge)
    tasks = TaskConfig(files=(TaskFile(path={tasks!r}),), held_out_fraction=0.3)
    dense = dataclasses.replace(base.cold_start.dense, steps=100)
    cold = dataclasses.replace(base.cold_start, dense=dense)
    return dataclasses.replace(base, rewards=rewards, tasks=tasks, cold_start=cold)
"""


def ends_of_a_judged_run(folder, cache, key):
    tasks = [{"question": f"q{i}", "answer": "a", "rubric": "r"} for i in range(40)]
    path, config = folder / "tasks.jsonl", folder / "judged.py"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    text = (HERE / "small_grpo.py").read_text()
    config.write_text(text + JUDGED.format(key=key, tasks=str(path)))
    processes = start(2, folder / "run", cache, config)
    texts = [process.communicate(timeout=600)[0] for process in processes]
    errors = [[line for line in text.splitlines() if "error:" in line] for text in texts]
    assert not any("Traceback" in text for text in texts), texts
    return [process.returncode for process in processes], errors


def test_a_judge_without_its_key_ends_both_processes_before_anything_is_trained(
    compilation_cache, tmp_path
):
    codes, errors = ends_of_a_judged_run(tmp_path, compilation_cache, "DSV32_NO_SUCH_KEY")

    assert codes == [2, 2]
    line = "error: the judge's key is missing: set the variable DSV32_NO_SUCH_KEY"
    assert errors == [[line]] * 2
    assert not (tmp_path / "run/cold_start").exists()


@pytest.mark.slow
def test_a_judge_that_is_down_for_process_0_ends_both(compilation_cache, tmp_path):
    codes, errors = ends_of_a_judged_run(tmp_path, compilation_cache, "")

    assert codes == [1, 1]
    assert [len(lines) for lines in errors] == [1, 1]
    assert errors[0] == errors[1]
    assert "error: the judge at http://127.0.0.1:9/v1 is down for" in errors[0][0]
