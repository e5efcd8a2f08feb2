import itertools
import json

import pytest

from train.agents.keys import Keys, UnseenKeys
from train.agents.traces import solution_trace


@pytest.mark.parametrize("environment", [Keys(), UnseenKeys()])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_solutions_are_right_and_other_answers_wrong(environment, split):
    for task in itertools.islice(environment.tasks(split), 20):
        messages, tools = solution_trace(environment, task, thinks=False)
        calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
        assert len(calls) == 1 + task.difficulty
        assert {call["name"] for call in calls} <= {tool.name for tool in tools}
        assert all(list(json.loads(call["arguments"])) == ["k"] for call in calls)
        assert messages[-1]["content"] == messages[-2]["content"]
        with environment.open(task) as episode:
            assert episode.grade("100").score == 0


def test_no_number_of_a_held_out_task_is_trained_on():
    def numbers(split):
        tasks = itertools.islice(Keys().tasks(split), 50)
        return {row[0] for task in tasks for row in task.data["rows"].values()}

    assert not numbers("train") & numbers("held_out")


def test_unseen_tools_have_names_of_their_own():
    names = [
        {name for task in itertools.islice(e.tasks("held_out"), 50) for name in task.data["tools"]}
        for e in (Keys(), UnseenKeys())
    ]
    assert not names[0] & names[1]


def test_a_solution_that_the_verifier_does_not_take_is_refused():
    class Wrong(Keys):
        def solve(self, task, call):
            return "0"

    with pytest.raises(ValueError, match="the solution gets 0"):
        solution_trace(Wrong(), next(Keys().tasks("train")), thinks=False)
