"""The cold start: solved tasks as text, and the pre-training on them that a small policy begins with."""

from collections.abc import Callable

from dsv32_jax import json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.encoding import markup
from dsv32_jax.errors import UsageError
from train.rl.questions import prompt_text, solution_text
from train.rl.run_config import GrpoConfig
from train.rl.task_source import TaskSource

EXAMPLES_FILE = "examples.jsonl"
FIRST_EXAMPLE = 2**32  # training asks task 0, 1, ...: no run comes this far


def write_examples(
    cfg: GrpoConfig, source: TaskSource, folder: Location, *, show: Callable[[str], None]
) -> Location:
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
