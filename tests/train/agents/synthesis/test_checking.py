import dataclasses

import pytest

from train.agents.synthesis import checking
from train.agents.synthesis.checking import RejectedError, examine
from train.agents.synthesis.solutions import Outcome, run_in
from train.agents.synthesis.worlds import Verifier
from train.agents.tools import ToolCall


def changed(draft, **fields):
    verifier = {
        k: fields.pop(k) for k in list(fields) if k in ("answer", "changes", "checks", "compare")
    }
    return dataclasses.replace(
        draft, **fields, verifier=dataclasses.replace(draft.verifier, **verifier)
    )


def reason(world, draft):
    with pytest.raises(RejectedError) as error:
        examine(world, draft)
    return error.value.reason


def test_a_good_task_is_kept(shop, draft):
    assert examine(shop, draft).answer == "317"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": " "}, "no prompt"),
        ({"solution": "import os"}, "solution not allowed"),
        ({"solution": 'def solve(call):\n    return call("steal")\n'}, "solution fails"),
        (
            {"solution": 'def solve(call):\n    x = [] and call("list")\n    return "317"\n'},
            "solution makes no call",
        ),
        ({"answer": "318"}, "solution does not pass"),
        ({"changes": {}}, "solution does not pass"),
        (
            {"prompt": "Cheapest in stock? It is 317.", "changes": None},
            "solved by a broken solution",
        ),
        (
            {"answer": None, "changes": None, "checks": {"x": "SELECT 1"}},
            "solved by a broken solution",
        ),
        ({"answer": None, "changes": None}, "world does not work"),
    ],
)
def test_a_bad_one_is_not(shop, draft, fields, why):
    assert reason(shop, changed(draft, **fields)) == why


def test_an_answer_in_the_prompt_needs_no_call(shop, draft):
    asked = changed(
        draft,
        prompt="Is the price of ink 925 or 926?",
        solution='def solve(call):\n    return call("get", good="ink")["price"]\n',
        answer="925",
        changes={},
    )

    assert reason(shop, asked) == "solved without a call"


def test_a_verifier_that_takes_too_much_is_not_kept(shop, draft):
    loose = changed(
        draft,
        solution='def solve(call):\n    return call("get", good="ink")["price"]\n',
        answer=None,
        changes={},
        checks={"about": "SELECT :answer + 0 > 900"},
    )

    assert reason(shop, loose) == "wrong answer accepted"


def test_a_lucky_filter_is_not_kept(shop, draft):
    """With all goods in stock the cheapest one is found without looking at the stock."""
    script = shop.script.replace("122, 0", "999, 0")

    assert reason(dataclasses.replace(shop, script=script), draft) == "solved by a broken solution"


def test_what_differs_from_run_to_run_is_not_kept(shop, draft):
    runs = iter(range(99))

    def run(world, sources):
        return [dataclasses.replace(run_in(world, s), answer=str(next(runs))) for s in sources]

    with pytest.raises(RejectedError, match="not deterministic"):
        examine(shop, draft, run)


def test_results_that_were_made_up_do_not_count(shop, draft):
    told = run_in(shop, draft.solution)
    forged = dataclasses.replace(told, results=(*told.results[:-1], "never said"))

    assert checking.grade(shop, draft, told).score == 1
    assert checking.grade(shop, draft, forged).score == 0


def test_calls_that_fail_when_made_again_do_not_count(shop, draft):
    outcome = Outcome(calls=(ToolCall(name="buy", arguments={"good": "cap"}),), answer="317")

    assert checking.grade(shop, draft, outcome).score == 0
    verifier = Verifier(answer="317", changes=None)
    assert checking.grade(shop, dataclasses.replace(draft, verifier=verifier), outcome).score == 0
