import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from train import checkpoint, command, errors, overrides

CONFIG = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr} must be positive")

@dataclass(frozen=True)
class Run:
    steps: int = 3
    optimizer: Optimizer = Optimizer()

def get_config():
    return Run()
"""

ABOUT = command.CommandHelp(
    name="python -m train.pretrain",
    summary="Train a model.",
    examples="""
        python -m train.pretrain --config sparse.py
        python -m train.pretrain --config dense.py optimizer.lr=1e-3
    """,
)


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch):
    """Run a main function as a command in an empty folder; return status, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CONFIG)

    def run(*argv, main=lambda cfg, workdir: None, about=ABOUT):
        status = command.run_command(main, argv, about=about)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def raising(error):
    def main(cfg, workdir):
        raise error

    return main


def test_the_config_with_its_overrides_and_the_folder_reach_the_main_function(shell, tmp_path):
    seen = []

    status, out, err = shell(
        "--config", "mine.py", "steps=5", "--workdir", "out/run", "optimizer.lr=1e-3",
        main=lambda cfg, workdir: seen.append((cfg.steps, cfg.optimizer.lr, workdir)),
    )  # fmt: skip

    assert (status, err) == (0, "")
    assert seen == [(5, 1e-3, Path("out/run"))]
    assert out == "results are in out/run\n"
    assert list((tmp_path / "out" / "run").iterdir()) == []


def test_the_folder_is_named_after_the_config_by_default(shell):
    folders = []

    shell("--config", "mine.py", main=lambda cfg, workdir: folders.append(workdir))

    assert folders == [Path("runs/mine")]


def test_a_command_may_have_a_default_config(shell):
    about = command.CommandHelp(name="x", summary="y", examples="z", default_config="mine.py")

    assert shell(about=about)[0] == 0


def test_the_main_functions_own_status_is_returned(shell):
    status, out, _ = shell("--config", "mine.py", main=lambda cfg, workdir: 1)

    assert (status, out) == (1, "")


def test_help_shows_the_examples_and_starts_nothing(shell):
    status, out, err = shell("--help", main=raising(AssertionError("started")))

    assert (status, err) == (0, "")
    assert out.startswith("usage: python -m train.pretrain")
    assert "examples:\n  python -m train.pretrain --config sparse.py\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "the following arguments are required: --config; see python -m train.pretrain --help"),
        (("--config", "nine.py"), "no config nine.py: no such file"),
        (("--config", "mine.py", "step=5"), "unknown config field step; did you mean steps"),
        (("--config", "mine.py", "steps=x"), "steps=x must be a whole number"),
        (("--config", "mine.py", "optimizer.lr=-1"), "optimizer.lr=-1: lr=-1.0 must be positive"),
        (("--config", "mine.py", "--optimizer.lr=1"), "fields are set as key=value, without"),
        (
            ("--config", "mine.py", "--workdir", "mine.py"),
            "mine.py can not be written: File exists",
        ),
        (("--config", "mine.py", "--workdir", "mine.py/x"), "can not be written: Not a directory"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(shell, argv, message):
    status, out, err = shell(*argv, main=raising(AssertionError("started")))

    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture
def read_only_folder(tmp_path):
    """Make a folder that not even root can write in."""
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o500)
    if os.geteuid() != 0:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_can_not_be_written_is_one_line_and_status_2(shell, read_only_folder):
    status, _, err = shell("--config", "mine.py", "--workdir", str(read_only_folder))

    assert status == 2
    assert err.startswith(f"error: workdir {read_only_folder} can not be written: ")
    assert err.count("\n") == 1


def our_value_error(cfg, workdir):
    overrides.apply_overrides(cfg, ["nothing"])


def our_value_error_inside_jit(cfg, workdir):
    def traced(x):
        checkpoint.CheckpointConfig(every_steps=0)
        return x

    jax.jit(traced)(jnp.ones(1))


def missing_file(cfg, workdir):
    (workdir / "tokens.bin").read_bytes()


@pytest.mark.parametrize(
    ("main", "status", "line"),
    [
        (our_value_error, 1, "override 'nothing' must be written key=value"),
        (our_value_error_inside_jit, 1, "every_steps=0 must be at least 1"),
        (missing_file, 1, "runs/mine/tokens.bin: No such file or directory"),
        (raising(FileNotFoundError("no checkpoint 7")), 1, "no checkpoint 7"),
        (raising(PermissionError(errno.EACCES, "Permission denied", "/x")), 1, "/x: Permission"),
        (raising(OSError(errno.ENOSPC, "No space left on device")), 1, "the disk is full"),
        (raising(OSError(errno.ENOSPC, "No space", "/x")), 1, "the disk is full (/x)"),
        (raising(errors.WorkFailedError("the loss is nan\nat 3")), 1, "the loss is nan at 3"),
        (raising(errors.UsageError("init_from=x is no run")), 2, "init_from=x is no run"),
        (
            raising(checkpoint.CheckpointError("no checkpoint is whole")),
            1,
            "no checkpoint is whole",
        ),
    ],
)
def test_an_error_meant_for_people_is_one_line_without_a_traceback(shell, main, status, line):
    got, out, err = shell("--config", "mine.py", main=main)

    assert got == status
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert not Path("runs/mine/crash.txt").exists()


def library_value_error(cfg, workdir):
    jnp.ones(2).reshape(3)


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (library_value_error, "TypeError"),
        (lambda cfg, workdir: jnp.split(jnp.ones(3), 2), "ValueError"),
        (raising(KeyError("x")), "KeyError"),
        (raising(AssertionError("odd\nvery")), "AssertionError: odd;"),
    ],
)
def test_a_mistake_of_ours_leaves_its_traceback_in_a_file(shell, main, kind):
    status, out, err = shell("--config", "mine.py", main=main)

    assert (status, out) == (1, "")
    assert err.startswith(f"error: unexpected {kind}")
    assert err.endswith("; the traceback is in runs/mine/crash.txt\n")
    assert err.count("\n") == 1
    assert "Traceback (most recent call last)" in Path("runs/mine/crash.txt").read_text()


def test_a_crash_that_can_not_be_written_down_says_how_to_see_it(shell):
    def main(cfg, workdir):
        (workdir / "crash.txt").mkdir()
        raise KeyError("x")

    _, _, err = shell("--config", "mine.py", main=main)

    assert "crash.txt could not be written (Is a directory), set DSV32_TRACEBACK=1" in err


def test_tracebacks_can_be_asked_for(shell, monkeypatch):
    monkeypatch.setenv("DSV32_TRACEBACK", "1")

    status, _, err = shell("--config", "mine.py", main=our_value_error)

    assert status == 1
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: override 'nothing' must be written key=value\n")


def test_an_interrupt_is_one_line_and_status_130(shell):
    assert shell("--config", "mine.py", main=raising(KeyboardInterrupt())) == (
        130,
        "",
        "interrupted\n",
    )


def test_this_projects_log_lines_are_shown_and_orbaxs_tracebacks_are_not(shell):
    def main(cfg, workdir):
        logging.getLogger("train.loop").info("backend %s", "pallas")
        logging.getLogger("absl").error("Traceback")
        logging.getLogger("jax").info("noise")

    _, _, err = shell("--config", "mine.py", main=main)

    assert err.endswith(" INFO backend pallas\n")
    assert err.count("\n") == 1


def test_a_line_is_shown_once_although_a_library_has_set_up_logging(shell, monkeypatch):
    theirs = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])

    def main(cfg, workdir):
        logging.getLogger("train.loop").info("once")

    _, _, err = shell("--config", "mine.py", main=main)

    assert err.count("once") == 1
    assert logging.getLogger().handlers == [theirs]


def test_other_processes_show_warnings_only(shell, monkeypatch):
    monkeypatch.setattr(command, "process_index", lambda: 1)

    def main(cfg, workdir):
        logging.getLogger("train.loop").info("progress")
        logging.getLogger("train.loop").warning("trouble")

    _, out, err = shell("--config", "mine.py", main=main)

    assert out == ""
    assert "trouble" in err
    assert "progress" not in err


def test_logging_is_as_it_was_afterwards(shell):
    handlers = list(logging.getLogger().handlers)
    level = logging.getLogger("absl").level

    shell("--config", "mine.py")

    assert logging.getLogger().handlers == handlers
    assert logging.getLogger("absl").level == level


def test_on_a_terminal_a_line_wipes_the_progress_line_before_it(shell, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    _, _, err = shell("--config", "mine.py", main=our_value_error)

    assert err.startswith("\r\x1b[Kerror: ")
