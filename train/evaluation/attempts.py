"""Which attempts an evaluation is made of, and the file that they are written to as they end.

A line of `trajectories.jsonl` is `train.agents.trajectory.to_json` of a run, with who made it and how it can be made
again: `policy`, `task`, `sample`, `run` and `seed`. What is in the file is never made again.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dsv32_jax import json_files
from dsv32_jax.errors import UsageError
from train.agents.environment import Environment, Task
from train.agents.trajectory import Trajectory, from_json, to_json
from train.evaluation.config import EvaluateConfig
from train.rl.problems import number_of

TRAJECTORIES_FILE = "trajectories.jsonl"
BLOCK = 2**16  # bytes looked at for a line's end at once
TRAJECTORY_FIELDS = tuple(
    field.name for field in dataclasses.fields(Trajectory) if field.name != "rollout"
)


class Key(NamedTuple):
    """What tells a run from all others of an evaluation.

    Attributes:
        policy: Its name.
        environment: Its name.
        task: Its name.
        sample: Which attempt at the task, from 0.
        run: Which run of the attempt, from 0.
    """

    policy: str
    environment: str
    task: str
    sample: int
    run: int


class Planned(NamedTuple):
    """A run to be made.

    Attributes:
        key: Which.
        environment: Opens the task.
        task: The task.
        seed: Of its draws, the same for every policy.
    """

    key: Key
    environment: Environment
    task: Task
    seed: int


def plan(cfg: EvaluateConfig, environments: Sequence[Environment]) -> list[Planned]:
    """List all runs of an evaluation, policy by policy.

    Args:
        cfg: The evaluation.
        environments: With the tasks.

    Returns:
        The runs, in an order that depends on the arguments alone.

    Raises:
        UsageError: If two environments or two tasks of one share a name, or an environment has no task.
    """
    tasks: list[tuple[Environment, Task]] = []
    for environment in environments:
        found = list(itertools.islice(environment.tasks(cfg.split), cfg.tasks))
        if not found:
            raise UsageError(f"environment {environment.name} has no task in split={cfg.split}")
        tasks += [(environment, task) for task in found]
    named = [(environment.name, task.name) for environment, task in tasks]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise UsageError(f"two tasks are called {twice[1]!r} in {twice[0]!r}")
    return [
        Planned(
            Key(policy.name, environment.name, task.name, sample, run),
            environment,
            task,
            number_of(cfg.seed, environment.name, task.name, task.prompt, sample, run) % 2**32,
        )
        for policy in cfg.policies
        for environment, task in tasks
        for sample in range(cfg.samples)
        for run in range(cfg.parallel)
    ]


class TrajectoryFile:
    """The trajectories of an evaluation, on disk; what remains in memory of each are its figures.

    Args:
        path: The file; what a crash has torn off its end is cut away.

    Attributes:
        done: Run -> its trajectory, without messages and calls.
        seeds: Run -> the seed it was made with.
    """

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        self.done: dict[Key, Trajectory] = {}
        self.seeds: dict[Key, int] = {}
        if path.is_file():
            _cut_torn_line(path)
            for key, seed, trajectory in _read(path):
                self.done[key], self.seeds[key] = _figures_of(trajectory), seed
        self._file = json_files.LineWriter(path)

    def add(self, planned: Planned, trajectory: Trajectory) -> None:
        """Write a run down.

        Args:
            planned: Which.
            trajectory: Its.
        """
        record = {**planned.key._asdict(), "seed": planned.seed, **to_json(trajectory)}
        self._file.write(json_files.line_of(record))
        self.done[planned.key] = _figures_of(trajectory)
        self.seeds[planned.key] = planned.seed

    def missing(self, runs: Sequence[Planned]) -> list[Planned]:
        """Return the runs that are still to be made.

        Args:
            runs: All.

        Returns:
            Those without a line.

        Raises:
            UsageError: If a line is of another seed, or of a task with another prompt.
        """
        for run in runs:
            if self.seeds.get(run.key, run.seed) != run.seed:
                raise UsageError(
                    f"{self._path} has attempts at {run.key.task!r} of {run.key.environment} with other words or"
                    " another seed; choose another --workdir"
                )
        return [run for run in runs if run.key not in self.done]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _figures_of(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, messages=(), calls=(), rollout=None)


def read_runs(path: Path) -> Iterator[tuple[Key, Trajectory]]:
    """Read the runs of a file, one by one.

    Args:
        path: The file.

    Yields:
        Each run and its trajectory.

    Raises:
        UsageError: If a line is no run.
    """
    for key, _, trajectory in _read(path):
        yield key, trajectory


def _read(path: Path) -> Iterator[tuple[Key, int, Trajectory]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                key = Key(*(record[name] for name in Key._fields))
                trajectory = from_json({name: record[name] for name in TRAJECTORY_FIELDS})
                yield key, record["seed"], trajectory
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}, line {number}: no run of an evaluation: {error}"
                ) from error


def _cut_torn_line(path: Path) -> None:
    """Remove what stands behind the last line's end, which a writer that was killed left there."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - BLOCK, 0)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                file.truncate(start + place + 1)
                return
            end = start
        file.truncate(0)
