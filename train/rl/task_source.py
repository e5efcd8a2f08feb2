"""The tasks of a run, by number: generated ones without end, and those of files, epoch after epoch."""

import dataclasses
import itertools
from collections.abc import Sequence, Set

import grain

from dsv32_jax.config import require
from dsv32_jax.convert import storage
from dsv32_jax.errors import UsageError
from train.rl.problems import Family, check_weight, draw_problem, number_of
from train.rl.tasks import Task, read_tasks

MAX_ATTEMPTS = (
    1000  # draws for a question that is not held out, before a generator counts as exhausted
)
ENDLESS = 2**40  # problems of a generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFile:
    """Tasks of one's own.

    Attributes:
        path: A JSONL file, in a bucket too; each line has the fields of `Task`, `name` and `domain` being optional.
        weight: Its share of the tasks, relative to the others'.
    """

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the weight."""
        check_weight(self.path, self.weight)

    @classmethod
    def from_text(cls, text: str) -> "TaskFile":
        """Read a file off a command line, `PATH` or `PATH@WEIGHT`."""
        path, at, weight = text.rpartition("@")
        if at and weight.replace(".", "", 1).isdecimal():
            return cls(path=path, weight=float(weight))
        return cls(path=text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What a run's policy is asked.

    Attributes:
        families: Generators of reasoning-gym.
        files: Tasks of one's own.
        seed: Of the order and of what is generated; what is held out does not depend on it.
        held_out: Tasks of each family that are kept from training.
        held_out_fraction: The share of a file's questions that is kept from training.
    """

    families: tuple[Family, ...] = ()
    files: tuple[TaskFile, ...] = ()
    seed: int = 0
    held_out: int = 64
    held_out_fraction: float = 0.05

    def __post_init__(self) -> None:
        """Check ranges."""
        require(bool(self.families or self.files), "families=() and files=() leave nothing to ask")
        require(self.held_out >= 0, f"held_out={self.held_out} must not be negative")
        fraction = self.held_out_fraction
        require(0 <= fraction < 1, f"held_out_fraction={fraction} must be in [0, 1)")


class _Generated:
    """Fresh problems of one family without end, as a source for grain: index -> task."""

    def __init__(self, family: Family, seed: int, excluded: Set[str]) -> None:
        self._family, self._seed, self._excluded = family, seed, excluded

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Task:
        for attempt in range(MAX_ATTEMPTS):
            task = draw_problem(self._family, "train", self._seed, attempt, index)
            if task.question not in self._excluded:
                return task
        raise UsageError(
            f"{self._family.name} has hardly a problem beside those held out;"
            " widen its settings or lower held_out"
        )


class TaskSource:
    """All the tasks of a config; the same for the same config and index, so a number is all that resuming needs.

    Args:
        cfg: What to ask.

    Attributes:
        held_out: What training never asks: no task of any source has the question of one of these. The sources take
            turns.

    Raises:
        UsageError: If a source can not be read or made, or all of a file is held out.
    """

    def __init__(self, cfg: TaskConfig) -> None:
        """Open the sources; the class docstring has the arguments."""
        files = {file.path: read_tasks(storage.locate(file.path)) for file in cfg.files}
        parts = [_hold_out(family, cfg.held_out) for family in cfg.families]
        fraction = cfg.held_out_fraction
        parts += [[t for t in tasks if is_held_out(t, fraction)] for tasks in files.values()]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*parts))
        kept = [task for task in in_turn if task is not None]
        self.held_out: Sequence[Task] = kept
        excluded = frozenset(task.question for task in kept)
        sources = [
            grain.MapDataset.source(_Generated(family, cfg.seed, excluded))
            for family in cfg.families
        ]
        for path, tasks in files.items():
            left = [task for task in tasks if task.question not in excluded]
            if not left:
                raise UsageError(
                    f"{path}: all of its {len(tasks)} tasks are held out, or it has none"
                )
            sources.append(
                grain.MapDataset.source(left).shuffle(number_of(path, cfg.seed) % 2**32).repeat()
            )
        weights = [f.weight for f in cfg.families] + [f.weight for f in cfg.files]
        self._mixed = grain.MapDataset.mix(sources, weights)

    def __getitem__(self, index: int) -> Task:
        """Return the task at an index, from 0 on without end; a file comes in a new order each epoch."""
        return self._mixed[index]


def is_held_out(task: Task, fraction: float) -> bool:
    """Tell whether a file's task is held out, by its question alone: copies, in any file, fall on the same side.

    Args:
        task: The task.
        fraction: The share of questions that are.

    Returns:
        Whether it is.
    """
    return number_of(task.question) < fraction * 2**48


def _hold_out(family: Family, n: int) -> list[Task]:
    """Return up to n different problems that no seed changes; fewer where a family has hardly more."""
    found: dict[str, Task] = {}
    for attempt in range(10 * n):
        if len(found) == n:
            break
        task = draw_problem(family, "heldout", attempt)
        found.setdefault(task.question, task)
    return list(found.values())
