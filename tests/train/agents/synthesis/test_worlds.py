import dataclasses
import json

import pytest

from train.agents.synthesis.worlds import Draft, World, to_json


def test_both_survive_json(shop, draft):
    assert to_json(World.from_json(to_json(shop))) == to_json(shop)
    assert to_json(Draft.from_json(to_json(draft))) == to_json(draft)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("script",), 3),
        (("tools", 0, "name"), "a b"),
        (("tools", 0, "returns"), "all"),
        (("tools", 1, "guards", 0, "sql"), None),
        (("tools", 1, "parameters"), ["good"]),
        (("tools", 2, "steps"), [7]),
        (("tools", 0, "colour"), "red"),
        (("tools", 0, "name"), "buy"),
    ],
)
def test_a_world_of_the_wrong_form_is_refused(shop, path, value):
    data = json.loads(to_json(shop))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    with pytest.raises(ValueError, match="no world"):
        World.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "wrong",
    [
        {"answer": 3},
        {"compare": "about"},
        {"changes": {"good": {"added": [[{}]]}}},
        {"changes": {"good": {"added": ["pen"]}}},
        {"checks": {"a": 1}},
    ],
)
def test_a_verifier_of_the_wrong_form_is_refused(draft, wrong):
    data = dataclasses.asdict(draft)
    data["verifier"] |= wrong

    with pytest.raises(ValueError, match="no task"):
        Draft.from_json(json.dumps(data))
