"""What a task must stand before it is kept: its solution passes, again and again, and nothing cheaper does."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from train.agents.environment import Grade
from train.agents.environments.calling import caller
from train.agents.synthesis import solutions
from train.agents.synthesis.database import Database, WorldError
from train.agents.synthesis.solutions import Outcome, SolutionError
from train.agents.synthesis.worlds import Draft, World
from train.agents.tools import ToolCall, ToolError

Runner = Callable[[World, Sequence[str]], list[Outcome]]
GUESSES = (
    "",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "10",
    "yes",
    "no",
    "none",
    "true",
    "false",
    "done",
    "ok",
    "[]",
    "{}",
    "null",
)
MOST_MUTANTS = 24


class RejectedError(Exception):
    """A task that is not kept.

    Args:
        reason: A few words, the same for the same fault, for counting.
        detail: For its author.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        """Say why."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def run_here(world: World, sources: Sequence[str]) -> list[Outcome]:
    """Run solutions that no model wrote.

    Args:
        world: Theirs.
        sources: The solutions.

    Returns:
        What came of each.
    """
    return [solutions.run_in(world, source) for source in sources]


def examine(world: World, draft: Draft, run: Runner = run_here) -> Outcome:
    """Look at a task from all sides.

    Args:
        world: The task's.
        draft: The task.
        run: Runs solutions; in a sandbox if a model wrote them.

    Returns:
        What came of the solution.

    Raises:
        RejectedError: If the task is not to be kept: says why.
    """
    if not draft.prompt.strip():
        raise RejectedError("no prompt")
    try:
        solutions.check_source(draft.solution)
    except SolutionError as error:
        raise RejectedError("solution not allowed", str(error)) from error
    try:
        first, second = run(world, [draft.solution, draft.solution])
        _check_solution(world, draft, first, second)
        for source in solutions.mutants(draft.solution)[:MOST_MUTANTS]:
            (outcome,) = run(world, [source])
            if not outcome.error and grade(world, draft, outcome).score == 1:
                raise RejectedError("solved by a broken solution", source)
        _check_answers(world, draft, (), guesses(draft), "solved without a call")
        wrong = wrong_answers(draft, first.answer)
        _check_answers(world, draft, first.calls, wrong, "wrong answer accepted")
    except WorldError as error:
        raise RejectedError("world does not work", str(error)) from error
    return first


def _check_solution(world: World, draft: Draft, first: Outcome, second: Outcome) -> None:
    if first.error:
        raise RejectedError("solution fails", first.error)
    if not first.calls:
        raise RejectedError("solution makes no call")
    if first != second:
        raise RejectedError("solution not deterministic")
    found = grade(world, draft, first)
    if found.score != 1:
        raise RejectedError("solution does not pass", f"answer {first.answer!r}; {found.note}")


def _check_answers(
    world: World, draft: Draft, calls: Sequence[ToolCall], answers: Iterable[str], reason: str
) -> None:
    """Refuse a task that takes one of these answers after some calls."""
    with Database(world) as database:
        call = caller(database.tools())
        for made in calls:
            call(made.name, **made.arguments)
        for answer in answers:
            if database.grade(draft.verifier, answer).score == 1:
                raise RejectedError(reason, f"the answer {answer!r}")


def grade(world: World, draft: Draft, outcome: Outcome) -> Grade:
    """Grade an outcome by making its calls once more, in a fresh world: what a sandbox says of itself does not count.

    Args:
        world: The task's.
        draft: The task.
        outcome: Calls and answer; results, where there are any, must come out the same.

    Returns:
        The grade; 0 where a call fails or tells something else.

    Raises:
        WorldError: If world or verifier do not work.
    """
    with Database(world) as database:
        call = caller(database.tools())
        try:
            results = tuple(call(made.name, **made.arguments) for made in outcome.calls)
        except ToolError as error:
            return Grade(
                score=0.0, note=f"a call that was answered fails when it is made again: {error}"
            )
        if outcome.results and results != outcome.results:
            return Grade(score=0.0, note="a call tells something else when it is made again")
        return database.grade(draft.verifier, outcome.answer)


def guesses(draft: Draft) -> Iterator[str]:
    """Yield answers that need no call: the usual words, and each name and number of the prompt."""
    words = re.findall(r"[\w'-]+", draft.prompt)
    yield from dict.fromkeys(
        (*GUESSES, *words, *(f"{a} {b}" for a, b in itertools.pairwise(words)))
    )


def wrong_answers(draft: Draft, answer: str) -> Iterator[str]:
    """Yield answers near the right one that must not pass; none where the verifier takes any."""
    looks = draft.verifier.answer is not None or ":answer" in json.dumps(
        dict(draft.verifier.checks)
    )
    if not looks:
        return
    yield ""
    yield f"{answer}x"
    yield f"not {answer}"
    if answer.lstrip("-").isdecimal():
        yield from (str(int(answer) + 1), str(int(answer) - 1), f"{answer}0")
