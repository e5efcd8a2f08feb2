import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv32_jax import joining, rendezvous
from dsv32_jax.convert import storage
from train import doctor

ROOT = Path(__file__).parents[2]


def said(index, *, time=100.0, **changes):
    about = {"versions": {"python": "3.12", "jax": "0.11.2"}, "problems": []} | changes
    greeting = rendezvous.Greeting("train.doctor", index, 2, f"host{index}", time, about)
    return greeting, 100.2


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(port, index, count=2, *arguments, env=()):
    variables = {
        joining.ADDRESS: f"127.0.0.1:{port}",
        joining.COUNT: str(count),
        joining.INDEX: str(index),
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
    assert f"process 0 was not reached at 127.0.0.1:{port}" in text
    assert "is process 0 running the doctor" in text
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


NOBODY = {
    "STORAGE_EMULATOR_HOST": "",
    "GOOGLE_APPLICATION_CREDENTIALS": "",
    "CLOUDSDK_CONFIG": "/nonexistent",
    "NO_GCE_CHECK": "true",  # a metadata server is not looked for on the network
}


def test_buckets_without_credentials_are_named_in_a_line_each(port):
    pytest.importorskip("gcsfs", reason="needs the extra gcs")
    buckets = ("gs://a/runs", "gs://b/runs")
    ((text, status),) = ends(run(port, 0, 1, "--storage", *buckets, env=NOBODY))
    problems = [line for line in text.splitlines() if line.startswith("wrong: ")]
    assert len(problems) == len(buckets)
    for line, bucket in zip(problems, buckets, strict=True):
        assert f"): {bucket} cannot be written: Your default credentials were not found." in line
    assert "Traceback" not in text
    assert status == 1


def test_a_bucket_that_never_answers_is_named_in_time_for_the_others(port):
    pytest.importorskip("gcsfs", reason="needs the extra gcs")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        argument = ("--storage", "gs://a/runs", "--timeout", "6")
        begun = time.monotonic()
        results = ends(run(port, 0, 2, "--timeout", "30"), run(port, 1, 2, *argument, env=env))
    for text, status in results:
        assert "): gs://a/runs cannot be written: no answer within 3 s" in text
        assert "missing" not in text
        assert "Traceback" not in text
        assert status == 1
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"versions": {"python": "3.12", "jax": "0.12"}},
            "process 1 (host1) has jax 0.12, process 0 0.11.2",
        ),
        ({"time": 160.2}, "process 1 (host1): its clock is +60 s off process 0's"),
        ({"problems": ["disk"]}, "process 1 (host1): disk"),
    ],
)
def test_what_differs_between_processes_is_said(changes, line):
    assert doctor.differences({0: said(0), 1: said(1, **changes)}) == [line]


def test_processes_that_agree_have_no_problem():
    assert doctor.differences({0: said(0), 1: said(1)}) == []


def test_a_slurm_job_says_its_own_place(monkeypatch):
    for name in (joining.ADDRESS, joining.COUNT, joining.INDEX):
        monkeypatch.delenv(name, raising=False)
    job = {"SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "node[007-009]", "SLURM_NTASKS": "3"}
    job |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "3"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert doctor.find_place(5) == doctor.Place("node007", 61440, 3, 2)


def test_a_connection_of_which_nothing_comes_does_not_keep_the_doctor(port):
    doctor_ = run(port, 0, 2, "--timeout", "3")
    silent = connect(port)
    ((text, status),) = ends(doctor_)
    silent.close()
    assert "1 of 2 processes came" in text
    assert status == 1


def connect(port):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        time.sleep(0.1)
    raise TimeoutError


def test_an_ipv6_address_is_shown_as_it_is_written(monkeypatch):
    monkeypatch.setenv(joining.ADDRESS, "[::1]:8476")
    monkeypatch.setenv(joining.COUNT, "2")
    monkeypatch.setenv(joining.INDEX, "1")
    place = doctor.find_place(5)
    assert place == doctor.Place("::1", 8476, 2, 1)
    assert place.address == "[::1]:8476"
