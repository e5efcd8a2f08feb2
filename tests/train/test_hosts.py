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

from dsv32_jax import joining
from dsv32_jax.errors import OthersMissingError
from train import hosts

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
FLOAT32_TOL = 2e-5  # sums over devices in another order
# Appended to a config: jax takes a process for gone when it has been silent for so long, by default for 100 s.
SILENCE_S = 20
SHORT_SILENCE = f"""
import functools, jax

jax.distributed.initialize = functools.partial(
    jax.distributed.initialize, heartbeat_timeout_seconds={SILENCE_S}
)
"""
# Appended to a config, which every process reads: one of them is killed in its second save.
KILLED_AMID_ITS_ARRAYS = """
import os, pathlib, signal, sys
from orbax.checkpoint import type_handlers

written, saves = type_handlers.ArrayHandler.serialize, []

async def serialize(*args, **kwargs):
    futures = await written(*args, **kwargs)
    saves.append(futures)
    if len(saves) == 2:
        for future in futures:  # its own arrays are on disk then, and the step is not whole
            future.result()
        folder = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1])
        assert list(folder.glob("checkpoints/4.*/state*/ocdbt.process_1*/*"))
        os.kill(os.getpid(), signal.SIGKILL)
    return futures

if os.environ["JAX_PROCESS_ID"] == "1":
    type_handlers.ArrayHandler.serialize = serialize
"""
KILLED_BEFORE_THE_MANIFEST = """
import os, signal
from dsv32_jax import manifest

written, saves = manifest.write_manifest, []

def write_manifest(*args, **kwargs):
    saves.append(args)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    written(*args, **kwargs)

manifest.write_manifest = write_manifest  # Orbax calls it on process 0
"""


@pytest.fixture(scope="module")
def config_path(tiny_run, config_text, tmp_path_factory):
    """Write a config of the dense stage alone, of one expert layer: each process compiles it for itself."""
    path = tmp_path_factory.mktemp("hosts") / "dense_only.py"
    data = replace(tiny_run.data, batch_size=8)
    model = replace(tiny_run.model, n_layers=1, n_dense_layers=0, mtp=False)
    path.write_text(
        config_text(replace(tiny_run, model=model, data=data, warmup=None, sparse=None))
    )
    return path


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 42), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_to_one_process_stops_all_of_them_at_one_step(
    start, tmp_path, losses_of, number, status
):
    folder = tmp_path / "run"
    saving = ("checkpoint.every_steps=10", "--restart-status=42")
    processes = start(2, folder, "dense.steps=100000", *saving)
    wait_for(folder / "checkpoints" / "10", processes)
    processes[1].send_signal(number)

    texts, statuses = ends(processes)

    assert statuses == [status] * 2, texts
    assert f"{number.name} at step" in texts[1]
    assert f"{number.name} to another process at step" in texts[0]
    newest = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert f"/{newest};" in texts[0]
    assert len(losses_of(folder)) == newest


def test_a_sigterm_before_the_first_step_is_not_lost(free_port):
    script = """
import os, signal
from dsv32_jax import command_line
from dsv32_jax import joining
with command_line.Boundary() as boundary, command_line.sigterm_raises():
    joining.join()
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached")
os._exit(boundary.status)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env |= {joining.ADDRESS: f"127.0.0.1:{free_port}", joining.COUNT: "1", joining.INDEX: "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 143, done.stderr
    assert "stopped by SIGTERM; run the same command to go on" in done.stderr
    assert done.stdout == ""


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
    ("victim", "killing", "async_save"),
    [
        (1, KILLED_AMID_ITS_ARRAYS, True),
        pytest.param(0, KILLED_BEFORE_THE_MANIFEST, False, marks=pytest.mark.slow),
    ],
    ids=["amid the arrays", "before the manifest"],
)
def test_a_process_killed_in_a_save_costs_that_save_alone(
    start, config_path, tmp_path, losses_of, expected, victim, killing, async_save
):
    folder, config = tmp_path / "run", tmp_path / "killed.py"
    config.write_text(config_path.read_text() + SHORT_SILENCE + killing)
    saving = f"checkpoint.async_save={str(async_save).lower()}"
    processes = start(2, folder, "dense.steps=6", saving, config=config)
    processes[victim].wait(timeout=TIMEOUT_S)
    began = time.monotonic()

    texts, statuses = ends(processes)

    assert time.monotonic() - began < 3 * SILENCE_S
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] not in (0, -signal.SIGKILL)
    assert "another task died" in texts[1 - victim]  # jax's own words
    assert [path.name for path in folder.glob("checkpoints/*[0-9]")] == ["2"]

    texts, statuses = ends(start(2, folder, "dense.steps=6"))

    assert statuses == [0, 0], texts
    assert "resumed at step 2" in texts[0]
    assert losses_of(folder) == pytest.approx(expected, rel=FLOAT32_TOL)


def test_an_error_of_its_own_is_not_blamed_on_another_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="odd"), hosts.losses_named():
        raise ValueError("odd")
    with pytest.raises(OthersMissingError, match="is gone"), hosts.losses_named():
        raise ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")


ASKED_OF_PROCESS_0 = """
import jax
from dsv32_jax import joining
from dsv32_jax.errors import UsageError, WorkFailedError
from train import hosts

def raising(error):
    assert jax.process_index() == 0, "only process 0 computes"
    if error is not None:
        raise error
    return {"rewards": [1.5, None, "\u00e9"]}

joining.join()
for error in (None, WorkFailedError("the judge is down"), UsageError("no key"), None):
    try:
        print("value", hosts.as_process_0(lambda: raising(error)))
    except (UsageError, WorkFailedError) as caught:
        print(type(caught).__name__, caught)
"""


def test_what_process_0_computes_or_raises_is_every_process(free_port):
    processes = []
    for i in range(2):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "PYTHONPATH": str(ROOT),
            joining.ADDRESS: f"127.0.0.1:{free_port}",
            joining.COUNT: "2",
            joining.INDEX: str(i),
        }
        command = [sys.executable, "-c", ASKED_OF_PROCESS_0]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, text=True, stdout=pipe, stderr=pipe))
    told = [process.communicate(timeout=TIMEOUT_S) for process in processes]

    value = "value {'rewards': [1.5, None, '\u00e9']}"
    expected = [value, "WorkFailedError the judge is down", "UsageError no key", value]
    said = [out.splitlines()[-len(expected) :] for out, _ in told]  # behind what gloo says
    assert said == [expected] * 2, told
