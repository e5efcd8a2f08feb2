"""What `python -m train.synthesize` made, as an environment."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments.drawing import random_for
from train.agents.synthesis.database import Database
from train.agents.synthesis.store import HeldOut, Store
from train.agents.synthesis.worlds import Draft
from train.agents.tools import Tool


class SyntheticEpisode:
    """An attempt at a task that was made.

    Args:
        database: Of its world.
        draft: The task.

    Attributes:
        tools: Of the world.
    """

    def __init__(self, database: Database, draft: Draft) -> None:
        """Keep both."""
        self._database, self._draft = database, draft
        self.tools: Sequence[Tool] = database.tools()

    def grade(self, answer: str) -> Grade:
        """Judge by the task's verifier."""
        return self._database.grade(self._draft.verifier, answer)


class Synthetic:
    """A folder's tasks.

    Args:
        folder: The folder.
        held_out: What the held-out split is: "tasks", new ones in worlds that are trained in; "tools", worlds that are
            not trained in; or "both". The train split has neither, whichever it is.
    """

    summary = "a folder of made worlds, each with tools, tasks and verifiers of its own"

    def __init__(self, folder: Path, held_out: HeldOut = "both") -> None:
        """Look whether the folder is there."""
        self.name = f"synthetic:{folder}" + ("" if held_out == "both" else f":{held_out}")
        self._folder, self._held_out = folder, held_out
        self._store().__exit__()

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield the split's tasks once, those for training shuffled by the seed.

        Left out are those that the policy they were tried with, if any, always or never solved.
        """
        with self._store() as store:
            names = store.names(split, self._held_out)
            if split == "train":
                random_for("synthetic", seed).shuffle(names)
            for name in names:
                yield task_of(store, self.name, name)

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[SyntheticEpisode]:
        """Build the task's world."""
        with self._store() as store:
            draft, name, _ = store.task(task.name)
            world = store.world(name)
        with Database(world) as database:
            yield SyntheticEpisode(database, draft)

    def solve(self, task: Task, call: Call) -> str:
        """Make the calls that the task's solution made; none of its code runs."""
        with self._store() as store:
            _, _, solution = store.task(task.name)
        for name, arguments in solution["calls"]:
            call(name, **arguments)
        return solution["answer"]

    def _store(self) -> Store:
        return Store(self._folder)


def task_of(store: Store, environment: str, name: str) -> Task:
    """Return a task as policies see it.

    Args:
        store: Of the folder.
        environment: The environment's name.
        name: The task's.

    Returns:
        The task.
    """
    draft, world, _ = store.task(name)
    return Task(
        name=name,
        environment=environment,
        prompt=draft.prompt,
        system=store.world(world).system,
        difficulty=draft.difficulty,
    )
