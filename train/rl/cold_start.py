"""Solved tasks as text: what a policy is shown before it answers on its own."""

from collections.abc import Callable

from dsv32_jax import json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.encoding import markup
from dsv32_jax.errors import UsageError
from train.rl.answer import Style
from train.rl.problems import number_of
from train.rl.questions import prompt_text, solution_text
from train.rl.task_source import TaskSource
from train.rl.working import working

EXAMPLES_FILE = "examples.jsonl"
FIRST_EXAMPLE = 2**32  # training asks task 0, 1, ...: no run comes this far


def write_examples(
    source: TaskSource,
    path: Location,
    *,
    n: int,
    style: Style,
    instruction: str,
    masked: bool,
    worked: float = 0.0,
    show: Callable[[str], None],
) -> None:
    """Write solved tasks, one a line; a file that is there stays.

    Generated problems are others than training asks; tasks of files come in training too, as there are no more.

    Args:
        source: The tasks.
        path: The file; its folder is made where there is none.
        n: How many.
        style: The format of questions and answers.
        instruction: Put behind each question.
        masked: Write examples of which only the answers train, else text.
        worked: Share of them that show the steps to the answer as thinking, where `working` knows them.
        show: Is told how far it is.

    Raises:
        UsageError: If a task has no answer to be shown.
    """
    if path.is_file():
        return
    lines: list[str] = []
    for i in range(n):
        task = source[FIRST_EXAMPLE + i]
        if not task.answer:
            raise UsageError(f"task {task.name} has no answer that an example could show")
        steps = working(task) if _shown(i) < worked else None
        prompt = prompt_text(task, style, instruction)
        answer = solution_text(task, style, thinking=steps or "")
        text = (prompt + answer).removeprefix(markup.BOS).removesuffix(markup.EOS)
        # The corpus adds both ends to text, but not to examples.
        entry = {"prompt": prompt, "response": answer} if masked else {"text": text}
        lines.append(json_files.line_of(entry))
        if (i + 1) % 100 == 0 or i + 1 == n:
            show(f"solved tasks {i + 1}/{n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    json_files.replace_text(path, "".join(lines))


def _shown(number: int) -> float:
    """Return a number in [0, 1) for an example, so that which ones show their steps follows from the share alone."""
    return number_of("worked", number) / 2**48
