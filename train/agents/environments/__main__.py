"""Command: list environments, show one's tools and a task, and play a task by hand."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence

from dsv32_jax import command_line
from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents.environment import Environment, Episode, Task
from train.agents.environments import catalogue
from train.agents.environments.calling import call_tool, caller
from train.agents.process import SandboxError
from train.agents.tools import ToolCall, ToolError, by_name

SUMMARY = (
    "List the environments, show one's tools and a task, or play a task by hand: type calls, read"
    " results, answer."
)
EXAMPLES = """
python -m train.agents.environments list
python -m train.agents.environments show trips --task 3
python -m train.agents.environments play trips
python -m train.agents.environments play synthetic:runs/synthetic --split held_out
python -m train.agents.environments solve interpreter --task 2
"""
HELP = """Type a call as NAME {"argument": "value"}, or:
  tools          the tools and what they take
  answer TEXT    end with this answer and see the grade
  quit           leave without one"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; those of this process by default.

    Returns:
        The exit status: 1 where a played or solved task got less than 1.
    """
    with command_line.Boundary(resumes=False) as boundary, command_line.logging_to_stderr():
        args = _parser().parse_args(argv)
        if (args.name is None) != (args.what == "list"):
            raise UsageError(
                f"{args.what} takes {'no name' if args.name else 'the name of an environment'}"
            )
        if args.task < 0:
            raise UsageError(f"--task {args.task} must be 0 or above")
        if args.what == "list":
            _list()
        else:
            environment = catalogue.make(args.name)
            task = _task(environment, args)
            boundary.started = True
            try:
                boundary.status = {"show": _show, "play": _play, "solve": _solve}[args.what](
                    environment, task
                )
            except SandboxError as error:
                raise WorkFailedError(str(error)) from error
    return boundary.status


def _list() -> None:
    rows = {name: kind.summary for name, kind in catalogue.SIMPLE.items()} | dict(catalogue.FORMS)  # type: ignore[attr-defined]
    width = max(map(len, rows))
    _write(*(f"{name:{width}}  {summary}" for name, summary in rows.items()))


def _task(environment: Environment, args: argparse.Namespace) -> Task:
    found = next(itertools.islice(environment.tasks(args.split, args.seed), args.task, None), None)
    if found is None:
        raise UsageError(f"{environment.name} has no task {args.task} in its split {args.split}")
    return found


def _show(environment: Environment, task: Task) -> int:
    with environment.open(task) as episode:
        _describe(task)
        _tools(episode)
    return 0


def _solve(environment: Environment, task: Task) -> int:
    """Show a solution's calls, its answer and grade."""
    with environment.open(task) as episode:
        _describe(task)
        log: list[tuple[ToolCall, object]] = []
        try:
            answer = environment.solve(task, caller(episode.tools, log))
        except NotImplementedError as error:
            raise WorkFailedError(
                f"{environment.name} does not know how to solve its tasks"
            ) from error
        for call, result in log:
            _write(f"{call.name} {json.dumps(dict(call.arguments))}", f"  {_shown(result)}")
        return _grade(episode, answer)


def _play(environment: Environment, task: Task) -> int:
    with environment.open(task) as episode:
        _describe(task)
        _tools(episode)
        _write("", HELP)
        for line in _lines():
            word, _, rest = line.partition(" ")
            if word == "quit":
                return 0
            if word == "answer":
                return _grade(episode, rest.strip())
            if word == "tools":
                _tools(episode)
            elif word:
                _write(_call(episode, word, rest))
    raise WorkFailedError("the input ended without an answer")


def _call(episode: Episode, name: str, rest: str) -> str:
    try:
        arguments = json.loads(rest or "{}")
    except ValueError as error:
        return f'! arguments are JSON, such as {{"city": "Wuxi"}} ({error})'
    if not isinstance(arguments, dict):
        return "! arguments are a JSON object"
    try:
        return _shown(call_tool(by_name(episode.tools), ToolCall(name=name, arguments=arguments)))
    except ToolError as error:
        return f"! {error}"


def _lines() -> "itertools.chain[str]":
    def read() -> object:
        while True:
            sys.stdout.write("> ")
            sys.stdout.flush()
            line = sys.stdin.readline()
            if not line:
                return
            yield line.strip()

    return itertools.chain(read())  # type: ignore[arg-type]


def _grade(episode: Episode, answer: str) -> int:
    grade = episode.grade(answer)
    parts = "".join(f"\n  {name}: {value:g}" for name, value in grade.parts.items())
    _write(
        f"answer: {answer}",
        f"grade: {grade.score:g}" + (f" ({grade.note})" if grade.note else "") + parts,
    )
    return int(grade.score < 1)


def _describe(task: Task) -> None:
    head = f"task {task.name}, difficulty {task.difficulty}"
    _write(head, *([task.system] if task.system else []), "", task.prompt, "")


def _tools(episode: Episode) -> None:
    for tool in episode.tools:
        _write(
            f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})",
            f"    {tool.description}",
        )


def _shown(result: object) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m train.agents.environments", summary=SUMMARY, examples=EXAMPLES
    )
    parser.add_argument(
        "what", choices=["list", "show", "play", "solve"], help="list needs no more"
    )
    parser.add_argument("name", nargs="?", help="of the environment")
    parser.add_argument("--task", type=int, default=0, metavar="N", help="which, from 0 on (0)")
    parser.add_argument("--split", choices=["train", "held_out"], default="train", help="(train)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of training tasks (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
