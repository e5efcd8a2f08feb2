import os
import socket
import subprocess

import pytest

from train.rl import fence

fence.install()


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
def test_what_leaves_the_process_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    names = {"os": os, "socket": socket, "subprocess": subprocess}
    with fence.closed(), pytest.raises(fence.FenceError, match="an answer was evaluated and tried"):
        eval(text, names)

    assert os.listdir(tmp_path) == ["x"]


def test_reading_and_computing_are_not():
    with fence.closed():
        assert eval("sum(range(5))") == 10
        with open(__file__, encoding="utf-8") as file:
            assert file.readline()


def test_the_fence_opens_again_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), fence.closed():
        eval("1/0")

    (tmp_path / "out").write_text("out")
