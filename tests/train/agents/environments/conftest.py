import itertools
import json
import os
import subprocess
import sys

import pytest

SHOW = """
import itertools, json, sys
from train.agents.environments import catalogue
environment = catalogue.make(sys.argv[1])
found = [[t.name, t.prompt] for s in ("train", "held_out") for t in itertools.islice(environment.tasks(s, 3), 4)]
print(json.dumps(found))
"""


@pytest.fixture
def first():
    """Return a function that lists an environment's first tasks."""
    return lambda environment, split, n, seed=0: list(
        itertools.islice(environment.tasks(split, seed), n)
    )


@pytest.fixture
def in_another_process():
    """Return a function that lists names and prompts as a process with other hashes draws them."""

    def show(name):
        env = os.environ | {"PYTHONHASHSEED": "7"}
        argv = [sys.executable, "-c", SHOW, name]
        ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        return json.loads(ended.stdout)

    return show


@pytest.fixture
def in_this_process(first):
    """Return a function that lists the same of an environment here."""
    return lambda environment: [
        [task.name, task.prompt]
        for split in ("train", "held_out")
        for task in first(environment, split, 4, 3)
    ]
