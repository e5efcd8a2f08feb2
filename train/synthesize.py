"""Command: make environments with tools, tasks and verifiers, and keep those that stand every check."""

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from dsv32_jax import command_line
from dsv32_jax.errors import UsageError, WorkFailedError
from dsv32_jax.progress_line import ProgressLine
from train.agents import isolation
from train.agents.environment import Environment
from train.agents.environments.synthetic import Synthetic, task_of
from train.agents.process import SandboxError
from train.agents.synthesis import procedural, small
from train.agents.synthesis.domains import DOMAINS
from train.agents.synthesis.endpoint import EndpointAuthor
from train.agents.synthesis.pipeline import make_with
from train.agents.synthesis.procedural import Made
from train.agents.synthesis.report import write_report
from train.agents.synthesis.sandboxed import run_sandboxed
from train.agents.synthesis.store import Store
from train.agents.synthesis.trial import EndpointPolicy, rate

SUMMARY = (
    "Make worlds (a database and tools), tasks of growing difficulty, solutions and verifiers; keep what stands"
    " every check in a"
    " folder, which is then the environment synthetic:FOLDER. Goes on where it was stopped."
)
EXAMPLES = """
python -m train.synthesize                                     # 200 worlds x 5 tasks, no model needed, two processes
python -m train.synthesize --out runs/small --author small     # for very small policies
python -m train.synthesize --out runs/more --worlds 5000 --held-out-categories bank,clinic
python -m train.synthesize --out runs/llm --author endpoint --base-url http://localhost:8000/v1 --model MODEL
--categories 'a zoo,a bakery'
python -m train.synthesize --policy http://localhost:8000/v1 --policy-model MODEL --samples 8   # try what is there
python -m train.agents.environments play synthetic:runs/synthetic
"""
AUTHORS: dict[str, Callable[[int, int, int], Made]] = {
    "procedural": procedural.make_world,
    "small": small.make_world,
}
AHEAD = 4  # worlds under way for each process
LINE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; those of this process by default.

    Returns:
        The exit status.
    """
    with (
        command_line.Boundary() as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        args = _parser().parse_args(argv)
        categories = _check(args)
        attempt = _policy(args)
        began = time.monotonic()
        with Store(args.out, create=True) as store:
            about = {"author": args.author, "seed": args.seed, "tasks": args.tasks}
            about |= {"held_out_categories": sorted(categories), "categories": args.categories}
            store.claim(about)
            boundary.workdir, boundary.started = args.out, True
            try:
                _make(store, args, categories)
                if attempt is None:
                    sys.stdout.write(
                        "no --policy: tasks that one always or never solves were not looked for\n"
                    )
                else:
                    _try(store, Synthetic(args.out), attempt, args.samples)
            except SandboxError as error:
                raise WorkFailedError(str(error)) from error
            summary = write_report(args.out, store, time.monotonic() - began)
        sys.stdout.write(
            f"{summary['worlds']} worlds, {summary['tasks']} tasks; see {args.out / 'report.md'}\n"
        )
    return boundary.status


def _check(args: argparse.Namespace) -> frozenset[str]:
    for name in ("worlds", "tasks", "jobs", "samples"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    categories = frozenset(filter(None, args.held_out_categories.split(",")))
    if args.author == "procedural" and (unknown := categories - set(DOMAINS)):
        raise UsageError(
            f"--held-out-categories: there are {', '.join(DOMAINS)}, not {', '.join(sorted(unknown))}"
        )
    if args.author == "endpoint":
        if not (args.base_url and args.model and args.categories):
            raise UsageError("--author endpoint needs --base-url, --model and --categories")
        isolation.require_isolation()
    elif args.base_url or args.model or args.categories:
        raise UsageError("--base-url, --model and --categories are for --author endpoint")
    if bool(args.policy) != bool(args.policy_model):
        raise UsageError("--policy and --policy-model go together")
    return categories


def _policy(args: argparse.Namespace) -> EndpointPolicy | None:
    if not args.policy:
        return None
    return EndpointPolicy(args.policy, args.policy_model, os.environ.get("POLICY_API_KEY", "none"))


def _make(store: Store, args: argparse.Namespace, held_out_categories: frozenset[str]) -> None:
    numbers = store.unfinished(args.worlds)
    line = ProgressLine(sys.stderr, seconds=LINE_S)
    began, tasks = time.monotonic(), 0
    make = _by_endpoint(args) if args.author == "endpoint" else _by_processes(args)
    for done, (number, made) in enumerate(make(numbers), 1):
        tasks += store.add(number, made, held_out_categories)
        seconds = time.monotonic() - began
        left = seconds / done * (len(numbers) - done)
        line.show(
            f"{done}/{len(numbers)} worlds, {tasks} tasks, {done / seconds:.1f} worlds/s, {left:.0f} s left",
            now=done == len(numbers),
        )
    line.close()


def _by_processes(args: argparse.Namespace) -> Callable[[list[int]], Iterator[tuple[int, Made]]]:
    """Return what makes worlds in processes, and yields them in order, so that what is kept depends on no timing."""
    author = functools.partial(AUTHORS[args.author], args.seed)

    def make(numbers: list[int]) -> Iterator[tuple[int, Made]]:
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            waiting: list[tuple[int, Future[Made]]] = []
            todo = iter(numbers)
            while True:
                for number in itertools.islice(todo, AHEAD * args.jobs - len(waiting)):
                    waiting.append((number, pool.submit(author, number, args.tasks)))
                if not waiting:
                    return
                number, coming = waiting.pop(0)
                yield number, coming.result()

    return make


def _by_endpoint(args: argparse.Namespace) -> Callable[[list[int]], Iterator[tuple[int, Made]]]:
    author = EndpointAuthor(args.base_url, args.model, args.api_key_env)
    categories = args.categories.split(",")

    def make(numbers: list[int]) -> Iterator[tuple[int, Made]]:
        for number in numbers:
            category = categories[number % len(categories)].strip()
            name = f"{'-'.join(category.split())}-{number}"
            made = make_with(author, category, name, args.tasks, run_sandboxed)
            if made is not None:
                yield number, made

    return make


def _try(store: Store, environment: Environment, policy: EndpointPolicy, samples: int) -> None:
    names = store.untried()
    line = ProgressLine(sys.stderr, seconds=LINE_S)
    for done, name in enumerate(names, 1):
        task = task_of(store, environment.name, name)
        store.set_rate(name, samples, rate(policy.attempt, environment, task, samples))
        line.show(f"{done}/{len(names)} tasks tried {samples} times each", now=done == len(names))
    line.close()


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m train.synthesize", summary=SUMMARY, examples=EXAMPLES
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/synthetic"), metavar="DIR", help="(runs/synthetic)")
    add("--worlds", type=int, default=200, metavar="N", help="(200)")
    add("--tasks", type=int, default=5, metavar="N", help="of each world (5)")
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    add("--author", choices=[*AUTHORS, "endpoint"], default="procedural", help="(procedural)")
    add("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    add(
        "--held-out-categories",
        default="",
        metavar="A,B",
        help="all worlds of these are held out, beside one in eight",
    )
    add("--base-url", default="", metavar="URL", help="of the author's endpoint")
    add("--model", default="", metavar="NAME", help="of the author")
    add(
        "--api-key-env",
        default="",
        metavar="NAME",
        help="environment variable with the author's key",
    )
    add("--categories", default="", metavar="A,B", help="what the author is to write about")
    add(
        "--policy",
        default="",
        metavar="URL",
        help="endpoint of a policy to try the tasks with; key in POLICY_API_KEY",
    )
    add("--policy-model", default="", metavar="NAME", help="of the policy")
    add(
        "--samples",
        type=int,
        default=8,
        metavar="N",
        help="attempts of the policy at each task (8)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
