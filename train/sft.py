"""Supervised fine-tuning: a model trains on examples, only on the tokens that they say."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dsv32_jax import command_line, joining, json_files, progress_line, sharding
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError
from dsv32_jax.parameters import Parameters
from dsv32_jax.tokenizer import load_tokenizer
from train import command, evidence, hosts, pretrain, run_folder
from train.data import loader
from train.data.config import Source
from train.data.corpus import Corpus, open_corpora
from train.loop import Leg, run_leg
from train.rl import cold_start
from train.rl.accuracy import answers_right
from train.rl.questions import Questions
from train.rl.rewards import Rewarder, require_scorable
from train.rl.task_source import TaskSource
from train.run_folder import REPORT_FILE, SUMMARY_FILE
from train.sft_config import SftConfig, SolvedConfig
from train.stage import ATTENTION
from train.start import find_start, restore_parameters

logger = logging.getLogger("train.sft")  # as a command __name__ is __main__

ABOUT = command.CommandHelp(
    name="python -m train.sft",
    summary="Fine-tune a model on examples: JSON lines of prompts and responses, conversations, or token ids with "
    "masks. With no arguments a small base is pre-trained and fine-tuned on solved tasks, on two CPU cores, in "
    "minutes. A run that was stopped goes on with the same command.",
    examples="""
    python -m train.sft
    python -m train.sft --workdir runs/mine init_from=runs/sparse base=none data.sources=mine.jsonl solved=none
    python -m train.sft init_from=runs/base base=none stage=dense training.optimizer.indexer=none
    """,
    default_config="cold_start.py",
)
# What may change between two starts of one run: where it runs and how it is watched, not what it computes.
CHANGEABLE = ("mesh", "checkpoint", "metrics", "guard", "distributed", "training.steps")


def main(cfg: SftConfig, workdir: Location) -> int:
    """Make the base where there is none, measure, fine-tune, measure again.

    Args:
        cfg: The run.
        workdir: The run's folder: `metrics.jsonl`, `checkpoints/`, `report.md`, `summary.json`, the examples where they
            are made, and the base under `base/`.

    Returns:
        0.

    Raises:
        UsageError: If the workdir holds a run of another config, or the config does not fit the devices, the examples
            or the model that it begins with.
    """
    began = time.monotonic()
    if cfg.distributed:
        joining.join()
    if _is_finished(cfg, workdir):
        logger.info("this run is finished")
        _show_report(workdir)
        return 0
    with command_line.wrong_usage():
        mesh = sharding.make_mesh(cfg.mesh)
        cfg.run.check_mesh(mesh)
        source = None if cfg.solved is None else _open_tasks(cfg.solved)
        data = replace(cfg.run.stage_data(cfg.stage), sources=_sources(cfg, source, workdir))
        corpora = open_corpora(data)
        rows = loader.heldout_rows(
            data, cfg.held_out_rows, vocab_size=cfg.model.vocab_size, opened=corpora
        )
        load = None if cfg.base is not None else _given_model(cfg, mesh)
    load = load or _trained_base(cfg, workdir, mesh)
    leg = Leg(cfg.stage, cfg.stage, cfg.training, data, workdir)
    with hosts.losses_named(), jax.set_mesh(mesh):
        measure = partial(_measure, cfg, source, workdir, rows, mesh)
        figures = _train(cfg, leg, mesh, corpora, load, measure)
    if command_line.process_index() == 0:
        figures["wall_s"] = time.monotonic() - began
        json_files.write_json(workdir / SUMMARY_FILE, figures)
        json_files.replace_text(workdir / REPORT_FILE, report_text(figures))
    _show_report(workdir)
    return 0


def _is_finished(cfg: SftConfig, workdir: Location) -> bool:
    def may_change(field: str) -> bool:
        return field in CHANGEABLE or field.split(".")[0] in CHANGEABLE

    trained = (*workdir.glob("checkpoints/*"), *workdir.glob("base/**/checkpoints/*"))
    return run_folder.is_finished(cfg, workdir, trained=trained, may_change=may_change)


def _open_tasks(solved: SolvedConfig) -> TaskSource:
    """Return the tasks, refusing those that can not be judged."""
    source = TaskSource(solved.tasks)
    if solved.measured > len(source.held_out):
        raise UsageError(
            f"solved.measured={solved.measured}, but only {len(source.held_out)} tasks are held out;"
            " raise solved.tasks.held_out or lower it"
        )
    require_scorable(solved.rewards, tuple(source.held_out))
    return source


def _sources(cfg: SftConfig, source: TaskSource | None, workdir: Location) -> tuple[Source, ...]:
    """Return where the examples are, having written the solved tasks where the run trains on those."""
    solved = cfg.solved
    if solved is None or source is None or solved.examples == 0:
        return cfg.data.sources
    if not isinstance(workdir, Path):
        raise UsageError(f"workdir={workdir} must be a folder: examples are written to it")
    path = workdir / cold_start.EXAMPLES_FILE
    line = progress_line.ProgressLine(sys.stderr, seconds=cfg.metrics.console_seconds)
    if command_line.process_index() == 0:
        cold_start.write_examples(
            source,
            path,
            n=solved.examples,
            style=solved.rewards.style,
            instruction=solved.instruction,
            masked=True,
            show=line.show,
        )
    line.close()
    multihost_utils.sync_global_devices("examples of the fine-tuning")
    return (Source(path=str(path)),)


def _given_model(cfg: SftConfig, mesh: Mesh) -> Callable[[], Parameters]:
    """Return what loads the model of `init_from`, if the stage can follow what it has been through."""
    start = find_start(cfg, mesh)
    if cfg.stage == "dense" and start.done not in (None, "dense", "warmup"):
        raise UsageError(
            f"init_from={cfg.init_from} ended with the {start.done} stage, whose selection stage=dense would leave out;"
            " set stage=sparse"
        )
    if cfg.stage == "sparse" and start.done == "dense":
        raise UsageError(
            f"init_from={cfg.init_from} ended with the dense stage, so its indexers, by which stage=sparse selects,"
            " are untrained; set stage=dense training.optimizer.indexer=none, or warm it up first"
        )
    return start.load


def _trained_base(cfg: SftConfig, workdir: Location, mesh: Mesh) -> Callable[[], Parameters]:
    """Return what loads the base, having trained it."""
    run, folder = cfg.base_run(), workdir / "base"
    folder.mkdir(parents=True, exist_ok=True)
    pretrain.main(run, folder)
    return lambda: restore_parameters(run, folder, mesh)


def _train(
    cfg: SftConfig,
    leg: Leg,
    mesh: Mesh,
    corpora: Sequence[Corpus],
    load: Callable[[], Parameters],
    measure: Callable[[Parameters], tuple[evidence.RowLosses, np.ndarray | None]],
) -> dict[str, Any]:
    """Fine-tune between two measurements; return the figures."""
    logger.info("measuring the model to begin with")
    before = measure(load())
    result = run_leg(cfg, leg, mesh, corpora, load)
    logger.info("measuring the model fine-tuned")
    after = measure(restore_parameters(cfg, leg.folder, mesh))
    figures: dict[str, Any] = {}
    for name, (losses, right) in (("before", before), ("after", after)):
        mean, error = evidence.mean_and_stderr(losses.total, losses.tokens)
        figures[f"held_out_loss/{name}"], figures[f"held_out_loss/{name}_stderr"] = mean, error
        if right is not None:
            figures[f"accuracy/{name}"], figures["accuracy/tasks"] = float(right.mean()), len(right)
    figures["tokens_per_s"], figures["steps"] = result.tokens_per_s, cfg.training.steps
    return figures


def _measure(
    cfg: SftConfig,
    source: TaskSource | None,
    workdir: Location,
    rows: loader.Batch,
    mesh: Mesh,
    params: Parameters,
) -> tuple[evidence.RowLosses, np.ndarray | None]:
    """Return the losses of held-out rows, and which held-out tasks one answer each gets right."""
    mode = ATTENTION[cfg.stage]
    losses = evidence.row_losses(cfg.model, params, mode, rows, cfg.rows_at_once, mesh)
    solved = cfg.solved
    if solved is None or source is None:
        return losses, None
    with Rewarder(solved.rewards, workdir) as rewarder:
        questions = Questions(
            source.held_out,
            load_tokenizer(cfg.data.tokenizer),
            rewarder,
            style=solved.rewards.style,
            instruction=solved.instruction,
        )
        right = answers_right(
            cfg.model,
            params,
            questions,
            range(solved.measured),
            mode="dense" if cfg.stage == "dense" else "sparse",
            max_tokens=solved.max_tokens,
            slots=solved.slots,
            seed=cfg.seed,
            mesh=mesh,
        )
    return losses, right


def report_text(figures: dict[str, Any]) -> str:
    """Lay the figures out.

    Args:
        figures: Of the run.

    Returns:
        Markdown.
    """
    lines = ["| measured on what is held out | before | after |", "| --- | --- | --- |"]
    losses = [
        f"{figures[f'held_out_loss/{when}']:.4f} ± {figures[f'held_out_loss/{when}_stderr']:.4f}"
        for when in ("before", "after")
    ]
    lines.append(f"| loss of trained tokens, nats/token | {losses[0]} | {losses[1]} |")
    if "accuracy/before" in figures:
        right = [f"{figures[f'accuracy/{when}']:.3f}" for when in ("before", "after")]
        lines.append(f"| right answers, of {figures['accuracy/tasks']} | {right[0]} | {right[1]} |")
    lines += ["", f"{figures['steps']} steps, {figures['tokens_per_s']:,.0f} tokens/s."]
    lines += ["The errors are over rows, not over seeds; right answers are of one draw each."]
    return "\n".join(lines) + "\n"


def _show_report(workdir: Location) -> None:
    """Print the report."""
    path = workdir / REPORT_FILE
    if path.is_file() and command_line.process_index() == 0:
        sys.stdout.write("\n" + path.read_text() + "\n")


if __name__ == "__main__":
    sys.exit(command.run_command(main, about=ABOUT))
