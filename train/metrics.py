"""The numbers of a run: metrics.jsonl, tensorboard/, plots/, summary.json and the progress line."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorboardX

from dsv32_jax import errors, json_files, progress_line
from dsv32_jax.convert.storage import Location
from train import plots, progress

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where numbers go besides metrics.jsonl.

    Attributes:
      console_seconds: seconds between progress lines where the output is no terminal.
      tensorboard: also write TensorBoard's event files.
    """

    console_seconds: float = 10.0
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check the range."""
        if not self.console_seconds >= 0:
            raise ValueError(f"console_seconds={self.console_seconds} must be at least 0")


class RunMetrics:
    """Writes one run's numbers, on process 0; on the others every method does nothing.

    A `with` block closes it. Numbers: losses in nats a token, times in seconds, `mfu` from 0 to 1.
    """

    def __init__(
        self,
        folder: Location,
        cfg: MetricsConfig,
        work: progress.Work,
        *,
        start_step: int = 0,
        stream: progress_line.TextStream | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the files; what an earlier process wrote after `start_step` is dropped.

        Args:
          folder: the run's folder, which must exist.
          cfg: where numbers go.
          work: how much there is to do, for rates and time left.
          start_step: the step that the run goes on from; 0 for a new one.
          stream: for the progress line; standard error by default.
          clock: seconds.

        Raises:
          OSError: the folder cannot be written.
        """
        self._folder = folder
        self._total_steps = work.total_steps
        self._speed = progress.Speed(work, clock)
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._line = progress_line.ProgressLine(
            stream or sys.stderr, seconds=cfg.console_seconds, clock=clock
        )
        path = folder / METRICS_FILE
        kept = [row for row in json_files.read_lines(path) if row.get("step", 0) <= start_step]
        json_files.replace_text(path, "".join(map(json_files.line_of, kept)))
        self._lines = json_files.LineWriter(path)
        self._board = None
        if cfg.tensorboard:
            try:
                self._board = tensorboardX.SummaryWriter(
                    str(folder / "tensorboard"), purge_step=start_step + 1
                )
            except ImportError as error:
                raise errors.UsageError(f"metrics.tensorboard=true in {folder}: {error}") from error

    def __enter__(self) -> "RunMetrics":
        """Return this object.

        Returns:
          This object.
        """
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the files.

        Args:
          *raised: the exception that leaves the block, if any; it goes on.
        """
        self.close()

    def log(self, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        """Record the numbers of one step, with the rates since the last call.

        Args:
          step: the number of finished steps.
          values: numbers or arrays of one element, by name; `loss` is shown on the terminal.

        Returns:
          What was recorded: the values as Python numbers, and the rates.

        Raises:
          OSError: the disk is full.
          ValueError: a value is not one number, or is named `step`.
        """
        if "step" in values:
            raise ValueError("values must not contain step; it is an argument of its own")
        numbers = {name: _to_number(name, value) for name, value in values.items()}
        numbers = {**numbers, **self._speed.rates(step)}
        if not self._writes:
            return numbers
        self._lines.write(json_files.line_of({"step": step, **numbers}))
        if self._board is not None:
            for name, number in numbers.items():
                if math.isfinite(number):
                    self._board.add_scalar(name, number, step)
        text = progress.progress_text(step, self._total_steps, numbers)
        self._line.show(text, now=step >= self._total_steps)
        return numbers

    def flush(self) -> None:
        """Have every line so far in the file, as it is to be before a checkpoint that goes on from there."""
        if self._writes:
            self._lines.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json: the figures that a person would quote.

        Args:
          summary: texts, numbers, truth values and None by name; a non-finite number becomes null.

        Raises:
          OSError: the disk is full; an older summary stays.
          ValueError: a value is none of these.
        """
        for name, value in summary.items():
            if not (value is None or isinstance(value, str | bool | int | float)):
                raise ValueError(f"summary {name}={value!r} must be a text, a number or None")
        if self._writes:
            json_files.write_json(self._folder / SUMMARY_FILE, summary)

    def draw_plots(self) -> None:
        """Draw the losses so far into plots/."""
        if self._writes:
            rows = json_files.read_lines(self._folder / METRICS_FILE)
            plots.plot_losses(rows, self._folder / "plots")

    def close(self) -> None:
        """Close the files and draw the plots; a second call does nothing."""
        if not self._writes:
            return
        self._line.close()
        self._lines.close()
        if self._board is not None:
            self._board.close()
        self.draw_plots()
        self._writes = False


def _to_number(name: str, value: Any) -> float | int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: bfloat16
        raise ValueError(f"metric {name} must be one number, not {array.dtype}{list(array.shape)}")
    return int(array.item()) if array.dtype.kind in "biu" else float(array.item())
