"""Training on eight devices, then four, then one, is training on one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv32_jax import parameters
from train.checkpoint import CheckpointConfig
from train.data.corpus import open_corpora
from train.loop import Leg, run_leg
from train.start import restore_parameters

ROOT = Path(__file__).parents[2]
RTOL = 2e-4  # float32 sums over devices in another order, through six steps of a rate of 0.01
# Runs this file as a module, for its `train`.
SCRIPT = """
import runpy
import sys
from pathlib import Path
import jax
from dsv32_jax import sharding
from dsv32_jax.sharding import MeshConfig
from train import config_file
train = runpy.run_path(sys.argv[3])["train"]
cfg, folder = config_file.load_config(sys.argv[1]), Path(sys.argv[2])
eight = sharding.make_mesh(MeshConfig(ici_fsdp=2, ici_expert=2, ici_tensor=2))
train(cfg, folder, eight, 2)
four = sharding.make_mesh(MeshConfig(ici_fsdp=2, ici_expert=2), devices=jax.devices()[:4])
train(cfg, folder, four, 4)
"""


def train(cfg, folder, mesh, steps):
    """Train the sparse stage from a new model up to a step."""
    cfg.check_mesh(mesh)
    config = replace(cfg.sparse, steps=steps)
    leg = Leg("sparse", "sparse", config, cfg.stage_data("sparse"), folder)
    with jax.set_mesh(mesh):
        run_leg(
            cfg, leg, mesh, open_corpora(cfg.data),
            lambda: parameters.initialise(cfg.model, cfg.seed, mesh),
        )  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_run):
    """One expert layer: programs for many devices take long to compile."""
    model = replace(tiny_run.model, n_layers=1, n_dense_layers=0, mtp=False)
    return replace(tiny_run, model=model, checkpoint=CheckpointConfig(every_steps=2, keep_last=9))


def test_a_run_goes_on_with_fewer_devices_as_if_it_had_had_one(
    run, mesh, config_text, compilation_cache, lines_of, tmp_path
):
    (tmp_path / "mine.py").write_text(config_text(run))
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_COMPILATION_CACHE_DIR": compilation_cache,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "mine.py"), str(tmp_path / "run"), __file__],
        cwd=ROOT, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [row["step"] for row in lines_of(tmp_path / "run")] == [1, 2, 3, 4]

    train(run, tmp_path / "run", mesh, 6)
    train(run, tmp_path / "one", mesh, 6)

    found, expected = lines_of(tmp_path / "run"), lines_of(tmp_path / "one")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        # Two devices have the experts up to step 4, then one.
        device_loads = ours.pop("max_device_load"), theirs.pop("max_device_load")
        assert device_loads[0] >= device_loads[1] == 1
        assert ours["step"] <= 4 or device_loads[0] == 1
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=RTOL)
    folders = (tmp_path / "run", tmp_path / "one")
    ours, theirs = (restore_parameters(run, folder, mesh).weights for folder in folders)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-3, err_msg=name)
