import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from train import loop, pretrain
from train.divergence import DivergedError
from train.loop import StoppedError
from train.optimizer import OptimizerConfig, Schedule

LEGS = ("stages/dense", "stages/warmup", ".")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def at_step(monkeypatch):
    """Call a function once, when a leg has done a step and not yet saved it."""
    record = loop._Trainer._record

    def arrange(leg, step, act):
        def recording(trainer, metrics, done, numbers, rates):
            record(trainer, metrics, done, numbers, rates)
            if (trainer._leg.name, done) == (leg, step):
                monkeypatch.setattr(loop._Trainer, "_record", record)
                act()

        monkeypatch.setattr(loop._Trainer, "_record", recording)

    return arrange


def crash():
    raise RuntimeError("power cut")


def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def guard_of(folder):
    """What the divergence guard knew at the end."""
    steps = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
    newest = max(steps)
    guard = json.loads((folder / f"checkpoints/{newest}/meta/metadata").read_text())["guard"]
    assert guard["normal"]
    return guard


def assert_same_run(folder, expected, lines_of, weights_of, legs=LEGS):
    for leg in legs:
        assert lines_of(folder / leg) == lines_of(expected / leg), leg
        found, wanted = weights_of(folder / leg), weights_of(expected / leg)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{leg} {name}")
        assert guard_of(folder / leg) == guard_of(expected / leg)


def test_a_run_stopped_and_cut_off_in_every_stage_is_the_uninterrupted_run_bit_for_bit(
    tiny_run, whole_run, at_step, lines_of, weights_of, tmp_path
):
    at_step("dense", 3, send_sigterm)  # between two checkpoints: this step is saved
    with pytest.raises(
        StoppedError, match=r"SIGTERM at step 3 of dense: saved in .*dense/checkpoints/3;"
    ):
        pretrain.main(tiny_run, tmp_path)
    assert len(lines_of(tmp_path / "stages/dense")) == 3
    at_step("warmup", 3, crash)  # after the checkpoint of step 2, which the run goes back to
    with pytest.raises(RuntimeError, match="power cut"):
        pretrain.main(tiny_run, tmp_path)
    at_step("sparse", 1, crash)  # before any checkpoint of the stage
    with pytest.raises(RuntimeError, match="power cut"):
        pretrain.main(tiny_run, tmp_path)

    assert pretrain.main(tiny_run, tmp_path) == 0

    assert_same_run(tmp_path, whole_run, lines_of, weights_of)
    assert [row["step"] for row in lines_of(tmp_path)] == [1, 2, 3, 4]


def damage(checkpoint):
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def leave_half_written(checkpoint):
    checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.orbax-checkpoint-tmp"))


@pytest.mark.parametrize("spoil", [damage, leave_half_written])
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over(
    tiny_run, whole_run, spoil, lines_of, weights_of, tmp_path
):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    spoil(folder / "checkpoints" / "4")
    (folder / "summary.json").unlink()

    assert pretrain.main(tiny_run, folder) == 0

    assert_same_run(folder, whole_run, lines_of, weights_of)


def test_the_last_stage_may_be_given_more_steps_and_goes_on(
    tiny_run, whole_run, lines_of, tmp_path
):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    longer = replace(tiny_run, sparse=replace(tiny_run.sparse, steps=5))

    pretrain.main(longer, folder)

    assert lines_of(folder)[:4] == lines_of(whole_run)
    assert [row["step"] for row in lines_of(folder)] == [1, 2, 3, 4, 5]


def test_fewer_steps_than_are_done_is_one_clear_line(tiny_run, whole_run, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")

    with pytest.raises(ValueError, match="is at step 4 already, beyond steps=3"):
        pretrain.main(replace(tiny_run, sparse=replace(tiny_run.sparse, steps=3)), folder)


def test_the_speed_of_a_finished_leg_survives_a_last_step_of_its_own(tiny_run, whole_run, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    longer = replace(tiny_run, sparse=replace(tiny_run.sparse, steps=5))

    pretrain.main(longer, folder)

    before, after = (json.loads((f / "summary.json").read_text()) for f in (whole_run, folder))
    assert after["tokens_per_s/sparse"] == before["tokens_per_s/sparse"] > 0


def test_numbers_that_are_none_stop_the_run_and_name_the_last_good_checkpoint(tiny_run, tmp_path):
    # Two steps of rate 0.01, then one that throws every weight out of range: step 4 is where it shows, in the
    # gradients already where the loss still is a number, and its checkpoint must not be made.
    wild = Schedule(peak=1e-2, tail=((2, 1e38),))
    cfg = replace(
        tiny_run, warmup=None, sparse=None,
        dense=replace(tiny_run.dense, steps=9, optimizer=OptimizerConfig(main=wild)),
    )  # fmt: skip

    with pytest.raises(DivergedError) as raised:
        pretrain.main(cfg, tmp_path)

    good = tmp_path / "checkpoints" / "2"
    assert re.fullmatch(
        rf"dense: the (loss|grad_norm) is nan at step 4; the last good checkpoint is {good}",
        str(raised.value),
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2"]


def test_a_loss_that_is_no_number_stops_the_run(tiny_run, tmp_path, monkeypatch):
    make_step = loop.make_step

    def spoilt(*args):
        def run(state, batch, rates):
            state, numbers = make_step(*args)(state, batch, rates)
            return state, numbers._replace(loss=numbers.loss + np.nan)

        return run

    monkeypatch.setattr(loop, "make_step", spoilt)
    with pytest.raises(DivergedError, match="dense: the loss is nan at step 1; no checkpoint"):
        pretrain.main(tiny_run, tmp_path)


def test_a_gradient_that_is_no_number_stops_the_run_though_its_loss_is_one(
    tiny_run, tmp_path, monkeypatch
):
    make_step = loop.make_step

    def spoilt(*args):
        def run(state, batch, rates):
            state, numbers = make_step(*args)(state, batch, rates)
            return state, numbers._replace(grad_norm=numbers.grad_norm * np.nan)

        return run

    monkeypatch.setattr(loop, "make_step", spoilt)
    with pytest.raises(DivergedError, match="dense: the grad_norm is nan at step 1; no checkpoint"):
        pretrain.main(tiny_run, tmp_path)
    assert not list(tmp_path.glob("stages/dense/checkpoints/*"))


def test_a_signal_during_a_save_waits_for_the_next_step(tiny_run, tmp_path, monkeypatch):
    save = loop.Checkpoints.save

    def signalled(checkpoints, step, *args, **kwargs):
        saved = save(checkpoints, step, *args, **kwargs)
        if step == 2:
            send_sigterm()
        return saved

    monkeypatch.setattr(loop.Checkpoints, "save", signalled)
    with pytest.raises(StoppedError, match=r"SIGTERM at step 3 of dense: saved in .*checkpoints/3"):
        pretrain.main(tiny_run, tmp_path)


def test_sigterm_to_the_command_saves_and_the_same_command_goes_on(
    tiny_run, config_text, lines_of, weights_of, compilation_cache, tmp_path
):
    many = replace(tiny_run, warmup=None, sparse=None, dense=replace(tiny_run.dense, steps=10**6))
    (tmp_path / "mine.py").write_text(config_text(many))
    command = [sys.executable, "-m", "train.pretrain", "--config", str(tmp_path / "mine.py")]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": compilation_cache, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [*command, "--workdir", str(tmp_path / "run")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and len(metrics.read_text()) > 600):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)

    done = len(lines_of(tmp_path / "run"))
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1].startswith(f"SIGTERM at step {done} of dense: saved in ")
    assert "Traceback" not in err
    finite = replace(many, dense=replace(many.dense, steps=done + 3))
    (tmp_path / "straight").mkdir()
    pretrain.main(finite, tmp_path / "run")
    pretrain.main(finite, tmp_path / "straight")
    assert_same_run(tmp_path / "run", tmp_path / "straight", lines_of, weights_of, legs=(".",))
