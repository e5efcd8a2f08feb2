from types import SimpleNamespace

import pytest

from train import progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("kind", "num_cores", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", None, 989e12),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H200", None, 989e12),
        ("NVIDIA H200 NVL", None, None),
        ("NVIDIA A100-SXM4-80GB", None, 312e12),
        ("TPU v4", 2, 275e12),
        ("TPU v4", 1, 137.5e12),
        ("TPU v5 lite", 1, 197e12),
        ("TPU v5", 2, 459e12),
        ("TPU v5p", 2, 459e12),
        ("TPU v6 lite", 1, 918e12),
        ("TPU7x", 1, 1153.5e12),
        ("TPU7x", 2, 2307e12),
        ("cpu", None, None),
    ],
)
def test_each_known_device_has_its_peak_and_others_none(kind, num_cores, peak):
    device = SimpleNamespace(device_kind=kind)
    if num_cores:
        device.num_cores = num_cores

    assert progress.peak_flops(device) == peak


def test_rates_are_measured_between_reports():
    clock = Clock()
    work = progress.Work(
        total_steps=10, tokens_per_step=100, flops_per_token=2.0, peak_flops=1000.0
    )
    speed = progress.Speed(work, clock)

    first = speed.rates(1)
    clock.now = 4.0
    second = speed.rates(3)

    assert first == {}
    assert second == {"seconds_per_step": 2.0, "tokens_per_second": 50.0, "mfu": 0.1}


def test_without_a_peak_there_is_no_mfu():
    clock = Clock()
    speed = progress.Speed(progress.Work(total_steps=10, tokens_per_step=100), clock)
    speed.rates(1)
    clock.now = 1.0

    assert "mfu" not in speed.rates(2)


def test_the_line_has_step_loss_rates_and_time_left():
    values = {"loss": 3.21456, "tokens_per_second": 8234.0, "mfu": 0.413, "seconds_per_step": 4.0}

    text = progress.progress_text(70, 1000, values)

    assert text == "step 70/1000  loss 3.2146  8.2k tokens/s  MFU 41.3%  1:02:00 left"


def test_what_is_not_known_is_left_out():
    assert progress.progress_text(1, 10, {}) == "step 1/10"
