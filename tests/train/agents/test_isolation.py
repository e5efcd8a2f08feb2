import os
import shutil
import subprocess
import sys

import pytest

from dsv32_jax.errors import UsageError
from train.agents import isolation, runs, seccomp
from train.agents.isolation import Limits


@pytest.fixture(autouse=True)
def _tried_afresh():
    isolation.find_problem.cache_clear()
    yield
    isolation.find_problem.cache_clear()


@pytest.mark.usefixtures("_isolated")
def test_where_all_is_there_nothing_is_refused():
    isolation.require_isolation()

    assert isolation.find_problem() is None


@pytest.mark.parametrize("program", isolation.PROGRAMS)
def test_a_program_that_is_missing_is_named(monkeypatch, program):
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, path: None if name == program else which(name)
    )

    with pytest.raises(UsageError, match=rf"{program} not found.*apt-get install bubblewrap"):
        isolation.require_isolation()


def test_a_filter_that_can_not_be_made_is_said(monkeypatch):
    monkeypatch.setattr(isolation.shutil, "which", lambda name, path: name)
    monkeypatch.setattr(seccomp, "LIBRARY", "libnowhere.so")
    seccomp.make_filter.cache_clear()

    with pytest.raises(UsageError, match=r"libnowhere\.so.*apt-get install"):
        isolation.require_isolation()


def test_a_kernel_that_refuses_is_quoted(monkeypatch):
    monkeypatch.setattr(isolation.shutil, "which", lambda name, path: name)
    refused = subprocess.CompletedProcess([], 1, b"", b"bwrap: Creating new namespace failed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)

    with pytest.raises(UsageError, match=r"does not work here .bwrap: Creating new namespace"):
        isolation.require_isolation()


def test_another_system_is_refused_whatever_is_asked(monkeypatch):
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    for unsafe_local in (False, True):
        with pytest.raises(UsageError, match="runs on Linux only"):
            isolation.require_isolation(unsafe_local=unsafe_local)


def test_unsafe_local_is_taken_and_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(isolation, "find_problem", lambda: pytest.fail("tried all the same"))

    isolation.require_isolation(unsafe_local=True)

    assert "runs as this user, with no isolation" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_mib": 1},
        {"disk_mib": 0},
        {"processes": 1},
        {"cpu_s": 0.0},
        {"output_bytes": 1},
    ],
)
def test_limits_that_leave_nothing_are_refused(changes):
    ((name, _),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}=.* must be"):
        Limits(**changes)


def test_a_file_that_was_made_can_not_be_changed():
    fd = isolation.make_file(b"abc" * 100_000)
    try:
        assert os.read(fd, 6) == b"abcabc"
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


def test_a_user_id_is_drawn_anew_each_time(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    users = {isolation._unused_user() for _ in range(50)}

    assert len(users) > 40
    assert all(user is None or user >= 2**15 for user in users)


@pytest.mark.usefixtures("_isolated")
def test_an_interpreter_below_tmp_is_there_inside_and_cannot_be_written(tmp_path, monkeypatch):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.setattr(sys, "exec_prefix", str(venv))

    found = runs.run(["bash", "-c", f"{venv}/bin/python -c 'print(2)'; touch {venv}/x || echo no"])

    assert found.stdout == b"2\nno\n"
