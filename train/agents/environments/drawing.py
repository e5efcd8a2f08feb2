"""Tasks drawn by number, and the two splits, which a task's own text decides between."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from random import Random

from train.agents.environment import Split, Task

HELD_OUT_SHARE = 8  # one text in so many is held out


def random_for(*key: str | int) -> Random:
    """Return a generator of random numbers that depends on a key alone, the same in every process."""
    return Random(repr(key))  # a text's own digest, not its hash, seeds it


def split_of(text: str) -> Split:
    """Return the split of whatever a text stands for; it has no other."""
    digest = hashlib.sha256(text.encode()).digest()
    return "held_out" if int.from_bytes(digest[:8]) % HELD_OUT_SHARE == 0 else "train"


def draw_tasks(
    environment: str, split: Split, seed: int, make: Callable[[str, Random], Task]
) -> Iterator[Task]:
    """Draw tasks without end, those of a split.

    Args:
        environment: Its name.
        split: Which.
        seed: Of training tasks; held-out ones have always the same.
        make: Makes a task of a name and random numbers. Its prompt says all that the task is, so that equal prompts
            are equal tasks, which then are in one split.

    Yields:
        Tasks.
    """
    seed = seed if split == "train" else 0
    for number in itertools.count():
        name = f"{split}-{seed}-{number}"
        task = make(name, random_for(environment, name))
        if split_of(task.prompt) == split:
            yield task
