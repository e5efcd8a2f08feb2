"""Runs of several processes on one machine, over gloo: they train as one, stop together, and say when one is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from train import hosts

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
FLOAT32_TOL = 2e-5  # sums over devices in another order


@pytest.fixture(scope="module")
def config_path(tiny_run, config_text, tmp_path_factory):
    """Write a config of the dense stage alone."""
    path = tmp_path_factory.mktemp("hosts") / "dense_only.py"
    data = replace(tiny_run.data, batch_size=8)
    path.write_text(config_text(replace(tiny_run, data=data, warmup=None, sparse=None)))
    return path


@pytest.fixture
def start(config_path, compilation_cache):
    """Return a function that starts n processes of one run, with 4 devices in all."""
    started = []

    def start(n, workdir, *overrides):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "train.pretrain", "--config", str(config_path)]
        command += ["--workdir", str(workdir), f"distributed={str(n > 1).lower()}", *overrides]
        for i in range(n):
            env = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // n}",
                "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
                "PYTHONPATH": str(ROOT),
                hosts.ADDRESS: f"127.0.0.1:{port}",
                hosts.COUNT: str(n),
                hosts.INDEX: str(i),
            }
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, env=env, text=True, **pipes))
        return started[-n:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(processes):
    """Wait for all; return what each wrote, and its status."""
    texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    return texts, [process.returncode for process in processes]


def wait_for(path, processes):
    for _ in range(10 * TIMEOUT_S):
        if path.is_dir():
            return
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    pytest.fail(f"no {path.name} in {TIMEOUT_S} s")


@pytest.fixture(scope="module")
def losses_of(lines_of):
    return lambda folder: [row["loss"] for row in lines_of(folder)]


@pytest.fixture(scope="module")
def expected(config_path, compilation_cache, losses_of, tmp_path_factory):
    """Return the losses of six steps of one process with one device."""
    from train import config_file, pretrain

    cfg = config_file.load_config(str(config_path))
    folder = tmp_path_factory.mktemp("one") / "run"
    folder.mkdir()
    assert pretrain.main(replace(cfg, dense=replace(cfg.dense, steps=6)), folder) == 0
    return losses_of(folder)


def test_four_processes_train_as_one_and_two_go_on(start, tmp_path, losses_of, expected):
    folder = tmp_path / "run"
    texts, statuses = ends(start(4, folder))
    assert statuses == [0] * 4, texts
    assert losses_of(folder) == pytest.approx(expected[:4], rel=FLOAT32_TOL)

    texts, statuses = ends(start(2, folder, "dense.steps=6"))

    assert statuses == [0] * 2, texts
    assert "resumed at step 4" in texts[0]
    assert losses_of(folder) == pytest.approx(expected, rel=FLOAT32_TOL)


def test_a_signal_to_one_process_stops_all_of_them_at_one_step(start, tmp_path, losses_of):
    folder = tmp_path / "run"
    processes = start(2, folder, "dense.steps=100000", "checkpoint.every_steps=10")
    wait_for(folder / "checkpoints" / "10", processes)
    processes[1].send_signal(signal.SIGTERM)

    texts, statuses = ends(processes)

    assert statuses == [128 + signal.SIGTERM] * 2, texts
    assert "SIGTERM at step" in texts[1]
    assert "a signal to another process at step" in texts[0]
    newest = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert f"/{newest};" in texts[0]
    assert len(losses_of(folder)) == newest


def test_the_others_say_that_a_process_is_gone(start, tmp_path):
    folder = tmp_path / "run"
    processes = start(2, folder, "dense.steps=100000", "checkpoint.every_steps=10")
    wait_for(folder / "checkpoints" / "10", processes)
    processes[1].kill()
    began = time.monotonic()

    text, _ = processes[0].communicate(timeout=TIMEOUT_S)

    assert time.monotonic() - began < 150
    assert processes[0].returncode != 0
    assert "a process of this run is gone; start all of them again" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {hosts.COUNT: "2"},
            "JAX_NUM_PROCESSES set but not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID",
        ),
        ({hosts.ADDRESS: "host", hosts.COUNT: "2", hosts.INDEX: "0"}, "host must be HOST:PORT"),
        ({hosts.ADDRESS: "h:1", hosts.COUNT: "two", hosts.INDEX: "0"}, "two must be a number"),
        (
            {hosts.ADDRESS: "h:1", hosts.COUNT: "2", hosts.INDEX: "2"},
            "JAX_PROCESS_ID=2 must be below",
        ),
    ],
)
def test_an_incomplete_environment_is_refused(monkeypatch, given, message):
    for name in (hosts.ADDRESS, hosts.COUNT, hosts.INDEX):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        hosts.bare_process()


def test_the_environment_says_which_process_this_is(monkeypatch):
    for name in (hosts.ADDRESS, hosts.COUNT, hosts.INDEX):
        monkeypatch.delenv(name, raising=False)
    assert hosts.bare_process() == {}
    for name, value in ((hosts.ADDRESS, "[::1]:8476"), (hosts.COUNT, "4"), (hosts.INDEX, "3")):
        monkeypatch.setenv(name, value)
    place = {"coordinator_address": "[::1]:8476", "num_processes": 4, "process_id": 3}
    assert hosts.bare_process() == place


def test_an_error_of_its_own_is_not_blamed_on_another_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="odd"), hosts.losses_named():
        raise ValueError("odd")
    with pytest.raises(WorkFailedError, match="is gone"), hosts.losses_named():
        raise ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
