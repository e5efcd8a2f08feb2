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


def start(n, folder, cache):
    """Start n processes of one run, with two devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "train.grpo", "--config", str(HERE / "small_grpo.py")]
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
