import itertools

import pytest

from train.agents.synthesis import questions
from train.agents.synthesis.questions import Question, build_from_facts, filter_questions, judge

ASKED = Question(text="the capital", answer="Wuxi")


def knows(*right):
    return lambda text, answer, number: answer in right


@pytest.mark.parametrize(
    ("right", "answers", "verdict"),
    [
        (("Wuxi",), ["Hefei", ""], "kept"),
        (("Wuxi",), ["Wuxi", "Hefei"], "a candidate not found wrong"),
        (("Hefei",), ["Hefei"], "answer not found right"),
        (("Wuxi", "Hefei"), ["Hefei"], "a candidate not found wrong"),
        (("Wuxi",), [], "kept"),
    ],
)
def test_what_is_kept(right, answers, verdict):
    answerers = [lambda text, a=a: a for a in answers]

    assert judge(ASKED, answerers, knows(*right)) == verdict


def test_a_verifier_that_wavers_is_not_believed():
    wavers = {"Wuxi": (True, True, False), "Hefei": (False, False, False)}

    assert (
        judge(ASKED, [lambda text: "Hefei"], lambda t, a, n: wavers[a][n])
        == "answer not found right"
    )
    wavers = {"Wuxi": (True, True, True), "Hefei": (False, True, False)}
    assert (
        judge(ASKED, [lambda text: "Hefei"], lambda t, a, n: wavers[a][n])
        == "a candidate not found wrong"
    )


def test_built_questions_are_checked_in_the_documents():
    corpus = questions.generated("a")
    built = list(dict.fromkeys(itertools.islice(build_from_facts(corpus, 0), 40)))
    by_text = {question.text: question for question in built}
    check = questions.check_in_documents(corpus, by_text)

    kept, verdicts = filter_questions(built, [questions.first_hop(corpus)], check)

    assert verdicts == {"kept": len(built)}
    assert kept == built
    wrong = [Question(text=q.text, answer="nothing", hops=q.hops) for q in built]
    assert filter_questions(wrong, [], check)[0] == []
