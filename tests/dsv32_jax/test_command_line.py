import errno
import importlib.machinery
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsv32_jax import command_line, config, errors, rope

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shell(capsys):
    """Run a function inside the boundary; return status, output and errors."""

    def run(work, **boundary_fields):
        with command_line.Boundary(**boundary_fields) as boundary, command_line.logging_to_stderr():
            boundary.status = work() or 0
        out, err = capsys.readouterr()
        return boundary.status, out, err

    return run


def raising(error):
    def work():
        raise error

    return work


def our_value_error():
    config.YarnConfig(factor=0.5)


def our_value_error_inside_jit():
    def traced(x):
        our_value_error()
        return x

    jax.jit(traced)(jnp.ones(1))


def library_value_error():
    jnp.split(jnp.ones(3), 2)


def library_value_error_below_our_code():
    rope.rotate_half_split(jnp.ones(3), jnp.ones(1), jnp.ones(1))


def missing_file():
    with open("/nowhere/tokens.bin"):
        pass


def test_the_status_of_the_work_is_kept_and_nothing_is_said(shell):
    assert shell(lambda: 1) == (1, "", "")
    assert shell(lambda: None) == (0, "", "")


@pytest.mark.parametrize(
    ("work", "status", "line"),
    [
        (our_value_error, 1, "factor=0.5 must be at least 1"),
        (our_value_error_inside_jit, 1, "factor=0.5 must be at least 1"),
        (missing_file, 1, "/nowhere/tokens.bin: No such file or directory"),
        (raising(FileNotFoundError("no checkpoint 7")), 1, "no checkpoint 7"),
        (raising(PermissionError(errno.EACCES, "Permission denied", "/x")), 1, "/x: Permission"),
        (raising(OSError(errno.ENOSPC, "No space left on device")), 1, "the disk is full"),
        (raising(OSError(errno.ENOSPC, "No space", "/x")), 1, "the disk is full (/x)"),
        (raising(errors.WorkFailedError("the loss is nan\nat 3")), 1, "the loss is nan at 3"),
        (raising(errors.UsageError("init_from=x is no run")), 2, "init_from=x is no run"),
    ],
)
def test_an_error_meant_for_people_is_one_line_without_a_traceback(
    shell, tmp_path, work, status, line
):
    got, out, err = shell(work, started=True, workdir=tmp_path)

    assert got == status
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (our_value_error, 2),
        (missing_file, 2),
        (raising(errors.UsageError("x")), 2),
        (raising(errors.WorkFailedError("x")), 1),
    ],
)
def test_before_the_work_has_begun_an_error_is_wrong_usage(shell, work, status):
    assert shell(work)[0] == status


def test_a_check_of_a_module_that_python_was_started_with_is_ours_too(shell):
    names = {
        "__name__": "__main__",
        "__spec__": importlib.machinery.ModuleSpec("dsv32_jax.some_command", None),
    }
    exec("def work():\n    raise ValueError('n=0 must be positive')", names)

    assert shell(names["work"]) == (2, "", "error: n=0 must be positive\n")


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (library_value_error, "ValueError"),
        (library_value_error_below_our_code, "ValueError"),
        (raising(KeyError("x")), "KeyError"),
        (raising(AssertionError("odd\nvery")), "AssertionError: odd;"),
    ],
)
def test_a_mistake_of_ours_leaves_its_traceback_in_a_file(shell, tmp_path, work, kind):
    status, out, err = shell(work, started=True, workdir=tmp_path)

    assert (status, out) == (1, "")
    assert err.startswith(f"error: unexpected {kind}")
    assert err.endswith(f"; the traceback is in {tmp_path}/crash.txt\n")
    assert err.count("\n") == 1
    assert "Traceback (most recent call last)" in (tmp_path / "crash.txt").read_text()


def test_without_a_folder_a_mistake_of_ours_says_how_to_see_it(shell):
    status, _, err = shell(raising(KeyError("x")))

    assert status == 1
    assert err == "error: unexpected KeyError: 'x'; set DSV32_TRACEBACK=1 to see the traceback\n"


def test_a_crash_that_can_not_be_written_down_says_how_to_see_it(shell, tmp_path):
    (tmp_path / "crash.txt").mkdir()

    _, _, err = shell(raising(KeyError("x")), workdir=tmp_path)

    assert "crash.txt could not be written (Is a directory), set DSV32_TRACEBACK=1" in err


def test_tracebacks_can_be_asked_for(shell, monkeypatch):
    monkeypatch.setenv("DSV32_TRACEBACK", "1")

    status, _, err = shell(our_value_error, started=True)

    assert status == 1
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: factor=0.5 must be at least 1\n")


def test_an_interrupt_is_one_line_and_status_130(shell):
    assert shell(raising(KeyboardInterrupt())) == (130, "", "interrupted\n")


def test_a_parsers_complaint_is_one_line_that_points_to_the_help(shell):
    parser = command_line.Parser(name="python -m x", summary="Do.", examples="python -m x a")
    parser.add_argument("file")

    status, _, err = shell(lambda: parser.parse_args([]))

    assert status == 2
    assert err == ("error: the following arguments are required: file; see python -m x --help\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: file, --size; see"),
        ("--sise 3", "unrecognized arguments: --sise; did you mean --size? see"),
        ("--sise=3 a", "unrecognized arguments: --sise=3; did you mean --size? see"),
        ("a --size 3 --other", "unrecognized arguments: --other; see"),
        ("--size 3 -- --other", "the following arguments are required"),  # a file of that name
    ],
)
def test_an_unknown_option_is_told_before_what_is_missing(shell, words, message):
    parser = command_line.Parser(name="python -m x", summary="Do.", examples="python -m x a")
    parser.add_argument("file")
    parser.add_argument("--size", required=True)
    if words.endswith("-- --other"):
        parser.add_argument("second")

    status, _, err = shell(lambda: parser.parse_args(words.split()))

    assert status == 2
    assert message in err


def test_help_ends_in_the_examples_and_is_status_0(shell):
    parser = command_line.Parser(
        name="python -m x", summary="Do.", examples="\n    python -m x a\n    python -m x b\n"
    )

    status, out, err = shell(lambda: parser.parse_args(["--help"]))

    assert (status, err) == (0, "")
    assert out.startswith("usage: python -m x")
    assert out.endswith("examples:\n  python -m x a\n  python -m x b\n")


@pytest.mark.parametrize(
    ("work", "status"),
    [(our_value_error, 2), (missing_file, 2), (library_value_error, 1), (raising(errors.WorkFailedError("x")), 1)],
)  # fmt: skip
def test_what_a_person_can_put_right_before_the_work_begins_is_wrong_usage(shell, work, status):
    def prepare():
        with command_line.wrong_usage():
            work()

    found, _, err = shell(prepare, started=True)

    assert found == status
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_this_projects_log_lines_are_shown_and_orbaxs_tracebacks_are_not(shell):
    def work():
        logging.getLogger("train.loop").info("backend %s", "pallas")
        logging.getLogger("absl").error("Traceback")
        logging.getLogger("jax").info("noise")

    _, _, err = shell(work)

    assert err.endswith(" INFO backend pallas\n")
    assert err.count("\n") == 1


def test_a_line_is_shown_once_although_a_library_has_set_up_logging(shell, monkeypatch):
    theirs = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])

    _, _, err = shell(lambda: logging.getLogger("train.loop").info("once"))

    assert err.count("once") == 1
    assert logging.getLogger().handlers == [theirs]


def test_other_processes_show_warnings_only(shell, monkeypatch):
    monkeypatch.setattr(command_line, "process_index", lambda: 1)

    def work():
        logging.getLogger("train.loop").info("progress")
        logging.getLogger("train.loop").warning("trouble")

    _, _, err = shell(work)

    assert "trouble" in err
    assert "progress" not in err


def test_logging_is_as_it_was_afterwards(shell):
    handlers = list(logging.getLogger().handlers)
    level = logging.getLogger("absl").level

    shell(lambda: None)

    assert logging.getLogger().handlers == handlers
    assert logging.getLogger("absl").level == level


def test_on_a_terminal_a_line_wipes_the_progress_line_before_it(shell, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    _, _, err = shell(our_value_error)

    assert err.startswith("\r\x1b[Kerror: ")


def test_sigterm_outside_a_step_is_one_line(capsys):
    with command_line.Boundary() as boundary, command_line.sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)

    assert boundary.status == 143
    assert capsys.readouterr().err == "stopped by SIGTERM; run the same command to go on\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_reader_that_leaves_ends_the_command_quietly():
    program = (
        "import sys\n"
        "from dsv32_jax import command_line\n"
        "with command_line.Boundary() as boundary:\n"
        "    while True:\n"
        "        sys.stdout.write('text' * 1000)\n"
        "        sys.stdout.flush()\n"
        "sys.exit(boundary.status)\n"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT) as process:
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert said == b""


def test_a_command_that_does_not_go_on_does_not_say_so(shell):
    assert shell(raising(command_line.TerminatedError()))[2].strip().endswith("to go on")
    said = shell(raising(command_line.TerminatedError()), resumes=False)[2]
    assert said == "stopped by SIGTERM\n"
