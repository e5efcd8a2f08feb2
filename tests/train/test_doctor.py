import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_jax.convert import storage
from train import doctor, hosts

ROOT = Path(__file__).parents[2]
PLACE = doctor.Place("h", 1, 2, 0)


def said(index, **changes):
    base = doctor.Report(index, 2, f"host{index}", {"python": "3.12", "jax": "0.11.2"}, 100.0, [])
    return dataclasses.replace(base, **changes), 100.2


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(port, index, count=2, *arguments, env=()):
    variables = {
        hosts.ADDRESS: f"127.0.0.1:{port}",
        hosts.COUNT: str(count),
        hosts.INDEX: str(index),
    }
    env = os.environ | variables | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | dict(env)
    command = [sys.executable, "-m", "train.doctor", "--timeout", "20", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def ends(*processes):
    return [(process.communicate(timeout=120)[0], process.returncode) for process in processes]


def test_processes_that_agree_are_told_so(port, tmp_path):
    results = ends(run(port, 0, 2, "--storage", str(tmp_path)), run(port, 1))
    for text, status in results:
        assert "all 2 processes are there and agree" in text
        assert status == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_does_not_come_is_named_to_the_others(port):
    results = ends(run(port, 0, 3, "--timeout", "8"), run(port, 2, 3))
    for text, status in results:
        assert "wrong: 2 of 3 processes came; missing: 1" in text
        assert status == 1


def test_a_port_nobody_listens_on_is_named(port):
    ((text, status),) = ends(run(port, 1, 2, "--timeout", "1"))
    assert f"127.0.0.1:{port} cannot be reached" in text
    assert status == 1


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        ((text, status),) = ends(run(port, 0, 1))
    assert f"port {port} cannot be listened on" in text
    assert status == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in storage.writing_problem(str(tmp_path / "file" / "runs"))
    assert storage.writing_problem(str(tmp_path / "runs")) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"versions": {"python": "3.12", "jax": "0.12"}},
            "process 1 (host1) has jax 0.12, process 0 0.11.2",
        ),
        ({"time": 160.2}, "process 1 (host1): its clock is +60 s off process 0's"),
        ({"count": 3}, "process 1 (host1) thinks there are 3 processes, process 0 2"),
        ({"problems": ["disk"]}, "process 1 (host1): disk"),
    ],
)
def test_what_differs_between_processes_is_said(changes, line):
    assert doctor.problems_between({0: said(0), 1: said(1, **changes)}, PLACE) == [line]


def test_processes_that_agree_have_no_problem():
    assert doctor.problems_between({0: said(0), 1: said(1)}, PLACE) == []


def test_a_slurm_job_says_its_own_place(monkeypatch):
    for name in (hosts.ADDRESS, hosts.COUNT, hosts.INDEX):
        monkeypatch.delenv(name, raising=False)
    job = {"SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "node[007-009]", "SLURM_NTASKS": "3"}
    job |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "3"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert doctor.find_place(5) == doctor.Place("node007", 61440, 3, 2)
