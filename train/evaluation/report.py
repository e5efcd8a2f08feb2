"""What an evaluation found: figures, a table, and how they were computed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from train.agents.context import fewest_steps
from train.agents.trajectory import Trajectory
from train.evaluation import statistics
from train.evaluation.attempts import Key, Planned
from train.evaluation.config import EvaluateConfig
from train.evaluation.statistics import Estimate

ALL = "all"


class Attempt(NamedTuple):
    """An attempt at a task: a run, or the one of several that counts.

    Attributes:
        score: Of the verifier; 0 where the environment failed.
        solved: Whether it is 1.
        steps: Of all its runs.
        tokens: Of all its runs.
        end: Why the run ended that counts.
    """

    score: float
    solved: bool
    steps: int
    tokens: int
    end: str


# policy -> environment -> task -> its attempts
Attempts = dict[str, dict[str, dict[str, list[Attempt]]]]


def collect(runs: Sequence[Planned], done: Mapping[Key, Trajectory]) -> Attempts:
    """Put the runs of an evaluation together.

    Args:
        runs: All that were planned.
        done: What came of each.

    Returns:
        The attempts.
    """
    parts: dict[tuple[str, str, str, int], list[Trajectory]] = {}
    for run in runs:
        parts.setdefault(run.key[:4], []).append(done[run.key])
    found: Attempts = {}
    for (policy, environment, task, _), trajectories in parts.items():
        counted = fewest_steps(trajectories)
        grade = counted.chosen.grade
        score = 0.0 if grade is None else grade.score
        attempt = Attempt(
            score, counted.chosen.solved, counted.steps, counted.tokens, counted.chosen.end
        )
        tasks = found.setdefault(policy, {}).setdefault(environment, {})
        tasks.setdefault(task, []).append(attempt)
    return found


def figures_of(cfg: EvaluateConfig, attempts: Attempts) -> dict[str, float]:
    """Compute what a person would quote.

    Args:
        cfg: The evaluation.
        attempts: Of `collect`.

    Returns:
        Flat figures, `POLICY/ENVIRONMENT/NAME`, the environment "all" being every task of every one: `success`,
        `score` and `pass@K` with `_low` and `_high`, `steps`, `tokens`, `tasks`, `attempts`, `end/REASON`;
        `POLICY/rating` where there are several policies.
    """
    figures: dict[str, float] = {}
    for policy, by_environment in attempts.items():
        every = {(e, t): a for e, tasks in by_environment.items() for t, a in tasks.items()}
        parts: dict[str, Sequence[list[Attempt]]] = {ALL: list(every.values())}
        parts |= {name: list(tasks.values()) for name, tasks in by_environment.items()}
        for environment, tasks in parts.items():
            for name, value in _of_tasks(cfg.ks, tasks).items():
                figures[f"{policy}/{environment}/{name}"] = value
    if len(attempts) > 1:
        for policy, rating in zip(attempts, _rate(attempts), strict=True):
            figures |= _named(f"{policy}/rating", rating)
    return figures


def _of_tasks(ks: Sequence[int], tasks: Sequence[Sequence[Attempt]]) -> dict[str, float]:
    """Return the figures of some tasks, each weighing the same."""
    every = [attempt for attempts in tasks for attempt in attempts]
    found = {"tasks": float(len(tasks)), "attempts": float(len(every))}
    found |= _named("success", statistics.share([np.mean([a.solved for a in t]) for t in tasks]))
    found |= _named("score", statistics.share([np.mean([a.score for a in t]) for t in tasks]))
    for k in ks:
        passed = [statistics.pass_at_k(len(t), sum(a.solved for a in t), k) for t in tasks]
        found |= _named(f"pass@{k}", statistics.share(passed))
    found["steps"] = float(np.mean([a.steps for a in every]))
    found["tokens"] = float(np.mean([a.tokens for a in every]))
    for end in sorted({a.end for a in every}):
        found[f"end/{end}"] = float(np.mean([a.end == end for a in every]))
    return found


def _named(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _rate(attempts: Attempts) -> list[Estimate]:
    """Rate the policies by their scores at every task."""
    first, *_ = attempts.values()
    places = [(environment, task) for environment, tasks in first.items() for task in tasks]
    scores = [
        [[a.score for a in by_environment[e][t]] for by_environment in attempts.values()]
        for e, t in places
    ]
    return statistics.ratings(statistics.wins(scores))


def report_text(cfg: EvaluateConfig, attempts: Attempts, figures: Mapping[str, float]) -> str:
    """Lay the figures out.

    Args:
        cfg: The evaluation.
        attempts: Of `collect`.
        figures: Of `figures_of`.

    Returns:
        Markdown.
    """
    shares = ["success", *(f"pass@{k}" for k in cfg.ks if k > 1), "score"]
    rated = len(attempts) > 1
    heads = ["policy", "environment", "tasks", "attempts", *shares, "steps", "tokens"]
    rows = [heads + ["rating"] * rated]
    for policy, by_environment in attempts.items():
        names = [ALL] if len(by_environment) == 1 else [ALL, *by_environment]
        for name in names:
            place = f"{policy}/{name}"
            shown = next(iter(by_environment)) if len(names) == 1 else name
            row = [policy, shown, *(f"{figures[f'{place}/{n}']:.0f}" for n in heads[2:4])]
            row += [_share(figures, f"{place}/{share}") for share in shares]
            row += [f"{figures[f'{place}/{n}']:,.1f}" for n in ("steps", "tokens")]
            if rated:
                rating = f"{policy}/rating"
                row.append(_interval(figures, rating, "{:.0f}") if name == ALL else "")
            rows.append(row)
    lines = [" | ".join(row).join(("| ", " |")) for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    lines += ["", *_ends(attempts, figures), "", *_how(cfg, rated)]
    return "\n".join(lines) + "\n"


def _share(figures: Mapping[str, float], name: str) -> str:
    return _interval(figures, name, "{:.3f}")


def _interval(figures: Mapping[str, float], name: str, form: str) -> str:
    ends = (figures[f"{name}_low"], figures[f"{name}_high"])
    low, high = (form.format(end) for end in ends)
    return f"{form.format(figures[name])} [{low}, {high}]"


def _ends(attempts: Attempts, figures: Mapping[str, float]) -> list[str]:
    """Say why attempts ended."""
    found = []
    for policy in attempts:
        prefix = f"{policy}/{ALL}/end/"
        shares = {n.removeprefix(prefix): v for n, v in figures.items() if n.startswith(prefix)}
        listed = ", ".join(f"{end} {value:.1%}" for end, value in shares.items())
        found.append(f"- {policy} ended by {listed}.")
    return found


def _how(cfg: EvaluateConfig, rated: bool) -> list[str]:
    """Say how the figures came about."""
    drawn = (
        f"temperature {cfg.temperature:g}, top_p {cfg.top_p:g}, top_k {cfg.top_k}, seed {cfg.seed}"
    )
    lines = [
        f"Split {cfg.split}; {drawn}; context management: {cfg.context}. Steps and tokens are means of an attempt.",
        "In brackets: 95% intervals over tasks, exact (Clopper-Pearson) where every task is all right or all wrong, "
        "else bootstrap. They do not cover other seeds of training.",
    ]
    if cfg.parallel > 1:
        lines.append(
            f"An attempt is {cfg.parallel} runs, of which the one with the fewest steps counts; its steps and tokens "
            "are those of all."
        )
    if rated:
        lines.append(
            "Ratings: Bradley-Terry over the scores at each task, ties half a win, mean 1000; they compare these "
            "policies on these tasks only."
        )
    return lines
