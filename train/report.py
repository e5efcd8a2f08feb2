"""Say what a run found: tables for the terminal and report.md, and one figure."""

import io
from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dsv32_jax import json_files
from dsv32_jax.convert.storage import Location
from train.evidence import GAPS, LOSSES
from train.metrics import METRICS_FILE
from train.recall import CHOICES

LABELS = {
    "dense": "dense",
    "sparse_untrained": "sparse, untrained indexer",
    "sparse_warmup": "sparse, after warm-up",
    "sparse": "sparse, after sparse training",
    "dense_control": "control: dense, same tokens",
    "window_control": "control: last-k window, same tokens",
}
COLOURS = {"indexer": "#1f77b4", "random": "#c7c7c7", "window": "#ff7f0e", "oracle": "#2ca02c"}


def report_text(figures: Mapping[str, float], layers: list[str], caveat: str) -> str:
    """Lay the figures out in Markdown tables.

    Args:
        figures: Of `evidence.loss_figures`, `recall_figures` and `kl_figures`.
        layers: Names of the layers.
        caveat: What the run cannot show, in the words of its config.

    Returns:
        The text.
    """
    lines = ["| model | held-out loss, nats/token |", "| --- | --- |"]
    for name in LOSSES:
        if f"lm_loss/{name}" in figures:
            value, error = figures[f"lm_loss/{name}"], figures[f"lm_loss/{name}_stderr"]
            lines.append(f"| {LABELS[name]} | {value:.4f} ± {error:.4f} |")
    lines += [
        "",
        "| difference, paired over rows | all tokens | tokens with more than k keys |",
        "| --- | --- | --- |",
    ]
    for first, second in GAPS:
        key = f"{first}-{second}"
        if f"gap/{key}" in figures:
            cells = [_percent(figures, f"{kind}/{key}") for kind in ("gap", "gap_beyond_topk")]
            lines.append(f"| {LABELS[first]} − {LABELS[second]} | {cells[0]} | {cells[1]} |")
    lines.append("")
    if "gap_closed_by_warmup" in figures:
        closed = figures["gap_closed_by_warmup"]
        lines += [
            f"Of the gap that the untrained indexer opens, the warm-up closes {closed:.1%}.",
            "",
        ]
    lines += [
        "| layer | random | window | indexer | oracle | normalised | KL untrained | KL warmed | KL uniform |"
    ]
    lines += ["| --- |" + " --- |" * 8]
    for layer in layers:
        cells = [
            f"{figures[f'recall/{layer}/{choice}']:.3f}"
            for choice in ("random", "window", "indexer", "oracle")
        ]
        cells.append(f"{figures[f'recall/{layer}/normalised']:.3f}")
        kls = (figures.get(f"kl/{layer}/{kind}") for kind in ("first", "last", "uniform"))
        cells += ["" if kl is None else f"{kl:.3f}" for kl in kls]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Recall: share of the attention's mass that the chosen k keys hold, after the sparse stage, on rows with",
    ]
    lines += [
        "more than k keys; normalised: 0 is a random choice, 1 the best. KL: nats per token, at the warm-up's ends."
    ]
    return "\n".join(lines) + f"\n\n{caveat}\n"


def _percent(figures: Mapping[str, float], key: str) -> str:
    return f"{figures[key]:+.2%} ± {figures[f'{key}_stderr']:.2%}"


def draw(
    figures: Mapping[str, float], layers: list[str], legs: Mapping[str, Location], path: Location
) -> None:
    """Draw losses, recall by layer and the training curves into one picture.

    Args:
        figures: As for `report_text`.
        layers: Names of the layers.
        legs: Folder of each leg's metrics, by name, in order.
        path: The PNG file.
    """
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(13, 8), layout="constrained")
        (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
        _draw_losses(top_left, figures)
        _draw_recall(top_right, figures, layers)
        _draw_curve(bottom_left, legs, "lm", "training loss, nats/token", skip=("warmup",))
        _draw_curve(bottom_right, legs, "kl", "indexer KL over all layers, nats/token", skip=())
        path.parent.mkdir(parents=True, exist_ok=True)
        png = io.BytesIO()
        figure.savefig(png, dpi=130)
    path.write_bytes(png.getvalue())


def _draw_losses(axes: matplotlib.axes.Axes, figures: Mapping[str, float]) -> None:
    names = [name for name in LOSSES if f"lm_loss/{name}" in figures]
    values = [figures[f"lm_loss/{name}"] for name in names]
    errors = [figures[f"lm_loss/{name}_stderr"] for name in names]
    axes.barh([LABELS[name] for name in names], values, xerr=errors, color="#1f77b4", alpha=0.8)
    for i, (value, error) in enumerate(zip(values, errors, strict=True)):
        axes.text(value + error, i, f" {value:.3f}", va="center", ha="left")
    axes.invert_yaxis()
    axes.set_xlabel("held-out loss, nats/token")
    axes.set_title("Losses")


def _draw_recall(
    axes: matplotlib.axes.Axes, figures: Mapping[str, float], layers: list[str]
) -> None:
    place = np.arange(len(layers))
    width = 0.8 / len(CHOICES)
    for i, choice in enumerate(("random", "window", "indexer", "oracle")):
        heights = [figures[f"recall/{layer}/{choice}"] for layer in layers]
        axes.bar(place + (i - 1.5) * width, heights, width, label=choice, color=COLOURS[choice])
    axes.set_xticks(place, layers)
    axes.set_ylim(0, 1.12)  # room for the legend
    axes.set_ylabel("attention mass kept")
    axes.set_title("Recall by layer, rows with more than k keys")
    axes.legend(frameon=False, ncols=len(CHOICES))


def _draw_curve(
    axes: matplotlib.axes.Axes,
    legs: Mapping[str, Location],
    metric: str,
    label: str,
    skip: tuple[str, ...],
) -> None:
    """Draw one metric of every leg that has it, legs that train on the same tokens over the same steps."""
    first = 0
    for name, folder in legs.items():
        rows = [row for row in json_files.read_lines(folder / METRICS_FILE) if metric in row]
        if name in skip or not rows:
            continue
        steps = np.array([row["step"] for row in rows]) + first
        axes.plot(steps, [row[metric] for row in rows], label=name, linewidth=1)
        if not name.endswith("_control") and name != "sparse":
            first = int(steps[-1])
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_yscale("log" if metric == "kl" else "linear")
    axes.legend(frameon=False)
