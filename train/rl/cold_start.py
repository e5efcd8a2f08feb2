"""Solved tasks as text: what a policy is shown before it answers on its own."""

from collections.abc import Callable

from dsv32_jax import json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.encoding import TokenizedMessages, markup
from dsv32_jax.errors import UsageError
from dsv32_jax.tokenizer import load_tokenizer
from train.agents.traces import solution_trace
from train.data.token_files import INDEX_SUFFIX, write_token_file
from train.rl.agent_tasks import AgentSource
from train.rl.answer import Style
from train.rl.problems import number_of
from train.rl.questions import prompt_text, solution_text
from train.rl.run_config import GrpoConfig
from train.rl.task_source import TaskSource
from train.rl.working import working

EXAMPLES_FILE, TRACES_FILE = "examples.jsonl", "traces.array_record"
FIRST_EXAMPLE = 2**32  # training asks task 0, 1, ...: no run comes this far
OTHER_SEED = 2**31  # added to the run's, for the tasks of environments


def write_traces(
    cfg: GrpoConfig, source: AgentSource, path: Location, *, show: Callable[[str], None]
) -> None:
    """Write the environments' own solutions as conversations, one a document; a file that is there stays.

    A share of them, `cold_start.worked`, has the calls; in the others the answer follows the question at once.

    Generated tasks are others than training asks; those of environments that have no more come in training too.

    Args:
        cfg: The run, with a cold start and `agent`.
        source: Its tasks.
        path: The file, of examples where the cold start is masked, else of tokens; its folder is made where there is
            none.
        show: Is told how far it is.

    Raises:
        UsageError: If an environment does not know how to solve its tasks.
    """
    assert cfg.cold_start is not None, "the run has no cold start"
    assert cfg.agent is not None, "the run has no tools"
    if path.is_file():
        return
    n = cfg.cold_start.examples
    form, thinks = cfg.agent.make_form(load_tokenizer(cfg.tokenizer)), cfg.agent.form == "official"
    documents: list[TokenizedMessages] = []
    for i in range(n):
        posed = source[i]
        try:
            messages, tools = solution_trace(posed.environment, posed.task, thinks=thinks)
        except NotImplementedError as error:
            raise UsageError(
                f"{posed.environment.name} does not know its solutions, so cold_start can not show them"
            ) from error
        if _shown(i) >= cfg.cold_start.worked:
            messages = [m for m in messages[:-1] if m["role"] in ("system", "user")] + messages[-1:]
        documents.append(form.encode(messages, tools))
        if (i + 1) % 100 == 0 or i + 1 == n:
            show(f"traces {i + 1}/{n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if cfg.cold_start.masked:
        entries = (
            {"tokens": one.ids.tolist(), "trained": one.trainable.astype(int).tolist()}
            for one in documents
        )
        json_files.replace_text(path, "".join(map(json_files.line_of, entries)))
        return
    partial = path.with_name(f"partial-{path.name}")
    write_token_file(partial, [one.ids for one in documents])
    for suffix in (INDEX_SUFFIX, ""):  # the file itself last: where it is, all is
        partial.with_name(partial.name + suffix).replace(path.with_name(path.name + suffix))


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
