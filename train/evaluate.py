"""Evaluation: policies attempt tasks, several times each, and what they bring off is counted."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv32_jax import command_line, json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError
from train import command, run_folder
from train.agents.environment import Environment
from train.evaluation import players, report, viewer
from train.evaluation.attempts import TRAJECTORIES_FILE, TrajectoryFile, plan
from train.evaluation.config import EvaluateConfig
from train.evaluation.environments import load_environment
from train.evaluation.questions import of_family, of_file
from train.rl.rewards import Rewarder
from train.run_folder import REPORT_FILE, SUMMARY_FILE

logger = logging.getLogger("train.evaluate")  # as a command __name__ is __main__

ABOUT = command.CommandHelp(
    name="python -m train.evaluate",
    summary="Let policies (checkpoints, or models behind OpenAI-compatible endpoints) attempt tasks, and count what "
    "they bring off: success, pass@k, steps, tokens, ratings, with intervals. Every trajectory is kept, for programs "
    "and as a page to look through. An evaluation that was stopped goes on with the same command, and one with more "
    "tasks, samples or policies makes only those that are new.",
    examples="""
    python -m train.evaluate policies=runs/grpo
    python -m train.evaluate policies=before=runs/grpo/cold_start,after=runs/grpo samples=8 ks=1,8
    python -m train.evaluate policies=http://localhost:8000/v1#dsv32 families=gcd,chain_sum:max_terms=3 files=mine.jsonl
    python -m train.evaluate policies=runs/agent form=compact 'families=()' environments=mine.py:make context=summary
    """,
    default_config="evaluate.py",
)
PAGE_FILE, POLICIES_FILE = "trajectories.html", "policies.json"
# What may change between two starts of one evaluation: how it is run, and how much of it is asked for.
CHANGEABLE = ("policies", "tasks", "samples", "ks", "tool_threads")
HOW_RUN = (
    *("engine.slots", "engine.mesh", "rewards.workers"),
    *("endpoint.concurrency", "endpoint.timeout_s", "endpoint.api_key_env"),
    *("endpoint.attempts", "endpoint.give_up_s"),
)


def main(cfg: EvaluateConfig, workdir: Location) -> int:
    """Make every attempt that is not on disk, then count.

    Args:
        cfg: The evaluation.
        workdir: Its folder: `trajectories.jsonl`, `policies.json`, `summary.json`, `report.md`, `trajectories.html`.

    Returns:
        0.

    Raises:
        UsageError: If the workdir holds another evaluation, or there is nothing to evaluate, or on.
    """
    if not isinstance(workdir, Path):
        raise UsageError(f"workdir={workdir} must be a folder: trajectories are appended to a file")
    if not cfg.policies:
        raise UsageError("policies=() names nothing to evaluate; policies=runs/grpo, for one")
    if _is_finished(cfg, workdir):
        logger.info("this evaluation is finished")
        sys.stdout.write("\n" + (workdir / REPORT_FILE).read_text() + "\n")
        return 0
    with command_line.wrong_usage():
        _write_identities(cfg, workdir)
    trajectories = TrajectoryFile(workdir / TRAJECTORIES_FILE)
    with contextlib.closing(trajectories), _environments(cfg, workdir) as environments:
        runs = plan(cfg, environments)
        missing = trajectories.missing(runs)
        logger.info("%d of %d runs are to be made", len(missing), len(runs))
        for policy in cfg.policies:
            todo = [run for run in missing if run.key.policy == policy.name]
            if todo:
                players.make_runs(cfg, policy, todo, trajectories)
    attempts = report.collect(runs, trajectories.done)
    figures = report.figures_of(cfg, attempts)
    text = report.report_text(cfg, attempts, figures)
    records = viewer.read_records([workdir / TRAJECTORIES_FILE])
    viewer.write_page(records, workdir / PAGE_FILE, title=workdir.name)
    json_files.replace_text(workdir / REPORT_FILE, text)
    json_files.write_json(workdir / SUMMARY_FILE, figures)
    sys.stdout.write("\n" + text + f"\nlook through the trajectories: {workdir / PAGE_FILE}\n")
    return 0


def _is_finished(cfg: EvaluateConfig, workdir: Path) -> bool:
    def may_change(field: str) -> bool:
        return field in HOW_RUN or field.split(".")[0] in CHANGEABLE

    made = workdir.glob(TRAJECTORIES_FILE)
    return run_folder.is_finished(cfg, workdir, trained=made, may_change=may_change)


def _write_identities(cfg: EvaluateConfig, workdir: Path) -> None:
    """Write down which checkpoints are evaluated; refuse those that have gone on since the evaluation began."""
    path = workdir / POLICIES_FILE
    before: dict[str, Any] = json_files.read_object(path) if path.is_file() else {}
    now = {policy.name: players.identity(policy) for policy in cfg.policies}
    for name, found in now.items():
        if before.get(name, found) != found:
            raise UsageError(
                f"policy {name} was {before[name]} when this evaluation began and is {found} now; name the step"
                f" (.../checkpoints/N), or choose another --workdir"
            )
    json_files.write_json(path, before | now)


@contextlib.contextmanager
def _environments(cfg: EvaluateConfig, workdir: Path) -> Iterator[list[Environment]]:
    """Open what tasks come from; the processes that judge answers last as long as the `with` block."""
    with contextlib.ExitStack() as stack, command_line.wrong_usage():
        found: list[Environment] = []
        if cfg.families or cfg.files:
            judge = stack.enter_context(Rewarder(cfg.rewards, workdir))
            words = cfg.instruction
            for family in cfg.families:
                found.append(of_family(family, judge, held_out=cfg.tasks, instruction=words))
            for file in cfg.files:
                share = cfg.held_out_fraction
                found.append(of_file(file, judge, fraction=share, instruction=words))
        found += [load_environment(place) for place in cfg.environments]
        if not found:
            raise UsageError("families=(), files=() and environments=() leave nothing to attempt")
        names = [environment.name for environment in found]
        if len(set(names)) < len(names):
            raise UsageError(f"environments share names: {', '.join(sorted(names))}")
        yield found


if __name__ == "__main__":
    sys.exit(command.run_command(main, about=ABOUT))
