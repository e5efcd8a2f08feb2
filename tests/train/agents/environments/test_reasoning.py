import pytest

from dsv32_jax.errors import UsageError
from train.agents.environments.calling import caller, grade_answer, solve_and_grade
from train.agents.environments.reasoning import Reasoning, calculate
from train.agents.tools import ToolError
from train.rl.problems import Family


def test_solutions_pass_and_wrong_answers_do_not(first):
    environment = Reasoning(Family.from_text("chain_sum:max_terms=3"))
    for task in first(environment, "train", 5):
        answer, grade = solve_and_grade(environment, task)
        assert grade.score == 1
        for wrong in ("", f"{answer}1", "a number"):
            assert grade_answer(environment, task, wrong).score < 1


def test_splits_share_no_question_and_processes_agree(first, in_another_process, in_this_process):
    environment = Reasoning(Family.from_text("chain_sum"))
    train, held_out = (
        {task.prompt for task in first(environment, split, 60)} for split in ("train", "held_out")
    )

    assert not train & held_out
    assert in_another_process("reasoning:chain_sum") == in_this_process(environment)


def test_the_calculator_is_a_tool(first):
    environment = Reasoning(Family.from_text("chain_sum"))
    with environment.open(first(environment, "train", 1)[0]) as episode:
        assert caller(episode.tools)("calculate", expression="(12 + 7) * 3 - 2**5 // 3 % 7") == "54"


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "2**9999",
        "9**64**3",
        "a+1",
        "().__class__",
        "1 if 2 else 3",
        "(-8)**0.5",
        "1e308*10",
        "(" * 400,
        "2 <",
        "True+1",
    ],
)
def test_what_is_no_sum_is_refused(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def test_a_family_that_is_not_there_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean chain_sum"):
        Reasoning(Family.from_text("chain_sums"))
