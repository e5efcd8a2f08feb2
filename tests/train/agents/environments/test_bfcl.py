import os
from pathlib import Path

import pytest

from train.agents.environments import bfcl
from train.agents.environments.bfcl import Bfcl
from train.agents.environments.calling import grade_answer, solve_and_grade

FOLDER = os.environ.get("DSV32_BFCL_FOLDER", "")


def test_schemas_become_json_schemas():
    described = {"type": "dict", "properties": {"a": {"type": "float"}, "type": {"type": "string"}}}

    assert bfcl._schema(described) == {
        "type": "object",
        "properties": {"a": {"type": "number"}, "type": {"type": "string"}},
    }


def test_states_are_compared_by_what_they_hold():
    class Folder:
        def __init__(self, parent=None):
            self.parent, self.files, self.inside = parent, {"a": 1}, []

    one, other = Folder(), Folder()
    one.inside.append(Folder(one))
    assert bfcl.state(one) != bfcl.state(other)
    other.inside.append(Folder(other))
    assert bfcl.state(one) == bfcl.state(other)
    other.inside[0].files["a"] = 2
    assert bfcl.state(one) != bfcl.state(other)


@pytest.mark.skipif(not FOLDER, reason="DSV32_BFCL_FOLDER does not name a folder with bfcl-eval")
def test_reference_calls_pass_and_doing_nothing_does_not():
    environment = Bfcl(Path(FOLDER))
    assert not list(environment.tasks("train"))
    tasks = list(environment.tasks("held_out"))
    assert len(tasks) > 150
    for task in tasks[::10]:
        assert solve_and_grade(environment, task)[1].score == 1
        assert grade_answer(environment, task, "done").score == 0
