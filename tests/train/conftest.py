import fcntl
import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv32_jax import joining, parameters, sharding
from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig
from dsv32_jax.convert.storage import Location
from dsv32_jax.parameters import Parameters
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig, Source
from train.metrics import MetricsConfig
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import EvidenceConfig, RunConfig, StageConfig

ROOT = Path(__file__).parents[2]
SEQ_LEN = 16

# Compilation is most of these tests' time: the tiny models need no fast code, and equal programs compile once.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Share compiled programs with subprocesses; JAX_COMPILATION_CACHE_DIR keeps them between sessions."""
    before = jax.config.jax_compilation_cache_dir
    folder = before or str(tmp_path_factory.mktemp("compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="session")
def tiny_model() -> ModelConfig:
    """Every part of the model, one layer of each kind, as few dims as each part allows."""
    return ModelConfig(
        vocab_size=260,
        dim=16,
        n_layers=2,
        n_dense_layers=1,
        ffn_dim=16,
        mla=MLAConfig(n_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_dim=4, rope_dim=4, v_dim=4),
        indexer=IndexerConfig(n_heads=2, head_dim=8, topk=4),
        moe=MoEConfig(n_experts=8, n_active=2, n_groups=2, n_active_groups=1, expert_dim=8),
        rope=YarnConfig(factor=4.0, original_len=8),
        init_std=0.2,
    )


@pytest.fixture(scope="session")
def one_layer(tiny_model: ModelConfig) -> ModelConfig:
    """One expert layer and the MTP module, with a small vocabulary."""
    return replace(tiny_model, n_layers=1, n_dense_layers=0, vocab_size=24)


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """Return the mesh of one device."""
    return sharding.make_mesh(sharding.MeshConfig(), devices=jax.devices()[:1])


@dataclass(eq=False)
class Chip:
    """A TPU's place, which is all that estimates ask of one."""

    id: int
    coords: tuple[int, ...]
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5p"
    process_index: int = 0
    core_on_chip: int = 0


@pytest.fixture(scope="session")
def chips() -> Callable[..., list[Chip]]:
    """Return a function of a torus' shape and the number of slices that lists the chips."""

    def make(shape: tuple[int, ...], slices: int = 1) -> list[Chip]:
        places = [(s, c) for s in range(slices) for c in itertools.product(*map(range, shape))]
        return [Chip(i, coords, s) for i, (s, coords) in enumerate(places)]

    return make


@pytest.fixture(scope="session")
def torus(chips: Callable[..., list[Chip]]) -> Callable[..., jax.sharding.Mesh]:
    """Return a function of a torus' shape and sizes of mesh axes that lays the chips out in order."""

    def make(shape: tuple[int, ...], slices: int = 1, **sizes: int) -> jax.sharding.Mesh:
        devices = np.empty(math.prod(shape) * slices, object)
        devices[:] = chips(shape, slices)
        grid = devices.reshape([sizes.get(axis, 1) for axis in sharding.AXES])
        return jax.sharding.Mesh(grid, sharding.AXES)

    return make


@pytest.fixture(scope="session")
def tiny_parameters(tiny_model: ModelConfig, mesh: jax.sharding.Mesh) -> Parameters:
    """Return a drawn model as numpy arrays, which no step can donate."""
    return jax.tree.map(np.asarray, parameters.initialise(tiny_model, 0, mesh))


@pytest.fixture(scope="session")
def one_layer_parameters(one_layer: ModelConfig, mesh: jax.sharding.Mesh) -> Parameters:
    """Return a drawn one-layer model, its router bias off zero."""
    params = jax.tree.map(np.asarray, parameters.initialise(one_layer, 1, mesh))
    bias = {
        name: np.linspace(-0.1, 0.1, b.size, dtype=np.float32).reshape(b.shape)
        for name, b in params.router_bias.items()
    }
    return params._replace(router_bias=bias)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that is the same for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def corpus_path(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write documents shorter and longer than a row; a run's config names this file, so it is one for all workers."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    texts = ("".join(rng.choice(list("abcd "), size=n)) for n in rng.integers(3, 40, size=80))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if not (shared := shared_folder / path.name).exists():
        path.replace(shared)
    return shared


@pytest.fixture(scope="session")
def tiny_run(tiny_model: ModelConfig, corpus_path: Path) -> RunConfig:
    """Every stage for a few steps, a checkpoint every second step, no evidence."""
    main, indexer = Schedule(peak=1e-2, warmup_steps=2), Schedule(peak=2e-2)
    return RunConfig(
        model=tiny_model,
        data=DataConfig(
            sources=(Source(path=str(corpus_path)),),
            seq_len=SEQ_LEN,
            batch_size=4,
            seed=0,
            heldout_fraction=0.3,
        ),
        dense=StageConfig(steps=4, optimizer=OptimizerConfig(main=main)),
        warmup=StageConfig(steps=3, optimizer=OptimizerConfig(indexer=indexer)),
        sparse=StageConfig(steps=4, optimizer=OptimizerConfig(main=main, indexer=indexer)),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=3, keep_best=0, async_save=False),
        metrics=MetricsConfig(tensorboard=False),
    )


@pytest.fixture(scope="session")
def run_with_evidence(tiny_run: RunConfig) -> RunConfig:
    """The tiny run with both controls and the measurements."""
    return replace(tiny_run, evidence=EvidenceConfig(rows=8, rows_per_batch=4, caveat="Too small."))


@pytest.fixture(scope="session")
def whole_run(run_with_evidence: RunConfig, shared_folder: Path) -> Path:
    """Return the folder of a finished run with evidence, which all workers of pytest-xdist read."""
    from train import pretrain

    workdir = shared_folder / "whole_run"
    with (shared_folder / "whole_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workdir / pretrain.SUMMARY_FILE).is_file():
            workdir.mkdir(exist_ok=True)
            assert pretrain.main(run_with_evidence, workdir) == 0
    return workdir


@pytest.fixture(scope="session")
def weights_of(run_with_evidence: RunConfig, mesh: jax.sharding.Mesh) -> Callable[[Path], dict]:
    """Read the parameters that a folder's newest checkpoint holds."""
    from train import start

    def read(folder: Path) -> dict:
        found = start.restore_parameters(run_with_evidence, folder, mesh)
        return jax.tree.map(np.asarray, found.weights | found.router_bias)

    return read


@pytest.fixture(scope="session")
def config_text() -> Callable[[RunConfig], str]:
    """Write a config as the Python file that `--config` takes."""

    def write(cfg: RunConfig) -> str:
        modules = (
            "dsv32_jax.config",
            "dsv32_jax.sharding",
            "train.checkpoint",
            "train.data.config",
        )
        modules += (
            "train.divergence",
            "train.metrics",
            "train.optimizer",
            "train.run_config",
            "train.step",
        )
        imports = "".join(f"from {module} import *\n" for module in modules)
        return f"{imports}\n\ndef get_config():\n    return {cfg!r}\n"

    return write


@pytest.fixture(scope="session")
def lines_of() -> Callable[[Path], list[dict]]:
    """Read a folder's metrics without the rates, which no two runs share."""

    def read(folder: Path) -> list[dict]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rates = {"seconds_per_step", "tokens_per_second", "mfu"}
        return [{k: v for k, v in row.items() if k not in rates} for row in rows]

    return read


@pytest.fixture
def start(
    config_path: Path, compilation_cache: str
) -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """Return a function that starts n processes of one run, with 4 devices in all; `config_path` is the module's."""
    started: list[subprocess.Popen] = []

    def start(
        n: int, workdir: Location, *overrides: str, config: Path = config_path
    ) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "train.pretrain", "--config", str(config)]
        command += ["--workdir", str(workdir), f"distributed={str(n > 1).lower()}", *overrides]
        for i in range(n):
            env = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // n}",
                "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",  # as here
                "PYTHONPATH": str(ROOT),
                joining.ADDRESS: f"127.0.0.1:{port}",
                joining.COUNT: str(n),
                joining.INDEX: str(i),
            }
            out, err = subprocess.PIPE, subprocess.STDOUT
            started.append(subprocess.Popen(command, env=env, text=True, stdout=out, stderr=err))
        return started[-n:]

    yield start
    for process in started:
        process.kill()
        process.communicate()
