import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_jax.convert import lock, storage
from dsv32_jax.convert.workers import Workers

ROOT = Path(__file__).parents[3]
DONE, FAILED, WRONG_USAGE = 0, 1, 2


def test_a_full_disk_is_said_in_one_line_and_more_room_lets_it_go_on(
    official_fp8, convert, assert_is_refused, assert_holds, tmp_path, monkeypatch
):
    folder, _, tensors = official_fp8()
    real, room = storage.write, [200_000]

    def write(path, data):
        room[0] -= len(data)
        if room[0] < 0 and "state" in str(path):
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(storage, "write", write)
    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert status == FAILED
    assert re.search(r"error: \S+weight could not be written to .*disk is full", err)
    assert_is_refused(tmp_path / "dst")
    monkeypatch.undo()
    status, _, err = convert("from-hf", folder, tmp_path / "dst")
    assert status == DONE
    assert "going on:" in err
    assert_holds(tmp_path / "dst", tensors)


KILLED_AFTER = """
import os, signal, sys
from dsv32_jax.convert import __main__, storage
real, count = storage.write_array, [0]
def write_array(path, array):
    count[0] += 1
    if count[0] == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, array)
storage.write_array = write_array
from dsv32_jax.convert.workers import Workers
Workers.__init__.__kwdefaults__["flush_seconds"] = 0.0
__main__.main(["from-hf", *sys.argv[2:]])
"""


def all_bytes(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "config.json" not in path.name
    }


@pytest.mark.parametrize("after", [130, pytest.param(230, marks=pytest.mark.slow)])
def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(
    official_fp8, convert, assert_is_refused, tmp_path, after
):
    folder, _, _ = official_fp8()
    convert("from-hf", folder, tmp_path / "whole")

    target = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED_AFTER, str(after), str(folder), str(target)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert_is_refused(target)
    status, _, err = convert("from-hf", folder, target)

    assert status == DONE
    done = int(re.search(r"going on: (\d+) of \d+ parts", err)[1])
    assert done > 0
    assert all_bytes(target) == all_bytes(tmp_path / "whole")


STEP = "checkpoints/0"
DAMAGES = {
    f"{STEP}/state/parameters.weights.head/0.0": "does not hold what was written",
    f"{STEP}/state/parameters.weights.head/.zarray": None,
    f"{STEP}/state/_METADATA": "does not hold what was written",
    f"{STEP}/meta/metadata": None,
    f"{STEP}/_CHECKPOINT_METADATA": None,
    f"{STEP}/manifest.json": "manifest.json is not JSON",
    "conversion/plan.json": "is not JSON",
    "config.json": "is not JSON",
    "official/config.json": None,
    "official/tokenizer.json": None,
}


def test_a_finished_conversion_is_checked_and_damage_is_named(official_fp8, convert, tmp_path):
    folder, _, _ = official_fp8()
    convert("from-hf", folder, tmp_path / "dst")

    status, out, err = convert("from-hf", folder, tmp_path / "dst")
    assert (status, "was converted before and is whole" in out) == (DONE, True), err

    for name, message in DAMAGES.items():
        path = tmp_path / "dst" / name
        content = path.read_bytes()
        path.unlink()
        if message is not None:
            path.write_bytes(b"\0" + content[1:])
        status, _, err = convert("from-hf", folder, tmp_path / "dst")
        assert status == FAILED, name
        line = err.splitlines()[-1]
        assert line.startswith("error: "), line
        assert path.name in line, line
        assert (message or path.name) in line, line
        assert line.endswith(f"remove {tmp_path / 'dst'} to convert again"), line
        path.write_bytes(content)


def test_a_file_that_does_not_hold_what_was_written_is_written_again(
    official_fp8, convert, assert_holds, tmp_path, monkeypatch
):
    folder, _, tensors = official_fp8()
    real, spoiled = storage.write, []

    def write(path, data):
        real(path, data)
        if path.name == "0.2.0.0" and len(spoiled) < 1:
            spoiled.append(path)
            real(path, b"\0" * len(data))

    monkeypatch.setattr(storage, "write", write)
    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert status == DONE
    assert "converting model.layers.1.mlp.experts.2." in err
    assert_holds(tmp_path / "dst", tensors)


def test_another_source_or_option_does_not_go_on(official_fp8, convert, tmp_path):
    folder, _, _ = official_fp8()
    convert("from-hf", folder, tmp_path / "dst")

    status, _, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", "bf16")
    assert status == WRONG_USAGE
    assert "was begun from another source or with other options (dtype changed)" in err

    os.utime(folder / "model-00001-of-000003.safetensors", (1, 1))
    status, _, err = convert("from-hf", folder, tmp_path / "dst")
    assert (status, "(source changed)" in err) == (WRONG_USAGE, True)


def test_a_folder_with_other_things_is_left_alone(official_fp8, convert, tmp_path):
    folder, _, _ = official_fp8()
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.tex").write_text("x")

    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert (status, "is not empty and holds no conversion" in err) == (WRONG_USAGE, True)
    assert [p.name for p in (tmp_path / "dst").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_two_conversions_do_not_work_in_one_folder(official_fp8, convert, tmp_path, direction):
    source, _, _ = official_fp8()
    if direction == "to-hf":
        convert("from-hf", source, tmp_path / "converted")
        source = tmp_path / "converted"
    target = tmp_path / "dst"

    with lock.held(storage.as_path(target), Workers()):
        status, _, err = convert(direction, source, target)
        assert status == WRONG_USAGE
        assert f"error: another conversion is at work in {target}" in err
        assert [path.name for path in target.rglob("*")] == ["conversion", "lock"]
    assert not target.exists()

    assert convert(direction, source, target)[0] == DONE
    assert not list(target.rglob("lock"))


def free_port():
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def test_two_processes_share_the_work(official_fp8, convert, assert_holds, read_official, tmp_path):
    folder, _, tensors = official_fp8()
    convert("from-hf", folder, tmp_path / "one")

    run_two("from-hf", folder, tmp_path / "two")

    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    assert_holds(tmp_path / "two", tensors)

    run_two("to-hf", tmp_path / "two", tmp_path / "back", "--shard-gb", "0.0002")

    assert read_official(tmp_path / "back") == read_official(folder)
    assert not (tmp_path / "back" / "conversion").exists()


def run_two(*args):
    """Run the command in two processes that find each other."""
    options = [
        "--coordinator",
        f"localhost:{free_port()}",
        "--process-count",
        "2",
        "--threads",
        "1",
    ]
    command = [sys.executable, "-m", "dsv32_jax.convert", *map(str, args)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*map(str, command), *options, "--process-index", str(index)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=120) for process in running]

    assert [process.returncode for process in running] == [DONE, DONE], ended
    assert ["converted and verified" in out for out, _ in ended] == [True, False]
