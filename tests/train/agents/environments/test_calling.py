import pytest

from train.agents.environments.calling import caller, describe
from train.agents.tools import ToolError


def double(number, times=1):
    return [number * 2] * times


@pytest.fixture
def call():
    whole = {"type": "integer"}
    return caller([describe(double, "Double it.", number=whole, times=whole, optional=("times",))])


def test_a_call_returns_what_json_can_hold(call):
    assert call("double", number=4) == [8]
    assert call("double", number=4, times=2) == [8, 8]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("half", {"number": 4}, "there is no tool 'half'; there are double"),
        ("double", {}, "double needs the argument 'number'"),
        ("double", {"number": "4"}, "double: number must be of type integer"),
        ("double", {"number": True}, "double: number must be of type integer"),
        ("double", {"number": 4, "x": 1}, "double has no argument 'x'; it has number, times"),
    ],
)
def test_a_wrong_call_is_told_why(call, name, arguments, message):
    with pytest.raises(ToolError, match=message):
        call(name, **arguments)


def test_calls_are_logged_with_their_results():
    log = []
    call = caller([describe(double, "Double it.", number={"type": "integer"})], log)

    call("double", number=3)

    assert [(made.name, dict(made.arguments), result) for made, result in log] == [
        ("double", {"number": 3}, [6])
    ]
