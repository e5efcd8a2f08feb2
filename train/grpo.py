"""Reinforcement learning by GRPO with DeepSeek-V3.2's stabilisers, from a cold-started or a given policy."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dsv32_jax import command_line, joining, json_files, progress_line
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError
from dsv32_jax.parameters import Parameters
from dsv32_jax.tokenizer import Tokenizer, load_tokenizer
from train import command, hosts, pretrain, run_folder
from train.metrics import METRICS_FILE
from train.rl import cold_start, report
from train.rl.agent_tasks import AgentSource, AgentTasks
from train.rl.loop import Run, Setting
from train.rl.questions import Questions
from train.rl.rewards import Rewarder, require_scorable
from train.rl.run_config import GrpoConfig
from train.rl.task_source import TaskSource
from train.rl.trainer import MAX_TRIES
from train.run_folder import REPORT_FILE, SUMMARY_FILE
from train.signals import StopOnSignal
from train.start import find_start, restore_parameters

logger = logging.getLogger("train.grpo")  # as a command __name__ is __main__

ABOUT = command.CommandHelp(
    name="python -m train.grpo",
    summary="Train a policy on tasks whose answers can be checked, by GRPO with unbiased KL, off-policy mask, kept "
    "routing and kept sampling mask. With no arguments a small policy is cold-started and trained on two CPU "
    "cores, in minutes. A run that was stopped goes on with the same command.",
    examples="""
    python -m train.grpo
    python -m train.grpo --workdir runs/mine rl.steps=200 rl.rollouts.temperature=0.9
    python -m train.grpo 'tasks.families=chain_sum:max_terms=3,gcd' 'tasks.files=mine.jsonl'
    python -m train.grpo --workdir gs://bucket/run rewards.ray=HEAD:6379 rewards.workers=32
    python -m train.grpo --config v32_671b_grpo.py init_from=DIR distributed=true
    """,
    default_config="grpo.py",
)
# What may change between two starts of one run: where it runs and how it is watched, not what it computes.
CHANGEABLE = ("mesh", "checkpoint", "metrics", "distributed", "rl.steps", "rl.samples_every")


def main(cfg: GrpoConfig, workdir: Location) -> int:
    """Make the policy to begin with, check that sampler and learner agree, train, and say what it brought.

    Args:
        cfg: The run.
        workdir: The run's folder: `metrics.jsonl`, `samples.md`, `checkpoints/`, `plots/`, `report.md`, `summary.json`,
            and the cold start under `cold_start/`.

    Returns:
        0.

    Raises:
        UsageError: If the workdir holds a run of another config, or the config does not fit the devices or the tasks.
        WorkFailedError: If sampler and learner disagree, or nothing can be learned.
    """
    began = time.monotonic()
    if cfg.distributed:
        joining.join()
    if _is_finished(cfg, workdir):
        logger.info("this run is finished")
        run_folder.show_report(workdir)
        return 0
    stop = StopOnSignal()
    with command_line.wrong_usage():
        mesh = cfg.make_mesh()
        cfg.check_mesh(mesh)
        tokenizer = load_tokenizer(cfg.tokenizer)
        _check_vocab(cfg, tokenizer)
        source = _make_source(cfg)
        _check_tasks(cfg, source)
        questions = partial(
            Questions,
            tokenizer=tokenizer,
            style=cfg.rewards.style,
            instruction=cfg.instruction,
        )
        if cfg.agent is None:
            asked, held_out = (
                questions(tasks, rewarder=None) for tasks in (source, source.held_out)
            )
            _check_prompts(cfg, asked, held_out)
    # The rewarder comes first: what it lacks is to be said before hours go into a cold start.
    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.losses_named())
        pose: Callable[[Any], Questions | AgentTasks]
        if cfg.agent is None:
            pose = partial(questions, rewarder=stack.enter_context(_rewarder(cfg, workdir, stop)))
        else:
            row = cfg.rl.learner.row_length
            pose = partial(AgentTasks, cfg=cfg.agent, tokenizer=tokenizer, row=row)
        with command_line.wrong_usage():
            start = _policy(cfg, source, workdir, mesh)
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(stop)
        posed = pose(source)
        setting = Setting(
            model=cfg.model,
            rl=cfg.rl,
            kl_strength=cfg.kl_strength,
            tasks=posed,
            held_out=pose(source.held_out),
            text=posed.text,
            checkpoint=cfg.checkpoint,
            metrics=cfg.metrics,
            seed=cfg.seed,
        )
        figures = Run(setting, workdir, mesh).run(start, stop)
    if command_line.process_index() == 0:
        rows = json_files.read_lines(workdir / METRICS_FILE)
        figures |= report.means(rows) | {"wall_s": time.monotonic() - began}
        json_files.write_json(workdir / SUMMARY_FILE, figures)
        json_files.replace_text(workdir / REPORT_FILE, report.report_text(figures))
        report.draw(rows, figures, workdir / "plots" / "grpo.png")
    run_folder.show_report(workdir)
    return 0


def _is_finished(cfg: GrpoConfig, workdir: Location) -> bool:
    def may_change(field: str) -> bool:
        return field in CHANGEABLE or field.split(".")[0] in CHANGEABLE

    cold = workdir / "cold_start"
    folders = (workdir, cold, *cold.glob("stages/*"))
    trained = (path for folder in folders for path in folder.glob("checkpoints/*"))
    return run_folder.is_finished(cfg, workdir, trained=trained, may_change=may_change)


def _check_vocab(cfg: GrpoConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise UsageError(
            f"vocabulary too small: model.vocab_size={cfg.model.vocab_size}, but the tokenizer"
            f" {cfg.tokenizer!r} has ids up to {tokenizer.vocab_size - 1}"
        )


def _make_source(cfg: GrpoConfig) -> TaskSource | AgentSource:
    if cfg.agent is None:
        assert cfg.tasks is not None, "one of the two is given"
        return TaskSource(cfg.tasks)
    if jax.process_count() > 1:
        raise UsageError("agent needs one process: tools are not called on several")
    return AgentSource(cfg.agent, cfg.seed)


def _check_tasks(cfg: GrpoConfig, source: TaskSource | AgentSource) -> None:
    """Refuse tasks that can not be rewarded, and comparisons of more tasks than there are."""
    n = len(source.held_out)
    asked = {"evaluate_tasks": cfg.rl.evaluate_tasks, "gate.prompts": cfg.rl.gate.prompts}
    for name, number in asked.items():
        if number > n:
            raise UsageError(
                f"rl.{name}={number}, but only {n} tasks are held out;"
                " raise tasks.held_out, or agent.held_out, or lower it"
            )
    if isinstance(source, AgentSource):
        return
    drawn = (source[i] for i in range(cfg.rl.rollouts.prompts))
    require_scorable(cfg.rewards, (*source.held_out, *drawn))


def _check_prompts(cfg: GrpoConfig, asked: Questions, held_out: Questions) -> None:
    """Refuse prompts that the sampler could not take, before anything is trained."""
    rollouts = cfg.rl.rollouts
    if not any(len(asked.ask(i).prompt) <= rollouts.max_prompt_tokens for i in range(MAX_TRIES)):
        raise UsageError(
            f"rl.rollouts.max_prompt_tokens={rollouts.max_prompt_tokens}, but none of the first {MAX_TRIES} tasks has"
            f" so short a prompt; that of {asked.ask(0).task.name} has {len(asked.ask(0).prompt)} tokens"
        )
    for i in range(max(cfg.rl.evaluate_tasks, cfg.rl.gate.prompts)):
        task = held_out.ask(i)
        if len(task.prompt) >= rollouts.max_len:
            raise UsageError(
                f"the held-out task {task.task.name} has a prompt of {len(task.prompt)} tokens, which leaves no room in"
                f" max_prompt_tokens + max_tokens={rollouts.max_len}; raise rl.rollouts.max_prompt_tokens"
            )


def _rewarder(
    cfg: GrpoConfig, workdir: Location, stop: StopOnSignal
) -> contextlib.AbstractContextManager[Rewarder | None]:
    """Make the rewarder on process 0, which alone judges; what is wrong with it ends every process."""
    made: list[Rewarder] = []

    def make() -> None:
        made.append(Rewarder(cfg.rewards, workdir, should_stop=lambda: bool(stop.requested)))

    hosts.as_process_0(make)
    return made[0] if made else contextlib.nullcontext()


def _policy(
    cfg: GrpoConfig, source: TaskSource | AgentSource, workdir: Location, mesh: Mesh
) -> Callable[[], Parameters]:
    """Return what loads the policy to begin with, the cold start having been run where there is one."""
    if cfg.cold_start is None:
        return find_start(cfg, mesh).load
    folder = workdir / "cold_start"
    tokens = cfg.agent is not None and not cfg.cold_start.masked
    if tokens and storage.is_remote(workdir):
        raise UsageError(
            f"workdir={workdir}: a bucket can not hold traces of tokens; set cold_start.masked=true"
        )
    path = folder / (cold_start.TRACES_FILE if tokens else cold_start.EXAMPLES_FILE)
    line = progress_line.ProgressLine(sys.stderr, seconds=cfg.metrics.console_seconds)
    if command_line.process_index() == 0:
        if isinstance(source, AgentSource):
            assert cfg.agent is not None, "the source is the agent's"
            others = AgentSource(cfg.agent, (cfg.seed + cold_start.OTHER_SEED) % 2**32)
            cold_start.write_traces(cfg, others, path, show=line.show)
        else:
            cold_start.write_examples(
                source,
                path,
                n=cfg.cold_start.examples,
                style=cfg.rewards.style,
                instruction=cfg.instruction,
                masked=cfg.cold_start.masked,
                worked=cfg.cold_start.worked,
                show=line.show,
            )
    line.close()
    multihost_utils.sync_global_devices("examples of the cold start")
    run = cfg.cold_start_run(str(path))
    pretrain.main(run, folder)
    return lambda: restore_parameters(run, folder, mesh)


if __name__ == "__main__":
    sys.exit(command.run_command(main, about=ABOUT))
