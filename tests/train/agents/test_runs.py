import os
import sys

import pytest

from train.agents import isolation, process, runs
from train.agents.isolation import Limits
from train.agents.process import Process, SandboxError

pytestmark = pytest.mark.usefixtures("_isolated")


@pytest.fixture(params=[False, True], ids=["isolated", "unsafe_local"])
def run(request):
    def run(*argv, **options):
        return runs.run(list(argv), unsafe_local=request.param, **options)

    return run


def test_input_goes_in_and_both_outputs_and_the_exit_code_come_out(run):
    result = run("bash", "-c", "cat; echo complaint >&2; exit 3", stdin=b"in\0put")

    assert (result.ended, result.exit_code) == ("exited", 3)
    assert (result.stdout, result.stderr) == (b"in\0put", b"complaint\n")


def test_files_lie_in_the_working_folder_and_can_be_changed(run):
    files = {"a.txt": b"a", "b/c/d.bin": bytes(3_000_000)}
    script = "cat a.txt; wc -c < b/c/d.bin; echo x >> a.txt; rm b/c/d.bin; touch b/c/e; ls"

    assert run("bash", "-c", script, files=files).stdout == b"a3000000\na.txt\nb\n"


def test_each_run_has_a_folder_of_its_own(run):
    run("bash", "-c", "touch left ../left")

    assert run("bash", "-c", "ls; ls .. | grep -c left; true").stdout == b"0\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
def test_a_file_outside_of_the_folder_is_refused(run, path):
    with pytest.raises(ValueError, match="must be a path inside the working folder"):
        run("true", files={path: b""})


def test_a_program_killed_by_a_signal_says_so(run):
    assert run("bash", "-c", "kill -SEGV $$").exit_code == 128 + 11


def test_a_program_that_is_not_there_is_no_fault_of_the_sandbox(run):
    assert run("/no/such/program").exit_code == 127


def test_time_by_the_clock_ends_it(run):
    result = run("sleep", "60", timeout_s=0.3)

    assert (result.ended, result.exit_code) == ("timeout", None)
    assert result.seconds < 5


def test_time_of_computing_ends_it(run):
    result = run("bash", "-c", "while :; do :; done", limits=Limits(cpu_s=1.0), timeout_s=60.0)

    assert (result.ended, result.exit_code) == ("timeout", None)


def test_output_up_to_the_limit_is_whole(run):
    limits = Limits(output_bytes=1000)

    assert run("head", "-c", "1000", "/dev/zero", limits=limits).ended == "exited"
    over = run("head", "-c", "1001", "/dev/zero", limits=limits)
    assert (over.ended, len(over.stdout)) == ("output", 1000)


def test_output_of_a_program_that_ends_at_once_is_not_lost(run):
    for _ in range(20):
        assert run("bash", "-c", "printf %60000s x").stdout == b" " * 59_999 + b"x"


def test_python_and_its_libraries_are_there():
    program = "import numpy, sys; print(numpy.ones(3).sum(), sys.prefix)"
    result = runs.run([sys.executable, "-c", program])

    assert result.stdout.decode() == f"3.0 {sys.prefix}\n", result.stderr


def test_a_sandbox_that_is_not_made_is_a_fault_and_no_result(monkeypatch):
    monkeypatch.setattr(isolation, "WORK", "/proc/not/there")
    with pytest.raises(SandboxError, match=r"was not made: bwrap: .*"):
        runs.run(["true"])


def test_a_sandbox_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(isolation, "GATE", "sleep 60; echo {fd}")
    monkeypatch.setattr(process, "START_S", 0.5)
    with pytest.raises(SandboxError, match=r"was not made in 0\.5 s"):
        runs.run(["true"])


def test_what_does_not_start_leaves_nothing_open_or_lying_about(run, monkeypatch, tmp_path):
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(isolation, "environment", lambda tmp: {"PATH": "/nowhere"})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="does not start"):
        run("true")

    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_killed_from_outside_is_a_fault():
    with Process(["sleep", "60"], Limits(), stdin=b"") as running:
        running._popen.kill()
        with pytest.raises(SandboxError, match="ended before its program did"):
            running.wait()


def test_the_program_waits_for_the_gate(monkeypatch, processes_with):
    """Else it would run on without a limit, should this program die while the sandbox is made."""
    marker = f"7777.{os.getpid()}"
    monkeypatch.setattr(Process, "_pass_gate", lambda self, gate: gate.recv(1) and gate.close())
    with Process(["sleep", marker], Limits(), stdin=b"") as running:
        assert running.wait() == 125
    assert processes_with(marker) == []


def test_nothing_is_left_open_or_lying_about(run, tmp_path, monkeypatch):
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    run("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("bash", "-c", "touch left; sleep 60 &", files={"a": b""})
        run("sleep", "60", timeout_s=0.1)

    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
