"""How a benchmark times a call, reads its counts, and keeps its results."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROUND_S = 0.05  # one timed round lasts about this long


def median_seconds(run: Callable[..., Any], arguments: tuple[Any, ...], rounds: int) -> float:
    """Return the median over rounds of the mean time of back-to-back calls."""
    jax.block_until_ready(run(*arguments))
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = max(1, int(ROUND_S / max(time.perf_counter() - began, 1e-6)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            out = run(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times))


def count(text: str) -> int:
    """Read a command line's whole number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def accelerator(parser: argparse.ArgumentParser) -> jax.Device:
    """Return the device to measure; ends the command where it is a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        parser.error("needs a GPU: what is measured would keep this CPU busy for hours")
    return device


class Report:
    """Results in a JSON file, written after each, so that a run that is cut short keeps what it has."""

    def __init__(self, path: Path | None, **head: Any):
        """Begin with the device and what else stands at the head; no path keeps nothing."""
        self._path = path
        device = jax.devices()[0].device_kind
        date = time.strftime("%Y-%m-%d")
        self._content: dict[str, Any] = {"device": device, "jax": jax.__version__, "date": date}
        self._content |= head | {"results": []}
        self._write()

    def add(self, result: dict[str, Any]) -> None:
        """Keep one more result."""
        self._content["results"].append(result)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps(self._content, indent=1) + "\n")
        except OSError as error:
            raise SystemExit(f"error: {self._path} cannot be written: {error.strerror}") from error
