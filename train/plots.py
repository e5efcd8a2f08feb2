"""Loss curves as PNG files."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure
from matplotlib.backends import backend_agg

from dsv32_jax.convert.storage import Location


def plot_losses(rows: Sequence[Mapping[str, Any]], folder: Location) -> list[Location]:
    """Draw each series whose name contains "loss" over the steps, one file a series.

    Uses no global state of matplotlib, so that a caller's own figures and backend stay as they are.

    Args:
      rows: the lines of metrics.jsonl: `step` and numbers; None stands for a value that was not
        finite, and leaves a gap.
      folder: where `<series>.png` go; made when there is something to draw.

    Returns:
      The files written, in order of the names.
    """
    names = sorted({name for row in rows for name in row if "loss" in name})
    paths = []
    for name in names:
        points = [(row["step"], _number(row[name])) for row in rows if name in row]
        if not any(math.isfinite(value) for _, value in points):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.png")
        _draw(name, points, paths[-1])
    return paths


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _draw(name: str, points: Sequence[tuple[int, float]], path: Location) -> None:
    steps, values = np.array(points, dtype=float).T
    picture = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.add_subplot()
    axes.plot(steps, values, linewidth=1, marker="." if len(steps) < 30 else "")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.3)
    png = io.BytesIO()
    backend_agg.FigureCanvasAgg(picture).print_png(png)
    path.write_bytes(png.getvalue())
