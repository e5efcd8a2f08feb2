import json

import pytest

from dsv32_jax.errors import UsageError
from train.rl.tasks import Task, read_tasks

GOOD = {"question": "2+2?", "answer": "4", "verifier": "numeric"}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "sums.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return path

    return write


def test_lines_become_tasks_named_by_file_and_line(write):
    own = {"question": "Write.", "rubric": "Is it short?", "name": "w", "domain": "prose"}

    assert read_tasks(write(GOOD, "", own)) == [
        Task(name="sums:1", domain="sums", question="2+2?", answer="4", verifier="numeric"),
        Task(name="w", domain="prose", question="Write.", rubric="Is it short?"),
    ]


def test_a_problem_of_reasoning_gym_keeps_its_data(write):
    data = {"family": "chain_sum", "entry": {"answer": "3"}, "settings": {"min_terms": 2}}
    (found,) = read_tasks(write({"question": "q", "verifier": "reasoning_gym", "data": data}))

    assert found.data == {**data, "settings": (("min_terms", 2),)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: must be a JSON object"),
        ({**GOOD, "anwser": "4"}, "unknown field 'anwser'"),
        ({**GOOD, "answer": 4}, "answer=4 must be text"),
        ({**GOOD, "data": []}, "data=.. must be an object"),
        ({**GOOD, "question": ""}, "has no question"),
        ({**GOOD, "answer": " "}, "needs an answer to compare with"),
        ({**GOOD, "verifier": "oracle"}, "verifier='oracle' must be one of"),
        ({**GOOD, "language": "english"}, "language='english' must be one of"),
        ({"question": "q"}, "neither a verifier nor a rubric"),
        ({"question": "q", "verifier": "code"}, "line 2: verifier='code' needs data.tests"),
        ({"question": "q", "verifier": "reasoning_gym"}, "needs data.family and data.entry"),
    ],
)
def test_a_line_that_is_no_task_is_named(write, line, message):
    with pytest.raises(UsageError, match=message):
        read_tasks(write(GOOD, line))


def test_a_file_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.jsonl can not be read"):
        read_tasks(tmp_path / "none.jsonl")
