import os

import pytest

from train.agents import isolation


@pytest.fixture(scope="session")
def _isolated():
    """Skip where sandboxes do not work; `.ci/run` fails there."""
    if (problem := isolation.find_problem()) is not None:
        pytest.skip(f"no sandbox: {problem}")


@pytest.fixture
def processes_with():
    """Return a function that lists the pids of this machine whose command line has a word, of one program or any."""

    def find(word, program=None):
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if word.encode() in words and program in (None, words[0].decode()):
                found.append(int(name))
        return found

    return find
