"""How fast a run goes, how long it has left, and the words that say so."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Dense bf16 floating-point operations a second, and the cores that it is shared between, of one
# chip. GPU names are whole, because the PCIe and NVL boards of a name are slower.
# Sources: NVIDIA's data sheets of A100, H100 SXM and H200 SXM; Google Cloud's TPU system pages.
PEAKS = (
    (r"NVIDIA A100[- ].*", 312e12, 1),
    (r"NVIDIA H100 80GB HBM3", 989e12, 1),
    (r"NVIDIA H200", 989e12, 1),
    (r"TPU v4", 275e12, 2),
    (r"TPU v5 ?(lite|e)", 197e12, 1),
    (r"TPU v5p?", 459e12, 2),
    (r"TPU v6 ?(lite|e)", 918e12, 1),
    (r"TPU ?v?7x", 2307e12, 2),
)


def peak_flops(device: Any) -> float | None:
    """Return a device's dense bf16 peak.

    A TPU chip of two cores may appear as one device or as two; a device that says how many cores
    it has gets that share of the chip.

    Args:
      device: a `jax.Device`.

    Returns:
      Operations a second, or None for a device that is not in the table.
    """
    for pattern, chip_flops, chip_cores in PEAKS:
        if re.fullmatch(pattern, device.device_kind):
            cores = getattr(device, "num_cores", None) if chip_cores > 1 else chip_cores
            return chip_flops * (cores or chip_cores) / chip_cores
    return None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do.

    Attributes:
      total_steps: the step after which it is done.
      tokens_per_step: over all devices; None where steps differ, and shows no rate of tokens.
      flops_per_token: forward and backward, for MFU; None shows none.
      peak_flops: of all devices together, for MFU; None shows none.
    """

    total_steps: int
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None


class Speed:
    """Rates between one report and the next."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure from the first report on, so that compilation is not counted.

        Args:
          work: what a step costs.
          clock: seconds.
        """
        self._work = work
        self._clock = clock
        self._last: tuple[int, float] | None = None

    def rates(self, step: int) -> dict[str, float]:
        """Report that a step is done.

        Args:
          step: the number of finished steps.

        Returns:
          `seconds_per_step`, `tokens_per_second`, and `mfu` (0 to 1) where a peak is known; empty
          at the first report.
        """
        now, last = self._clock(), self._last
        self._last = (step, now)
        if last is None or step <= last[0] or now <= last[1]:
            return {}
        seconds = (now - last[1]) / (step - last[0])
        rates = {"seconds_per_step": seconds}
        if self._work.tokens_per_step is None:
            return rates
        tokens = self._work.tokens_per_step / seconds
        rates["tokens_per_second"] = tokens
        if self._work.flops_per_token and self._work.peak_flops:
            rates["mfu"] = tokens * self._work.flops_per_token / self._work.peak_flops
        return rates


def progress_text(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """Say in one line where a run stands.

    Args:
      step: the number of finished steps.
      total_steps: of how many.
      values: of which `loss` and the rates of `Speed` are shown where present.

    Returns:
      Text such as `step 120/1000  loss 3.2145  8.2k tokens/s  MFU 41.3%  1:02:03 left`.
    """
    parts = [f"step {step}/{total_steps}"]
    if "loss" in values:
        parts.append(f"loss {values['loss']:.4f}")
    if "tokens_per_second" in values:
        parts.append(f"{_short(values['tokens_per_second'])} tokens/s")
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f}%")
    if "seconds_per_step" in values:
        left = round(values["seconds_per_step"] * (total_steps - step))
        parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
    return "  ".join(parts)


def _short(number: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.1f}"
