from typing import Any, Literal

import pytest

from train.agents import schemas
from train.agents.tools import Tool, ToolError


def book(
    city: str,
    nights: int,
    room: Literal["single", "double"] = "single",
    extras: list[str] | None = None,
    rates: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Book a room and return the booking.

    Nothing is paid yet.

    Args:
        city: Where.
        nights: How many,
            at least one.
        room: The kind.
        extras: Such as breakfast.

    Returns:
        The booking.
    """
    if nights < 1:
        raise ToolError("nights must be at least 1")
    return {"city": city, "nights": nights, "room": room, "extras": extras, "rates": rates}


BOOK = schemas.tool_of(book)


def test_a_function_becomes_a_tool():
    assert BOOK.name == "book"
    assert BOOK.description == "Book a room and return the booking.\n\nNothing is paid yet."
    assert BOOK.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "nights": {"type": "integer", "description": "How many, at least one."},
            "room": {
                "enum": ["single", "double"],
                "type": "string",
                "default": "single",
                "description": "The kind.",
            },
            "extras": {
                "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                "default": None,
                "description": "Such as breakfast.",
            },
            "rates": {
                "anyOf": [
                    {"additionalProperties": {"type": "number"}, "type": "object"},
                    {"type": "null"},
                ],
                "default": None,
            },
        },
        "required": ["city", "nights"],
        "additionalProperties": False,
    }


def test_a_method_becomes_a_tool_without_self():
    class Shop:
        def price(self, item: str) -> int:
            """Return a price."""
            return len(item)

    tool = schemas.tool_of(Shop().price, name="shop.price")
    assert tool.name == "shop.price"
    assert schemas.call(tool, {"item": "pear"}).text == "4"


def test_values_arrive_as_the_annotated_types():
    seen = []

    def move(where: tuple[int, int], by: float) -> None:
        """Move."""
        seen.append((where, by))

    result = schemas.call(schemas.tool_of(move), {"where": [1, 2], "by": 3})
    assert (seen, result.text) == ([((1, 2), 3.0)], "null")


def test_functions_that_can_not_be_tools_are_refused():
    def unannotated(x):
        """Do."""

    def positional(x: int, /) -> None:
        """Do."""

    for function, what in ((unannotated, "no annotation"), (positional, "by keyword")):
        with pytest.raises(ValueError, match=f"parameter x .*{what}"):
            schemas.tool_of(function)
    with pytest.raises(ValueError, match="needs a docstring"):
        schemas.tool_of(lambda: None, name="silent")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"city": "Rome"}, "'nights' is a required property"),
        ({"city": "Rome", "nights": "2"}, "nights: '2' is not of type 'integer'"),
        ({"city": "Rome", "nights": True}, "nights: True is not of type 'integer'"),
        ({"city": "Rome", "nights": 2, "room": "suite"}, "room: 'suite' is not one of"),
        ({"city": "Rome", "nights": 2, "extras": [1]}, "extras"),
        ({"city": "Rome", "nights": 2, "day": 1}, "'day' was unexpected"),
    ],
)
def test_arguments_are_checked_with_a_line_that_can_be_read(arguments, what):
    result = schemas.call(BOOK, arguments)
    assert result.outcome == "error"
    assert what in result.text
    assert result.text.endswith(
        "; it takes city, nights, room (optional), extras (optional), rates (optional)"
    )
    assert "\n" not in result.text


def test_a_call_at_fault_is_told_from_a_faulty_tool():
    result = schemas.call(BOOK, {"city": "Rome", "nights": 0})
    assert (result.outcome, result.text) == ("error", "error: nights must be at least 1")

    def broken() -> int:
        """Fail."""
        return {}["key"]

    result = schemas.call(schemas.tool_of(broken), {})
    assert (result.outcome, result.text) == ("defect", "error: broken failed: KeyError: 'key'")


def test_a_result_that_json_can_not_hold_is_the_tools_fault():
    tool = Tool(name="odd", description="", parameters={"type": "object"}, function=object)
    assert schemas.call(tool, {}).outcome == "defect"


def test_a_long_result_loses_its_middle():
    def write() -> str:
        """Write."""
        return "a" * 50 + "b" * 50

    result = schemas.call(schemas.tool_of(write), {}, max_chars=11)
    assert result.text == "aaaaaa[... 89 characters left out ...]bbbbb"
    assert schemas.cut("x" * 11, 11) == "x" * 11
