"""Processes that cannot work together say so in one line each, where jax would end them by a signal."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_jax import joining, rendezvous
from dsv32_jax.errors import UsageError

ROOT = Path(__file__).parents[2]
JOIN = """
import sys
from dsv32_jax import command_line, joining
with command_line.Boundary() as boundary:
    joining.join(timeout_s=int(sys.argv[1]))
    print("joined", flush=True)
    sys.stdin.readline()
sys.exit(boundary.status)
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {joining.COUNT: "2"},
            "JAX_NUM_PROCESSES given but not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID",
        ),
        (
            {joining.ADDRESS: "host", joining.COUNT: "2", joining.INDEX: "0"},
            "host must be HOST:PORT",
        ),
        *(
            (
                {joining.ADDRESS: address, joining.COUNT: "2", joining.INDEX: "0"},
                "must be HOST:PORT, an IPv6",
            )
            for address in (
                "::1",
                "fe80::1:8476",
                "[::1]",
                "h:0",
                "h:70000",
                "http://h:8476",
                "h :1",
            )
        ),
        (
            {joining.ADDRESS: "h:1", joining.COUNT: str(10**12), joining.INDEX: "0"},
            "must be a number below",
        ),
        (
            {joining.ADDRESS: "h:1", joining.COUNT: "two", joining.INDEX: "0"},
            "two must be a number",
        ),
        (
            {joining.ADDRESS: "h:1", joining.COUNT: "2", joining.INDEX: "2"},
            "JAX_PROCESS_ID=2 must be below",
        ),
    ],
)
def test_an_incomplete_environment_is_refused(monkeypatch, given, message):
    for name in (joining.ADDRESS, joining.COUNT, joining.INDEX):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        joining.bare_place()


def test_the_environment_says_which_process_this_is(monkeypatch):
    for name in (joining.ADDRESS, joining.COUNT, joining.INDEX):
        monkeypatch.delenv(name, raising=False)
    assert joining.bare_place() is None
    for name, value in (
        (joining.ADDRESS, "[::1]:8476"),
        (joining.COUNT, "4"),
        (joining.INDEX, "3"),
    ):
        monkeypatch.setenv(name, value)
    place = joining.bare_place()
    assert place == rendezvous.Place("::1", 8476, 4, 3)
    assert place.address == "[::1]:8476"


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def begin(port):
    """Return a function that starts a process that joins, alone or as a conversion does."""
    started = []

    def begin(index, count=2, *, timeout_s=30, convert=False):
        address = f"127.0.0.1:{port}"
        place = {joining.ADDRESS: address, joining.COUNT: str(count), joining.INDEX: str(index)}
        command = [sys.executable, "-c", JOIN, str(timeout_s)]
        if convert:
            command = [sys.executable, "-m", "dsv32_jax.convert", "from-hf", "nothing", "dst"]
            command += [
                f"--coordinator={address}",
                f"--process-count={count}",
                f"--process-index={index}",
            ]
            place = {}
        env = os.environ | place | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def assert_one_line(process, message, status):
    _, err = process.communicate("\n", timeout=120)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (process.returncode, len(lines)) == (status, 1), err
    assert message in lines[0]
    assert "Traceback" not in err
    assert re.search(r"^F\d{4} ", err, re.M) is None  # no fatal line of jax's log either


@pytest.mark.parametrize("convert", [False, True], ids=["join", "convert"])
def test_a_number_that_two_processes_have_is_told_to_all_of_them(begin, convert):
    processes = [begin(index, 3, convert=convert) for index in (0, 1, 1)]
    host = socket.gethostname()
    for process in processes:
        assert_one_line(
            process, f"two processes say that they are number 1: on {host} and on {host}", 2
        )


@pytest.mark.parametrize("convert", [False, True], ids=["join", "convert"])
def test_processes_that_count_differently_are_told_so(begin, convert):
    processes = [begin(0, 2, convert=convert), begin(1, 3, convert=convert)]
    for process in processes:
        assert_one_line(process, "thinks there are 3 processes, process 0 2", 2)


@pytest.mark.parametrize("convert", [False, True], ids=["join", "convert"])
def test_a_port_that_is_taken_is_one_line(begin, port, convert):
    with socket.create_server(("0.0.0.0", port)):
        assert_one_line(begin(0, convert=convert), f"port {port} cannot be listened on: ", 1)


def test_processes_that_do_not_come_are_named(begin):
    message = "1 of 3 processes came; missing: 1, 2 within 1 s; `python -m train.doctor`"
    assert_one_line(begin(0, 3, timeout_s=1), message, 1)


def test_a_process_0_that_is_not_there_is_one_line(begin, port):
    message = f"process 0 was not reached at 127.0.0.1:{port} from {socket.gethostname()} (Connection refused)"
    assert_one_line(begin(1, timeout_s=1), message, 1)


def test_a_late_process_of_a_number_that_came_ends_and_the_others_do_not(begin, port):
    processes = [begin(0), begin(1)]
    assert [process.stdout.readline() for process in processes] == ["joined\n"] * 2
    message = f"process 0 was not reached at 127.0.0.1:{port}"
    assert_one_line(begin(1, timeout_s=2), message, 1)
    assert_one_line(begin(0, timeout_s=2), f"port {port} cannot be listened on: ", 1)
    assert [process.poll() for process in processes] == [None, None]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(60) for process in processes] == [0, 0]
