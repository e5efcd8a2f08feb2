"""The report's procedure with an author that is a model: world, simple task, run, repair, harder tasks, more tools."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from train.agents.synthesis import checking
from train.agents.synthesis.checking import RejectedError, Runner
from train.agents.synthesis.database import WorldError, build
from train.agents.synthesis.procedural import Made
from train.agents.synthesis.worlds import Draft, World

REPAIRS = 3  # of one draft, before it is given up


class AuthorError(Exception):
    """What an author wrote can not be read: says why."""


class Proposal(NamedTuple):
    """A task and the world it is in.

    Attributes:
        world: With more tools than before, if the task needs them; its tables stay.
        draft: The task.
    """

    world: World
    draft: Draft


@runtime_checkable  # so that the tests' type checks can look at it
class Author(Protocol):
    """Writes worlds and tasks."""

    def world(self, category: str, name: str, complaint: str) -> World:
        """Write a world; `complaint` says what was wrong with the one before, "" at first.

        Raises:
            AuthorError: If what it wrote can not be read.
        """
        ...

    def propose(self, world: World, earlier: Sequence[Draft], difficulty: int) -> Proposal:
        """Propose a task that is harder than earlier ones.

        Raises:
            AuthorError: If what it wrote can not be read.
        """
        ...

    def repair(self, proposal: Proposal, complaint: str) -> Proposal:
        """Mend solution, verifier or tools.

        Raises:
            AuthorError: If what it wrote can not be read.
        """
        ...


def make_with(author: Author, category: str, name: str, n_tasks: int, run: Runner) -> Made | None:
    """Have an author make a world and its tasks.

    Args:
        author: The author.
        category: What the world is to be about.
        name: Of it.
        n_tasks: Tasks wanted, one of each difficulty from 0 on.
        run: Runs solutions, in a sandbox.

    Returns:
        The world with the tasks that stood the examination, with its last tools once more; None if no world works.
    """
    world = _world(author, category, name)
    if world is None:
        return None
    made = Made(world=world)
    drafts: list[Draft] = []
    for difficulty in range(n_tasks):
        found = _task(author, made, drafts, difficulty, run)
        if found is not None:
            made.added += len(found.world.tools) - len(made.world.tools)
            made.world = found.world
            drafts.append(found.draft)
    for draft in drafts:
        try:
            made.tasks.append((draft, checking.examine(made.world, draft, run)))
        except RejectedError as error:
            made.rejected[error.reason] += 1
    return made


def _world(author: Author, category: str, name: str) -> World | None:
    complaint = ""
    for _ in range(REPAIRS + 1):
        try:
            world = author.world(category, name, complaint)
            build(world.script)
            if world.tools:
                return world
            complaint = "it has no tools"
        except (AuthorError, WorldError) as error:
            complaint = str(error)
    return None


def _task(
    author: Author, made: Made, earlier: Sequence[Draft], difficulty: int, run: Runner
) -> Proposal | None:
    try:
        proposal = author.propose(made.world, earlier, difficulty)
        for attempt in range(REPAIRS + 1):
            try:
                if proposal.world.script != made.world.script:
                    raise RejectedError(
                        "tables changed", "a task may add tools, not change the tables"
                    )
                checking.examine(proposal.world, proposal.draft, run)
                return proposal
            except RejectedError as error:
                made.rejected[error.reason] += 1
                if attempt < REPAIRS:
                    proposal = author.repair(proposal, str(error))
    except AuthorError:
        made.rejected["not readable"] += 1
    return None
