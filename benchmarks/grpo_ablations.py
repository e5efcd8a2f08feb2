"""Turn each stabiliser of GRPO off under the condition that it exists for, and draw what it prevents.

Starts every run from one cold start, that of `configs/grpo.py` (made where it is missing), so that pairs differ in one
setting alone. Runs that are done are not run again. As it stands it takes about a quarter of an hour on two shared CPU
cores, too few steps of too small a policy to show what a reward gains by a stabiliser: what it shows is the quantity
that each keeps in bounds.
"""

import argparse
import dataclasses
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsv32_jax import command_line, json_files
from train import config_file, grpo, overrides
from train.metrics import METRICS_FILE
from train.rl.run_config import GrpoConfig

FIGURES = ("reward/mean", "entropy", "kl", "ratio/mean", "masked_fraction")
# So that all runs together take minutes.
SCALE = ("rl.steps=16", "rl.rollouts.prompts=8", "rl.evaluate_every=16", "rl.evaluate_tasks=48")
LOOSE = ("rl.gate.tolerance=10", "rl.gate.share=0.99")  # off, the two sides differ on purpose


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A stabiliser and its condition.

    Attributes:
        condition: Overrides of both runs.
        on: Overrides of the run that has it.
        off: Of the one that has not.
    """

    condition: tuple[str, ...]
    on: tuple[str, ...]
    off: tuple[str, ...]


ABLATIONS = {
    "off-policy mask, responses 4 steps old": Ablation(
        ("rl.rollouts.staleness=4",),
        ("rl.learner.objective.off_policy_delta=0.05",),
        ("rl.learner.objective.off_policy_delta=none",),
    ),
    "sampling mask, top-p 0.8": Ablation(
        ("rl.rollouts.top_p=0.8", *LOOSE),
        ("rl.learner.keep_sampling_mask=true",),
        ("rl.learner.keep_sampling_mask=false",),
    ),
    "off-policy mask, drawn from an FP8 cache": Ablation(
        ("rl.rollouts.cache_dtype=fp8", *LOOSE),
        ("rl.learner.objective.off_policy_delta=0.05",),
        ("rl.learner.objective.off_policy_delta=none",),
    ),
    "kept routing, responses 4 steps old": Ablation(
        ("rl.rollouts.staleness=4", *LOOSE),
        ("rl.learner.keep_routing=true",),
        ("rl.learner.keep_routing=false",),
    ),
    "KL strength 0.01 against none": Ablation(
        (),
        ("rl.learner.objective.kl_strength=0.01",),
        ("rl.learner.objective.kl_strength=0",),
    ),
}


def main() -> int:
    """Run every pair, print a table and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python benchmarks/grpo_ablations.py\n"
        "  python benchmarks/grpo_ablations.py --workdir runs/ablations rl.steps=30",
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/grpo_ablations"), metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    args = parser.parse_intermixed_args()
    with command_line.Boundary() as boundary, command_line.logging_to_stderr():
        plain = overrides.apply_overrides(config_file.load_config("grpo.py"), SCALE)
        base = overrides.apply_overrides(plain, args.overrides)
        boundary.started = True
        cold = args.workdir / "cold_start"
        start = dataclasses.replace(base, rl=dataclasses.replace(base.rl, steps=1))
        grpo.main(start, _made(cold))
        rows = {
            name: {side: _run(base, cold, args.workdir, name, side) for side in ("on", "off")}
            for name in ABLATIONS
        }
        _draw(rows, args.workdir / "ablations.png")
        sys.stdout.write(_table(rows) + f"\nthe figure is {args.workdir / 'ablations.png'}\n")
    return boundary.status


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(base: GrpoConfig, cold: Path, workdir: Path, name: str, side: str) -> list[dict[str, Any]]:
    """Run one side of a pair, and return the lines of its metrics."""
    ablation = ABLATIONS[name]
    changed = (*ablation.condition, *getattr(ablation, side))
    fixed = (f"init_from={cold / 'cold_start'}", "cold_start=none")
    cfg = overrides.apply_overrides(base, (*fixed, *changed))
    folder = _made(workdir / name.replace(" ", "_").replace(",", "") / side)
    grpo.main(cfg, folder)
    return json_files.read_lines(folder / METRICS_FILE)


def _table(rows: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> str:
    """Return the mean of the last ten steps, side by side."""
    lines = ["| pair | side | accuracy | " + " | ".join(FIGURES) + " |"]
    lines.append("| --- " * (3 + len(FIGURES)) + "|")
    for name, sides in rows.items():
        for side, found in sides.items():
            accuracy = [row["accuracy"] for row in found if "accuracy" in row][-1]
            cells = [_late(found, figure) for figure in FIGURES]
            lines.append(f"| {name} | {side} | {accuracy:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _late(found: list[dict[str, Any]], figure: str) -> str:
    values = [row[figure] for row in found[-10:] if row.get(figure) is not None]
    return f"{sum(values) / len(values):.4f}" if values else ""


def _draw(rows: Mapping[str, Mapping[str, list[dict[str, Any]]]], path: Path) -> None:
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False}):
        picture = Figure(figsize=(3.2 * len(FIGURES), 2.4 * len(rows)), layout="constrained")
        grid = picture.subplots(len(rows), len(FIGURES), squeeze=False)
        for line, (name, sides) in zip(grid, rows.items(), strict=True):
            for axes, figure in zip(line, FIGURES, strict=True):
                _draw_pair(axes, sides, figure)
            line[0].set_ylabel(name, wrap=True)
        for top, bottom, figure in zip(grid[0], grid[-1], FIGURES, strict=True):
            top.set_title(figure)
            bottom.set_xlabel("step")
        grid[0][0].legend(frameon=False)
        png = io.BytesIO()
        picture.savefig(png, dpi=70)
    path.write_bytes(png.getvalue())


def _draw_pair(axes: Axes, sides: Mapping[str, list[dict[str, Any]]], figure: str) -> None:
    for side, colour in (("on", "#1f77b4"), ("off", "#d62728")):
        points = [(r["step"], r[figure]) for r in sides[side] if r.get(figure) is not None]
        is_measured = figure != "kl" or any(value for _, value in points)  # it needs a reference
        if points and is_measured:
            axes.plot(*zip(*points, strict=True), label=side, color=colour, linewidth=1)


if __name__ == "__main__":
    sys.exit(main())
