"""The steps before an answer: each one true, the last one the answer."""

import re

import pytest

from train.rl.problems import Family, draw_problem
from train.rl.tasks import Task
from train.rl.working import working

SUMS = (
    ("min_terms", 2), ("max_terms", 5), ("operators", ("+", "-")),
    ("allow_parentheses", False), ("allow_negation", False),
)  # fmt: skip
FAMILIES = (
    Family(name="basic_arithmetic", settings=SUMS),
    Family(name="chain_sum", settings=(("min_terms", 2), ("max_terms", 6), ("max_digits", 3))),
    Family(name="simple_equations", settings=(("min_terms", 2), ("max_terms", 2))),
)
STEP = re.compile(r"(-?\d+)([+/-])(\d+)=(-?\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "/": int.__truediv__}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_step_is_true_and_the_last_is_the_answer(family):
    for i in range(200):
        task = draw_problem(family, "x", i)

        steps = (working(task) or "").split()

        assert steps, task.question
        for step in steps:
            left, operation, right, result = STEP.fullmatch(step).groups()
            assert OPERATIONS[operation](int(left), int(right)) == int(result), task.question
        assert steps[-1].partition("=")[2] == task.answer, task.question


def test_a_sum_has_a_step_for_each_sign():
    task = draw_problem(FAMILIES[1], "x", 0)
    signs = len(re.findall(r" [+-] ", task.question))

    assert len(working(task).split()) == signs


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("basic_arithmetic", {"expression": "(4 - 1) + 7"}),
        ("basic_arithmetic", {"expression": "4 * 2"}),
        ("chain_sum", {"expression": "4"}),
        ("simple_equations", {"equation": "t = 4"}),
        ("simple_equations", {"equation": "2*t + 3*t = 10"}),
        ("simple_equations", {"equation": "2*t = t"}),
    ],
)
def test_steps_that_are_not_known_are_none(family, metadata):
    task = Task(
        name="t",
        domain="d",
        question="q",
        answer="4",
        data={"family": family, "entry": {"metadata": metadata}},
    )

    assert working(task) is None


def test_a_task_of_a_file_has_no_steps():
    assert working(Task(name="t", domain="d", question="4 + 1", answer="5")) is None
