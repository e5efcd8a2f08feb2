"""The author that needs no model: composes worlds and tasks of growing difficulty out of the categories."""

import collections
import itertools
from dataclasses import dataclass, field
from random import Random

from train.agents.environments.drawing import random_for
from train.agents.synthesis import checking, solutions
from train.agents.synthesis.checking import RejectedError
from train.agents.synthesis.domains import DOMAINS
from train.agents.synthesis.proposals import HARDEST, proposals_at
from train.agents.synthesis.sketch import Sketch
from train.agents.synthesis.solutions import Outcome
from train.agents.synthesis.worlds import Draft, World

ATTEMPTS = 100  # at a task of one difficulty, before the world goes without
LADDERS = 2  # tries at each difficulty, for each that is wanted
SPARE_TOOLS = 2  # that no task of the world needs


@dataclass
class Made:
    """A world with the tasks that were kept.

    Attributes:
        world: It.
        tasks: With what came of their solutions, the simplest first.
        rejected: Reason -> how many were not kept.
        added: Tools that harder tasks added to those of the first.
    """

    world: World
    tasks: list[tuple[Draft, Outcome]] = field(default_factory=list)
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    added: int = 0


def make_world(seed: int, number: int, n_tasks: int) -> Made:
    """Compose a world and tasks in it.

    Difficulties go up from 0, round and round. Each task is examined with the tools that it needs; a harder one that
    needs more adds them to the world, and in the end all are examined again with all tools.

    Args:
        seed: Of all worlds.
        number: Of this one.
        n_tasks: That it should have; it may get fewer.

    Returns:
        The world.
    """
    rng = random_for("procedural", seed, number)
    domain = list(DOMAINS.values())[number % len(DOMAINS)]
    name = f"{domain.name}-{seed}-{number}"
    sketch = Sketch(domain, rng)
    made = Made(world=sketch.world(name, []))
    used: list[str] = []
    ladder = itertools.cycle(range(HARDEST + 1))
    for difficulty in itertools.islice(ladder, LADDERS * (n_tasks + HARDEST)):
        if len(made.tasks) == n_tasks:
            break
        draft = _propose(sketch, name, difficulty, rng, made)
        if draft is not None:
            fresh = sorted(solutions.tools_used(draft.solution) - set(used))
            made.added += len(fresh) if used else 0
            used += fresh
    made.tasks.sort(key=lambda task: task[0].difficulty)
    spare = sorted(set(sketch.tools) - set(used))
    used += rng.sample(spare, min(SPARE_TOOLS, len(spare)))
    made.world = sketch.world(name, used)
    drafts, made.tasks = [draft for draft, _ in made.tasks], []
    for draft in drafts:
        try:
            made.tasks.append((draft, checking.examine(made.world, draft)))
        except RejectedError as error:
            made.rejected[error.reason] += 1
    return made


def _propose(s: Sketch, name: str, difficulty: int, rng: Random, made: Made) -> Draft | None:
    """Return a task that stands the examination, and keep it; the kinds that the world has least come first."""
    kinds = collections.Counter(draft.kind for draft, _ in made.tasks)
    options = sorted(proposals_at(s, difficulty), key=lambda propose: rng.random())
    options.sort(key=lambda propose: kinds[propose.__name__])
    for attempt in range(ATTEMPTS):
        propose = options[attempt * len(options) // ATTEMPTS]
        draft = propose(s, rng)
        if draft is None or any(draft.prompt == other.prompt for other, _ in made.tasks):
            continue
        world = s.world(name, sorted(solutions.tools_used(draft.solution)))
        try:
            made.tasks.append((draft, checking.examine(world, draft)))
            return draft
        except RejectedError as error:
            made.rejected[error.reason] += 1
    return None
