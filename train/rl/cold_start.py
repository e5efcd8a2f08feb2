"""The cold start: solved tasks as text, and the pre-training on them that a small policy begins with."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsv32_jax import json_files
from dsv32_jax.encoding import markup
from dsv32_jax.errors import UsageError
from dsv32_jax.tokenizer import load_tokenizer
from train.agents.traces import solution_trace
from train.data.token_files import INDEX_SUFFIX, write_token_file
from train.rl.agent_tasks import AgentSource
from train.rl.questions import prompt_text, solution_text
from train.rl.run_config import GrpoConfig
from train.rl.task_source import TaskSource

EXAMPLES_FILE, TRACES_FILE = "examples.jsonl", "traces.array_record"
FIRST_EXAMPLE = 2**32  # training asks task 0, 1, ...: no run comes this far
OTHER_SEED = 2**31  # added to the run's, for the tasks of environments


def write_traces(
    cfg: GrpoConfig, source: AgentSource, folder: Path, *, show: Callable[[str], None]
) -> Path:
    """Write the environments' own solutions as conversations, one a document; a file that is there stays.

    Generated tasks are others than training asks; those of environments that have no more come in training too.

    Args:
        cfg: The run, with a cold start and `agent`.
        source: Its tasks.
        folder: Where the file goes; made where there is none.
        show: Is told how far it is.

    Returns:
        The token file.

    Raises:
        UsageError: If an environment does not know how to solve its tasks.
    """
    assert cfg.cold_start is not None, "the run has no cold start"
    assert cfg.agent is not None, "the run has no tools"
    path, n = folder / TRACES_FILE, cfg.cold_start.examples
    if path.is_file():
        return path
    form, thinks = cfg.agent.make_form(load_tokenizer(cfg.tokenizer)), cfg.agent.form == "official"
    documents: list[np.ndarray] = []
    for i in range(n):
        posed = source[i]
        try:
            messages, tools = solution_trace(posed.environment, posed.task, thinks=thinks)
        except NotImplementedError as error:
            raise UsageError(
                f"{posed.environment.name} does not know its solutions, so cold_start can not show them"
            ) from error
        documents.append(form.encode(messages, tools).ids)
        if (i + 1) % 100 == 0 or i + 1 == n:
            show(f"traces {i + 1}/{n}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    write_token_file(partial, documents)
    for suffix in (INDEX_SUFFIX, ""):  # the file itself last: where it is, all is
        partial.with_name(partial.name + suffix).replace(path.with_name(path.name + suffix))
    return path


def write_examples(
    cfg: GrpoConfig, source: TaskSource, folder: Path, *, show: Callable[[str], None]
) -> Path:
    """Write solved tasks, one a line; a file that is there stays.

    Generated problems are others than training asks; tasks of files come in training too, as there are no more.

    Args:
        cfg: The run, with a cold start.
        source: Its tasks.
        folder: Where the file goes; made where there is none.
        show: Is told how far it is.

    Returns:
        The file.

    Raises:
        UsageError: If a task has no answer to be shown.
    """
    assert cfg.cold_start is not None, "the run has no cold start"
    path, n = folder / EXAMPLES_FILE, cfg.cold_start.examples
    if path.is_file():
        return path
    lines: list[str] = []
    for i in range(n):
        task = source[FIRST_EXAMPLE + i]
        if not task.answer:
            raise UsageError(f"task {task.name} has no answer, so cold_start can not show one")
        style = cfg.rewards.style
        text = prompt_text(task, style, cfg.instruction) + solution_text(task, style)
        text = text.removeprefix(markup.BOS).removesuffix(markup.EOS)  # the corpus adds both
        lines.append(json_files.line_of({"text": text}))
        if (i + 1) % 100 == 0 or i + 1 == n:
            show(f"solved tasks {i + 1}/{n}")
    folder.mkdir(parents=True, exist_ok=True)
    json_files.replace_text(path, "".join(lines))
    return path
