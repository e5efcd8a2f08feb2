import io
import sys
from contextlib import redirect_stdout

import pytest

from train.agents.environments.calling import caller, grade_answer, solve_and_grade
from train.agents.environments.drawing import random_for
from train.agents.environments.interpreter import Interpreter, grade_number
from train.agents.environments.interpreter_problems import KINDS
from train.agents.pool import SessionPool


@pytest.fixture(scope="module")
def environment(_isolated):
    with SessionPool(1) as pool:
        yield Interpreter(pool.session)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_and_program_agree(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        problem = kind(random_for("test", number))
        for name, text in problem.files.items():
            (tmp_path / name).write_text(text)
        out = io.StringIO()
        with redirect_stdout(out):
            exec(problem.program, {"__name__": "program"})

        assert grade_number(out.getvalue().strip(), problem.answer, problem.rel_tol).score == 1
        for wrong in ("", "0.5", "no number", str(float(problem.answer) * 1.001 + 1)):
            assert grade_number(wrong, problem.answer, problem.rel_tol).score == 0


def test_solutions_pass_in_the_sandbox(environment, first):
    for task in first(environment, "train", 2):
        assert solve_and_grade(environment, task)[1].score == 1
        assert grade_answer(environment, task, "").score == 0


def test_the_session_has_a_state(environment, first):
    with environment.open(first(environment, "train", 1)[0]) as episode:
        call = caller(episode.tools)
        call("python", code="x = 41")
        assert call("python", code="x + 1").strip() == "42"


def test_an_answer_may_stand_in_a_sentence_with_a_box():
    assert grade_number(r"So it is \boxed{12}.", "12", 0.0).score == 1
    assert grade_number("So it is 12.", "12", 0.0).score == 0


def test_splits_share_no_prompt_and_processes_agree(first, in_another_process, in_this_process):
    environment = Interpreter()
    train, held_out = (
        {task.prompt for task in first(environment, split, 40)} for split in ("train", "held_out")
    )

    assert not train & held_out
    assert in_another_process("interpreter") == in_this_process(environment)
    assert "ipykernel" not in sys.modules  # drawing tasks starts nothing
