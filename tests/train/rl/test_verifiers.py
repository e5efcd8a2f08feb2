import pytest

from train.rl import verifiers
from train.rl.problems import Family, draw_problem
from train.rl.tasks import Task

HUGE = "9" * 100_000
DEEP = "\\frac{" * 3000 + "1" + "}" * 3000
HOSTILE = [
    "",
    " ",
    "1e999",
    "-1e999999",
    "nan",
    "inf",
    HUGE,
    DEEP,
    "\x00",
    "𝟜",
    "４",
    "💥" * 500,
    "(" * 200,
]
HOSTILE += [
    "1/0",
    "10^9^9^9",
    "1 m^9^9",
    "1 " + "m" * 900,
    "\\",
    "}{",
    "\u202e4",
    "4\\end{document}",
]


def task(verifier, answer, **data):
    return Task(name="t", domain="d", question="q", verifier=verifier, answer=answer, data=data)


def score(verifier, reference, answer, **data):
    return verifiers.verify(answer, task(verifier, reference, **data))


@pytest.mark.parametrize(
    ("reference", "answer", "data"),
    [
        ("Paris", "Paris", {}),
        ("Paris", "  Paris\n", {}),
        ("a b", "a \t b", {}),
        ("é", "e\u0301", {}),
        ("Paris", "PARIS", {"ignore_case": True}),
        ("Straße", "STRASSE", {"ignore_case": True}),
    ],
)
def test_equal_texts_are_right(reference, answer, data):
    assert score("exact", reference, answer, **data) == 1


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("Paris", "paris"), ("Paris", "Paris."), ("Paris", "Paris or Rome"), ("x2", "x²"), ("a b", "ab"), ("а", "a")],
)  # fmt: skip
def test_other_texts_are_wrong(reference, answer):
    assert score("exact", reference, answer) == 0


@pytest.mark.parametrize(
    ("reference", "answer", "data"),
    [
        ("42", "42", {}),
        ("42", "$42$", {}),
        ("42", "42.0", {}),
        ("-3", "−3", {}),
        ("1500", "1,500", {}),
        ("0.5", ".5", {}),
        ("0.5", "1/2", {}),
        ("0.5", "50%", {}),
        ("50%", "0.5", {}),
        ("3e8", "3 × 10^8", {}),
        ("3e8", "3 \\times 10^{8}", {}),
        ("123456789012345678901234567890", "123456789012345678901234567890", {}),
        ("1.5 km", "1,500 m", {}),
        ("1500 m", "1.5 km", {}),
        ("20 °C", "293.15 K", {}),
        ("9.81 m/s^2", "9.81 m s^-2", {}),
        ("9.81 m/s²", "9.81 N/kg", {}),
        ("4.18 J/(g K)", "4180 J/(kg K)", {}),
        ("36 km/h", "10 m/s", {}),
        ("2 hours", "120 minutes", {}),
        ("12", "12 cm", {"unit": "cm"}),
        ("12 cm", "12", {"unit": "cm"}),
        ("12", "0.12 m", {"unit": "cm"}),
        ("3.14159", "3.14", {"rel_tol": 0.001}),
        ("0", "0.0004", {"abs_tol": 0.001}),
    ],
)
def test_equal_numbers_are_right(reference, answer, data):
    assert score("numeric", reference, answer, **data) == 1


@pytest.mark.parametrize(
    ("reference", "answer", "data"),
    [
        ("42", "43", {}),
        ("42", "-42", {}),
        ("42", "42 43", {}),
        ("42", "42 or 43", {}),
        ("42", "the answer is 42", {}),
        ("42", "42 kg", {}),
        ("42 kg", "42", {}),
        ("42 kg", "42 m", {}),
        ("42 kg", "42 g", {}),
        ("1500", "1,50", {}),
        ("10000000000", "10000000001", {}),
        ("123456789012345678901234567890", "123456789012345678901234567891", {}),
        ("0.3333", "1/3", {}),
        ("3.14159", "3.14", {"rel_tol": 0.0001}),
        ("0", "0.002", {"abs_tol": 0.001}),
        ("50%", "50", {}),
        ("12", "12 m", {"unit": "cm"}),
        ("20 °C", "20 K", {}),
    ],
)
def test_other_numbers_are_wrong(reference, answer, data):
    assert score("numeric", reference, answer, **data) == 0


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("1/2", "0.5"),
        ("\\frac12", "1/2"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("5", "x=5"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("$\\pi$", "\\pi"),
        ("[0,1)", "[0, 1)"),
        ("1000", "1,000"),
        ("30", "30^\\circ"),
        ("-7", "-7"),
        ("300000000", "3 \\times 10^8"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1 & 2\\end{pmatrix}"),
    ],
)
def test_equal_formulas_are_right(reference, answer):
    assert score("math", reference, answer) == 1


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("4", "5"),
        ("4", "-4"),
        ("2", "1,2,3"),
        ("[0,1)", "[0,1]"),
        ("x^2+1", "(x+1)^2"),
        ("\\pi", "3.14159"),
        ("4", "2+2"),  # the question again
        ("12", "3 \\times 4"),
        ("12", "3 \\cdot 4"),
        ("A", "B"),
    ],
)
def test_other_formulas_are_wrong(reference, answer):
    assert score("math", reference, answer) == 0


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "simple_equations", "zebra_puzzles"])
def test_a_family_of_reasoning_gym_scores_its_own_problems(name):
    problem = draw_problem(Family(name=name), 1)

    assert verifiers.verify(problem.answer, problem) == 1
    assert verifiers.verify("Nobody knows.", problem) < 0.1
    assert verifiers.verify(None, problem) == 0


@pytest.mark.parametrize("verifier", ["exact", "numeric", "math"])
@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: repr(text[:12]))
def test_what_can_not_be_read_is_wrong(verifier, answer):
    reference = "7.25"

    assert score(verifier, reference, answer) == 0


@pytest.mark.parametrize("verifier", ["numeric", "math"])
def test_a_reference_that_can_not_be_read_raises(verifier):
    with pytest.raises(ValueError, match="the reference"):
        score(verifier, "", "4")


def test_a_long_formula_is_not_parsed(monkeypatch):
    monkeypatch.setattr(verifiers, "_parse_math", pytest.fail)

    assert score("math", "7.25", DEEP) == 0


@pytest.mark.parametrize("answer", ["1e999 m", "1e1000", "-1e999 m"])
def test_a_number_beyond_floats_is_wrong(answer):
    assert score("numeric", "7.25 cm", answer) == 0
    assert score("numeric", "7.25", answer) == 0


@pytest.mark.parametrize("verifier", [None, "code"])
def test_a_task_that_no_rule_judges_is_refused(verifier):
    with pytest.raises(ValueError, match="task t has no rule"):
        verifiers.verify("4", task(verifier, "4"))
