"""Say what a run of reinforcement learning brought: a table, one figure, and the means for its summary."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsv32_jax.convert.storage import Location

# Of these a summary has the mean over all steps that have them.
MEANS = (
    "ratio/mean", "masked_fraction", "clip_fraction", "kl", "entropy", "length", "rerouted",
    "tokens_per_s/rollout", "tokens_per_s/train", "seconds/rollout", "seconds/rewards", "seconds/train", "seconds/sync",
)  # fmt: skip
COUNTS = ("reward/faults", "without_group", "prompts_too_long")
PANELS = (
    (("reward/mean", "reward/correct"), "reward"),
    (("length",), "tokens of a response"),
    (("entropy",), "entropy, nats/token"),
    (("kl",), "KL from the reference, nats/token"),
    (("ratio/mean",), "mean ratio"),
    (("masked_fraction", "clip_fraction"), "share masked, clipped"),
    (("tokens_per_s/rollout", "tokens_per_s/train"), "tokens/s"),
)
SHORT = 3  # steps at the start that compile are left out of rates


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of a whole run.

    Args:
        rows: The lines of metrics.jsonl.

    Returns:
        Means over steps, of rates and seconds without the first steps, which compile; sums of counts.
    """
    figures: dict[str, float] = {}
    for name in MEANS:
        late = name.startswith(("tokens_per_s", "seconds"))
        part = rows[SHORT:] if late and len(rows) > SHORT else rows
        values = [row[name] for row in part if row.get(name) is not None]
        if values:
            figures[name] = float(np.mean(values))
    for name in COUNTS:
        figures[name] = float(sum(row.get(name) or 0 for row in rows))
    return figures


def report_text(figures: Mapping[str, float]) -> str:
    """Lay the figures out in Markdown.

    Args:
        figures: Of the run.

    Returns:
        Held-out accuracy before and after, by source, then the rest.
    """
    sources = sorted(
        name.removesuffix("/before").removeprefix("accuracy/")
        for name in figures
        if name.startswith("accuracy/") and name.endswith("/before") and name.count("/") == 2
    )
    lines = ["| held-out accuracy | before | after |", "| --- | --- | --- |"]
    for label, stem in [(s, f"accuracy/{s}") for s in sources] + [("all", "accuracy")]:
        lines.append(
            f"| {label} | {figures[f'{stem}/before']:.3f} | {figures[f'{stem}/after']:.3f} |"
        )
    lines += ["", "| figure | value |", "| --- | --- |"]
    rest = [name for name in figures if not name.startswith("accuracy")]
    lines += [f"| {name} | {figures[name]:.6g} |" for name in rest]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float], path: Location) -> None:
    """Draw the curves of a run into one picture.

    Args:
        rows: The lines of metrics.jsonl.
        figures: Of the run; `accuracy/before` is where the curve begins.
        path: The PNG file.
    """
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(15, 7), layout="constrained")
        first, *panels = figure.subplots(2, 4).flat
        _draw_accuracy(first, rows, figures)
        for axes, (names, label) in zip(panels, PANELS, strict=True):
            for name in names:
                _draw_series(axes, rows, name)
            axes.set_ylabel(label)
            axes.set_xlabel("step")
            if len(names) > 1:
                axes.legend(frameon=False)
        png = io.BytesIO()
        figure.savefig(png, dpi=130)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png.getvalue())


def _draw_accuracy(
    axes: Axes, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float]
) -> None:
    names = sorted({name for row in rows for name in row if name.startswith("accuracy")})
    for name in names:
        points = [(0, figures[f"{name}/before"])] + [
            (row["step"], row[name]) for row in rows if name in row
        ]
        whole = name == "accuracy"
        axes.plot(
            *zip(*points, strict=True),
            label="all" if whole else name.removeprefix("accuracy/"),
            linewidth=2.5 if whole else 1,
            color="black" if whole else None,
            marker=".",
        )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("held-out accuracy")
    axes.set_xlabel("step")
    axes.legend(frameon=False)


def _draw_series(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
