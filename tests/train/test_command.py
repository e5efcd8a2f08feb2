import logging
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dsv32_jax import command_line, errors
from train import command
from train.loop import StoppedError

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


def test_only_a_command_that_is_a_run_of_its_config_says_that_it_can_go_on(shell):
    about = command.CommandHelp(name="x", summary="y", examples="z", folder_prefix="compile-")
    stopped = raising(command_line.TerminatedError())

    assert shell("--config", "mine.py", main=stopped)[2].endswith("run the same command to go on\n")
    assert shell("--config", "mine.py", main=stopped, about=about)[2] == "stopped by SIGTERM\n"


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
            "mine.py cannot be written: File exists",
        ),
        (("--config", "mine.py", "--workdir", "mine.py/x"), "cannot be written: Not a directory"),
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
    assert err.startswith(f"error: workdir {read_only_folder} cannot be written: ")
    assert err.count("\n") == 1


def test_an_error_of_the_work_is_status_1_with_what_the_folder_keeps_of_it(shell):
    failed = shell("--config", "mine.py", main=raising(FileNotFoundError("no tokens")))
    crashed = shell("--config", "mine.py", main=raising(KeyError("x")))

    assert failed == (1, "", "error: no tokens\n")
    assert crashed[0] == 1
    assert crashed[2].endswith("KeyError: 'x'; the traceback is in runs/mine/crash.txt\n")
    assert "Traceback (most recent call last)" in Path("runs/mine/crash.txt").read_text()


def test_the_work_may_still_find_the_usage_wrong(shell):
    error = errors.UsageError("init_from=x is no run")

    assert shell("--config", "mine.py", main=raising(error))[0] == 2


STOPPED = {
    "SIGTERM, saved": (StoppedError(signal.SIGTERM, "saved"), 0, 42),
    "SIGTERM, nothing to save": (command_line.TerminatedError(), 143, 42),
    "SIGINT": (StoppedError(signal.SIGINT, "saved"), 130, 130),
    "another process is gone": (errors.OthersMissingError("gone"), 1, 42),
    "its own failure": (errors.WorkFailedError("diverged"), 1, 1),
    "wrong usage": (errors.UsageError("no"), 2, 2),
    "a crash": (KeyError("x"), 1, 1),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_status_of_its_own_says_that_the_same_command_goes_on(shell, case):
    error, alone, restarting = STOPPED[case]

    assert shell("--config", "mine.py", main=raising(error))[0] == alone
    argv = ("--config", "mine.py", "--restart-status", "42")
    assert shell(*argv, main=raising(error))[0] == restarting


@pytest.mark.parametrize("status", ["0", "256", "-1", "x"])
def test_a_restart_status_that_says_nothing_is_refused(shell, status):
    result, _, err = shell("--config", "mine.py", f"--restart-status={status}")

    assert result == 2
    assert f"{status} must be a whole number, 1 to 255" in err


def test_only_one_process_says_where_the_results_are(shell, monkeypatch):
    monkeypatch.setattr(command_line, "process_index", lambda: 1)

    assert shell("--config", "mine.py") == (0, "", "")


def test_log_lines_of_the_work_are_shown(shell):
    def main(cfg, workdir):
        logging.getLogger("train.loop").info("backend %s", "pallas")

    _, _, err = shell("--config", "mine.py", main=main)

    assert err.endswith(" INFO backend pallas\n")
