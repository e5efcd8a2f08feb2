"""Cold-start data: solved tasks with tools as examples to imitate, before reinforcement learning.

Three kinds, as the DeepSeek-V3.2 report (section 3.2.2, appendix B) has them, prompted in this project's own words:

- "reasoning": thinking, then the answer, without tools;
- "calls": calls of tools and the answer, without thinking;
- "calls_in_thinking": calls within the thinking, which goes on after each result.

Examples come from a policy, of which those are kept that the verifier gives 1, or from the environments' own solutions.
A solution has no thoughts, so that its thinking is one rule-written line a call: it teaches the form, not reasoning.
"""

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from dsv32_jax import command_line, json_files, progress_line
from dsv32_jax.errors import UsageError, WorkFailedError
from dsv32_jax.tokenizer import load_tokenizer
from train.agents import schemas
from train.agents.environment import Call, Environment, Episode, Split, Task
from train.agents.forms import Form
from train.agents.loop import Limits
from train.agents.tools import Tool, by_name
from train.agents.trajectory import CallRecord, Trajectory
from train.evaluation.attempts import TrajectoryFile, plan, read_runs
from train.evaluation.config import EvaluateConfig, FormName, PolicyConfig
from train.evaluation.environments import load_environment
from train.evaluation.players import form_of, make_runs
from train.rl.problems import number_of

Kind = Literal["reasoning", "calls", "calls_in_thinking"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_CALLS = 20
PROMPTS: Mapping[Kind, str] = {
    "reasoning": "Reason before you answer: work the problem out, check the result, and only then write the answer, "
    "which repeats none of the reasoning.",
    "calls": "Work with the tools, without explaining what you do. When you have what is asked for, write the answer.",
    "calls_in_thinking": "You may call tools while you think, again and again, at most "
    f"{MOST_CALLS} times in all. Call early instead of reasoning at length, and have code compute what it can. The "
    "answer at the end has no call.",
}
PYTHON_NOTE = "Python keeps its variables from call to call; a call may take 120 seconds."
THOUGHTS = ("{name} will tell.", "Next: {name}.", "This needs {name}.")
LAST_THOUGHT = "That is all that is needed."

SUMMARY = (
    "Write cold-start data: solved tasks with tools as examples for `python -m train.sft`, each token marked as "
    "trained or not. They come from the environments' own solutions, or with --policy from a model's attempts, of "
    "which those are kept that the verifier finds right."
)
EXAMPLES = """
python -m train.agents.cold_start traces.jsonl mine.py:make --form compact --tasks 500 --max-tokens 512
python -m train.agents.cold_start traces.jsonl mine.py:make --policy http://localhost:8000/v1#dsv32 --samples 8
python -m train.sft base=none init_from=runs/sparse solved=none data.sources=traces.jsonl data.seq_len=512
"""


def prompt_of(kind: Kind, tools: Sequence[Tool]) -> str:
    """Return the words that ask for a kind of example.

    Args:
        kind: The kind.
        tools: Of the episode.

    Returns:
        Words for the system message.
    """
    has_python = any(tool.name == "python" for tool in tools) and kind != "reasoning"
    return f"{PROMPTS[kind]} {PYTHON_NOTE}" if has_python else PROMPTS[kind]


class Prompted:
    """Implements `Environment`: another one, whose tasks ask for a kind of example.

    Args:
        inner: The other.
        kind: The kind.
    """

    def __init__(self, inner: Environment, kind: Kind) -> None:
        """Name it after both."""
        self.inner, self.kind = inner, kind
        self.name, self.summary = f"{inner.name}/{kind}", f"{inner.summary}, asked for {kind}"

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Make tasks, see `Environment`."""
        words = ""
        for task in self.inner.tasks(split, seed):
            if (
                not words
            ):  # an environment's tools differ from task to task, but not in having Python
                with self.inner.open(task) as episode:
                    words = prompt_of(self.kind, episode.tools)
            system = f"{task.system}\n{words}" if task.system else words
            yield replace(task, environment=self.name, system=system)

    def open(self, task: Task) -> AbstractContextManager[Episode]:
        """Begin an attempt, see `Environment`."""
        return self.inner.open(replace(task, environment=self.inner.name))

    def solve(self, task: Task, call: Call) -> str:
        """Solve a task, see `Environment`."""
        return self.inner.solve(replace(task, environment=self.inner.name), call)


def solve_as_trajectory(environment: Prompted, task: Task, *, seed: int) -> Trajectory:
    """Have an environment solve its task, as a policy would have been seen to.

    Args:
        environment: With a kind that has calls.
        task: One of its.
        seed: Of the choice of words.

    Returns:
        The trajectory, graded.

    Raises:
        UsageError: If the kind is one that only a policy can give examples of.
        NotImplementedError: If the environment does not know how.
    """
    if environment.kind == "reasoning":
        raise UsageError("kind reasoning needs a policy: solutions have no thoughts")
    thinks = environment.kind == "calls_in_thinking"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": task.system},
        {"role": "user", "content": task.prompt},
    ]
    calls: list[CallRecord] = []
    with environment.open(task) as episode:
        tools = by_name(episode.tools)

        def call(name: str, **arguments: Any) -> Any:
            schemas.check(tools[name], arguments)
            value = json.loads(json.dumps(tools[name].function(**arguments)))
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text = schemas.cut(text, schemas.MAX_CHARS)
            step = len(calls) + 1
            calls.append(
                CallRecord(step=step, name=name, arguments=arguments, outcome="ok", result=text)
            )
            written = json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": written}
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
            if thinks:
                choice = number_of(seed, task.name, step) % len(THOUGHTS)
                message["reasoning_content"] = THOUGHTS[choice].format(name=name)
            messages.extend([message, {"role": "tool", "content": text}])
            return value

        answer = environment.solve(task, call)
        last = {"role": "assistant", "content": answer}
        messages.append(last | ({"reasoning_content": LAST_THOUGHT} if thinks else {}))
        grade = episode.grade(answer)
    return Trajectory(
        task=task.name,
        environment=task.environment,
        messages=tuple(messages),
        calls=tuple(calls),
        end="answer",
        answer=answer,
        steps=len(calls) + 1,
        tokens=0,
        seconds=0.0,
        grade=grade,
    )


def why_not(trajectory: Trajectory, kind: Kind) -> str | None:
    """Say why a trajectory is no example of a kind.

    Args:
        trajectory: Graded.
        kind: The kind.

    Returns:
        The reason; None where it is one.
    """
    if not trajectory.solved:
        return "not solved"
    if trajectory.end != "answer":
        return "no answer"
    if trajectory.resets:
        return "context begun anew"
    if any(call.outcome in ("unreadable", "unknown") for call in trajectory.calls):
        return "unreadable call"
    said = [message for message in trajectory.messages if message["role"] == "assistant"]
    thoughts = [bool((message.get("reasoning_content") or "").strip()) for message in said]
    n_calls = len(trajectory.calls)
    fits = {
        "reasoning": n_calls == 0 and all(thoughts),
        "calls": n_calls >= 1 and not any(thoughts),
        "calls_in_thinking": 1 <= n_calls <= MOST_CALLS and thoughts[0],
    }
    return None if fits[kind] else "other kind"


def example_of(
    trajectory: Trajectory, environment: Prompted, task: Task, form: Form
) -> dict[str, Any]:
    """Write a trajectory as an example to train on.

    Args:
        trajectory: That `why_not` has nothing against.
        environment: Its.
        task: Its.
        form: How the policy to be trained is written to.

    Returns:
        A line of `train.data.examples`: ids and which train, with whose they are.
    """
    with environment.open(task) as episode:
        found = form.encode(trajectory.messages, list(episode.tools))
    return {
        "environment": environment.inner.name,
        "kind": environment.kind,
        "task": task.name,
        "tokens": found.ids.tolist(),
        "trained": found.trainable.astype(int).tolist(),
    }


def write_examples(
    found: Iterator[tuple[Prompted, Task, Trajectory]],
    form: Form,
    out: Path,
    *,
    max_tokens: int | None,
) -> Counter[str]:
    """Write trajectories that are examples of their kind.

    Args:
        found: Trajectories, with whose they are.
        form: How the policy to be trained is written to.
        out: The file; it appears when it is whole.
        max_tokens: Longest example; None for any.

    Returns:
        How many were written under each kind, and how many were not, by reason.
    """
    counts: Counter[str] = Counter()
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("w", encoding="utf-8") as lines:
        for environment, task, trajectory in found:
            reason = why_not(trajectory, environment.kind)
            entry = {} if reason else example_of(trajectory, environment, task, form)
            if entry and max_tokens is not None and len(entry["tokens"]) > max_tokens:
                reason = f"more than {max_tokens} tokens"
            if reason is None:
                lines.write(json_files.line_of(entry))
            counts[reason or environment.kind] += 1
    partial.replace(out)
    return counts


def solutions(
    environments: Sequence[Prompted], n: int, *, seed: int, show: Callable[[str], None]
) -> Iterator[tuple[Prompted, Task, Trajectory]]:
    """Solve tasks by their environments' own solutions.

    Args:
        environments: With kinds that have calls.
        n: Tasks of each.
        seed: Of the choice of words.
        show: Is told how far it is.

    Yields:
        Each environment, task and trajectory.
    """
    for environment in environments:
        for i, task in enumerate(environment.tasks("train")):
            if i == n:
                break
            yield environment, task, solve_as_trajectory(environment, task, seed=seed)
            show(f"{environment.name}: {i + 1}/{n} solved")


def drawn(
    cfg: EvaluateConfig, environments: Sequence[Prompted], file: Path
) -> Iterator[tuple[Prompted, Task, Trajectory]]:
    """Have a policy attempt tasks.

    Args:
        cfg: The policy, how often and how it is drawn from.
        environments: With the tasks.
        file: Where attempts are kept, so that those made are not made again.

    Yields:
        Each environment, task and trajectory.
    """
    with contextlib.closing(TrajectoryFile(file)) as trajectories:
        runs = plan(cfg, environments)
        missing = trajectories.missing(runs)
        if missing:
            make_runs(cfg, cfg.policies[0], missing, trajectories)
    by_key = {run.key: run for run in runs}
    prompted = {environment.name: environment for environment in environments}
    for key, trajectory in read_runs(file):
        if key in by_key:
            yield prompted[key.environment], by_key[key].task, trajectory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None reads the command line.

    Returns:
        The exit status.
    """
    with (
        command_line.Boundary() as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        args = _parser().parse_args(argv)
        with command_line.wrong_usage():
            kinds = tuple(args.kind or (KINDS if args.policy else KINDS[1:]))
            environments = [
                Prompted(load_environment(place), kind)
                for place in args.environments
                for kind in kinds
            ]
            form = form_of(args.form, load_tokenizer(args.tokenizer))
            if not args.policy and "reasoning" in kinds:
                raise UsageError("--kind reasoning needs --policy: solutions have no thoughts")
        boundary.started = True
        line = progress_line.ProgressLine(sys.stderr, seconds=10.0)
        if args.policy:
            cfg = EvaluateConfig(
                policies=(PolicyConfig.from_text(args.policy),),
                environments=tuple(args.environments),
                split="train",
                tasks=args.tasks,
                samples=args.samples,
                form=args.form,
                seed=args.seed,
                limits=Limits(steps=MOST_CALLS + 1),
            )
            found = drawn(cfg, environments, args.out.with_suffix(".trajectories.jsonl"))
        else:
            found = solutions(environments, args.tasks, seed=args.seed, show=line.show)
        counts = write_examples(found, form, args.out, max_tokens=args.max_tokens)
        line.close()
        _report(counts, args.out)
    return boundary.status


def _report(counts: Counter[str], out: Path) -> None:
    """Say what was written."""
    kept = sum(counts[kind] for kind in KINDS)
    listed = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    if not kept:
        raise WorkFailedError(f"no trajectory is an example: {listed or 'there were none'}")
    sys.stdout.write(f"{kept} examples of {sum(counts.values())} trajectories in {out}: {listed}\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m train.agents.cold_start", summary=SUMMARY, examples=EXAMPLES
    )
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="the file of examples")
    parser.add_argument(
        "environments",
        nargs="+",
        metavar="ENVIRONMENT",
        help="by name, or FILE.py:NAME, a function that returns one",
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=KINDS,
        help="of examples; may be given several times (default: all, without --policy those with calls)",
    )
    parser.add_argument(
        "--tasks", type=int, default=100, help="tasks of each environment and kind (100)"
    )
    parser.add_argument(
        "--form",
        choices=get_args(FormName),
        default="thinking",
        help="how examples are written (thinking)",
    )
    parser.add_argument("--tokenizer", default="bytes", help="of the policy to be trained (bytes)")
    parser.add_argument("--max-tokens", type=int, help="leave out longer examples")
    parser.add_argument(
        "--policy",
        metavar="PLACE",
        help="a checkpoint or http://HOST/v1#MODEL that attempts the tasks",
    )
    parser.add_argument(
        "--samples", type=int, default=4, help="attempts of the policy at each task (4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and words (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
