"""Behind the fence in a process of its own, as its hook stays for good."""

import os
import socket
import subprocess

import pytest

from train.rl import fence
from train.rl.pool import LocalWorkers, Pool, WorkerError

NAMES = {"os": os, "socket": socket, "subprocess": subprocess}


def ready():
    """Prepare nothing: the pool's processes install the fence by themselves."""


def evaluate(text, folder):
    os.chdir(folder)
    with fence.closed():
        return eval(text, dict(NAMES))


def read_and_compute():
    with fence.closed(), open(__file__, encoding="utf-8") as file:
        return sum(range(5)), bool(file.readline())


def fail_and_write(path):
    try:
        with fence.closed():
            eval("1/0")
    except ZeroDivisionError:
        with open(path, "w", encoding="utf-8") as file:
            return file.write("out")


@pytest.fixture(scope="module")
def behind():
    """Return a function that runs another one, picklable, in a process with the fence."""
    with Pool(1, LocalWorkers(timeout_s=60.0, memory_mib=512, prepare=ready)) as pool:
        yield pool.call


@pytest.mark.parametrize(
    "text",
    [
        "open('out', 'w')",
        "open('out', 'a')",
        "os.open('out', os.O_CREAT | os.O_WRONLY)",
        "os.system('true')",
        "os.remove('x')",
        "os.kill(os.getpid(), 0)",
        "os.fork()",
        "os.putenv('A', 'b')",
        "subprocess.run(['true'])",
        "socket.create_connection(('127.0.0.1', 9))",
        "__import__('shutil').rmtree('x')",
        "__import__('ctypes').CDLL(None)",
    ],
)
def test_what_leaves_the_process_is_refused(behind, text, tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(WorkerError, match="FenceError: an answer was evaluated and tried") as error:
        behind(evaluate, text, tmp_path)

    assert error.value.fault == "raised"
    assert os.listdir(tmp_path) == ["x"]


def test_reading_and_computing_are_not(behind):
    assert behind(read_and_compute) == (10, True)


def test_the_fence_opens_again_after_an_error(behind, tmp_path):
    assert behind(fail_and_write, tmp_path / "out") == 3
    assert (tmp_path / "out").read_text() == "out"


def test_this_process_has_none(tmp_path):
    with fence.closed():
        (tmp_path / "out").write_text("out")
