import io
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from dsv32_jax import json_files
from train import metrics, progress

WORK = progress.Work(total_steps=5, tokens_per_step=100)
CFG = metrics.MetricsConfig(console_seconds=0.0, tensorboard=False)


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def run(tmp_path, stream):
    def open_run(cfg=CFG, **kwargs):
        return metrics.RunMetrics(tmp_path, cfg, WORK, stream=stream, **kwargs)

    return open_run


def rows(tmp_path):
    return json_files.read_lines(tmp_path / "metrics.jsonl")


def test_each_step_is_a_line_of_numbers(tmp_path, run):
    with run() as numbers:
        numbers.log(1, {"loss": jnp.bfloat16(1.5), "count": np.int64(3)})
        numbers.log(2, {"loss": np.float32(math.nan)})

    first, second = rows(tmp_path)
    assert first == {"step": 1, "loss": 1.5, "count": 3}
    assert second["loss"] is None
    assert second["tokens_per_second"] > 0


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path, run):
    with run() as numbers:
        numbers.log(1, {"loss": 1.0})

        assert rows(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_resuming_drops_what_was_logged_after_the_checkpoint(tmp_path, run):
    with run() as numbers:
        for step in (1, 2, 3):
            numbers.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')

    with run(start_step=2) as numbers:
        numbers.log(3, {"loss": 30.0})

    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_new_run_in_the_folder_starts_with_no_lines(tmp_path, run):
    with run() as numbers:
        numbers.log(1, {"loss": 1.0})
    run().close()

    assert rows(tmp_path) == []


def test_the_first_and_the_last_step_are_always_shown(stream, run):
    with run(metrics.MetricsConfig(console_seconds=1e9, tensorboard=False)) as numbers:
        numbers.log(1, {"loss": 2.0})
        numbers.log(2, {"loss": 1.5})
        numbers.log(5, {"loss": 1.0})

    first, last = stream.getvalue().splitlines()
    assert first == "step 1/5  loss 2.0000"
    assert re.fullmatch(r"step 5/5  loss 1\.0000  .* tokens/s  0:00:00 left", last)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 1}, "must not contain step"),
        ({"loss": np.ones(2)}, r"metric loss must be one number, not float64\[2\]"),
        ({"loss": "low"}, "metric loss must be one number"),
    ],
)
def test_a_value_that_is_not_one_number_is_refused(run, values, message):
    with run() as numbers, pytest.raises(ValueError, match=message):
        numbers.log(1, values)


def test_the_summary_is_one_flat_object(tmp_path, run):
    with run() as numbers:
        numbers.write_summary({"loss": math.nan, "steps": 5, "device": "cpu", "mfu": None})

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "loss": None,
        "steps": 5,
        "device": "cpu",
        "mfu": None,
    }


def test_a_nested_summary_is_refused(run):
    with run() as numbers, pytest.raises(ValueError, match="summary losses="):
        numbers.write_summary({"losses": [1.0]})


def test_closing_draws_the_losses(tmp_path, run):
    with run() as numbers:
        numbers.log(1, {"loss": 1.0, "lr": 0.1})
    numbers.close()

    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.png"]


def read_scalars(folder):
    """Read event files by TensorBoard's record format: length, its CRC, content, its CRC."""
    scalars = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            record = content[12 : 12 + size]
            assert int.from_bytes(content[12 + size : 16 + size], "little") == masked_crc32c(record)
            event = event_pb2.Event.FromString(record)
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            content = content[16 + size :]
    return scalars


def test_tensorboard_gets_the_finite_numbers(tmp_path, run):
    with run(metrics.MetricsConfig(console_seconds=0.0)) as numbers:
        numbers.log(1, {"loss": 1.5, "kl": math.nan})

    assert read_scalars(tmp_path / "tensorboard") == [(1, "loss", 1.5)]


def test_other_processes_write_nothing(tmp_path, stream, run, monkeypatch):
    monkeypatch.setattr(metrics.jax, "process_index", lambda: 1)

    with run() as numbers:
        assert numbers.log(1, {"loss": 1.0}) == {"loss": 1.0}
        numbers.write_summary({"loss": 1.0})
        numbers.draw_plots()

    assert list(tmp_path.iterdir()) == []
    assert stream.getvalue() == ""


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match=r"console_seconds=-1\.0 must be at least 0"):
        metrics.MetricsConfig(console_seconds=-1.0)
