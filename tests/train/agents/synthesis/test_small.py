import json

from train.agents.synthesis import checking, small
from train.agents.synthesis.database import Database


def test_worlds_fit_a_small_context_and_pass():
    kinds = set()
    for number in range(12):
        made = small.make_world(0, number, 5)
        assert len(made.tasks) == 5
        with Database(made.world) as database:
            tools = json.dumps([tool.schema for tool in database.tools()])
        for draft, outcome in made.tasks:
            kinds.add(draft.kind)
            assert 1 <= len(outcome.calls) <= 2
            assert checking.grade(made.world, draft, outcome).score == 1
            assert len(draft.prompt.encode()) <= 40
        assert len(tools) <= 460  # of bytes, as chat completions list them
    assert kinds == {"read", "write", "copy", "add", "add_and_read", "follow", "after"}


def test_tool_sets_differ_from_world_to_world():
    sets = {tuple(t.name for t in small.make_world(0, n, 1).world.tools) for n in range(30)}

    assert len(sets) > 15
