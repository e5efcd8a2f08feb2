import collections
import json
import os
import subprocess
import sys

import pytest

from train.agents.synthesis import checking, procedural
from train.agents.synthesis.domains import DOMAINS
from train.agents.synthesis.solutions import Outcome, tools_used
from train.agents.synthesis.worlds import to_json


@pytest.fixture(scope="module")
def made():
    return [procedural.make_world(5, number, 5) for number in range(2 * len(DOMAINS))]


def test_worlds_have_their_tasks_of_growing_difficulty(made):
    assert sum(len(m.tasks) for m in made) >= 5 * len(made) - 2
    for m in made:
        difficulties = [draft.difficulty for draft, _ in m.tasks]
        assert difficulties == sorted(difficulties)
        assert difficulties[0] == 0
    assert {draft.difficulty for m in made for draft, _ in m.tasks} == {0, 1, 2, 3, 4}
    assert any(m.added for m in made)


def test_categories_do_not_share_one_template(made):
    kinds = collections.Counter(draft.kind for m in made for draft, _ in m.tasks)
    assert len(kinds) >= 10
    assert max(kinds.values()) < 0.3 * kinds.total()
    assert len({m.world.category for m in made}) == 8
    tools = {tuple(tool.name for tool in m.world.tools) for m in made}
    assert len(tools) == len(made)
    first, second = made[0], made[len(DOMAINS)]
    assert first.world.category == second.world.category
    assert {t.name for t in first.world.tools} != {t.name for t in second.world.tools}


def test_every_solution_passes_and_nothing_done_does_not(made):
    for m in made:
        names = {tool.name for tool in m.world.tools}
        for draft, outcome in m.tasks:
            assert tools_used(draft.solution) <= names
            assert checking.grade(m.world, draft, outcome).score == 1
            for answer in ("", "0", outcome.answer + "1"):
                assert checking.grade(m.world, draft, Outcome(answer=answer)).score == 0


def test_an_answer_of_another_task_does_not_pass(made):
    compared = 0
    for m in made:
        for (draft, outcome), (_, other) in zip(m.tasks, m.tasks[1:], strict=False):
            if outcome.answer != other.answer:
                swapped = Outcome(calls=other.calls, answer=other.answer)
                assert checking.grade(m.world, draft, swapped).score == 0
                compared += 1
    assert compared > len(made)


def test_processes_agree():
    code = (
        "import sys, json; from train.agents.synthesis import procedural, worlds\n"
        "m = procedural.make_world(5, 3, 5)\n"
        "print(json.dumps([worlds.to_json(m.world), *(worlds.to_json(d) for d, _ in m.tasks)]))"
    )
    env = os.environ | {"PYTHONHASHSEED": "11"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    here = procedural.make_world(5, 3, 5)

    assert json.loads(ended.stdout) == [to_json(here.world), *(to_json(d) for d, _ in here.tasks)]
