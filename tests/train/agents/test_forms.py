import json

import pytest

from dsv32_jax import encoding
from dsv32_jax.tokenizer import ByteTokenizer
from train.agents import schemas
from train.agents.forms import CompactForm, OfficialForm
from train.agents.tools import Tool

BYTES = ByteTokenizer()
FORM = CompactForm(tokenizer=BYTES)


def price(item: str) -> int:
    """Return what an item costs."""
    return len(item)


def book(city: str, nights: int, extras: list[str] | None = None, code: str = "") -> str:
    """Book."""
    return f"{city} {nights} {extras} {code}"


TOOLS = [schemas.tool_of(price), schemas.tool_of(book)]


def assistant(content="", reasoning="", calls=()):
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for n, a in calls
        ],
    }


def text_of(ids):
    return encoding.decode_text(ids, BYTES)


def written(name, arguments):
    """Return the ids of a turn with one call."""
    found = FORM.encode([assistant(calls=[(name, arguments)])], TOOLS)
    return found.ids[found.trainable].tolist()


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is a pear?"},
    assistant(reasoning="look\nit up", calls=[("price", {"item": "pear"}), ("book", {"city": "Rome", "nights": 2})]),
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "two\nlines"},
    assistant(content="3\neuros"),
]  # fmt: skip


def test_a_compact_conversation_has_a_line_for_each_thing():
    found = FORM.encode(CONVERSATION, TOOLS)
    text = text_of(found.ids).removeprefix("<｜begin▁of▁sentence｜>")
    assert text == (
        "Be short.\n@price item\n@book city nights extras? code?\n?What is a pear?\n"
        "#look\n#it up\n!price pear\n!book Rome 2<｜end▁of▁sentence｜>=3\n=two\\nlines\n"
        ">3\neuros<｜end▁of▁sentence｜>"
    )


@pytest.mark.parametrize("form", [FORM, OfficialForm(tokenizer=BYTES)])
def test_exactly_what_a_policy_writes_is_trainable(form):
    messages = [*CONVERSATION[:-1], assistant(content="3\neuros", reasoning="now I know")]
    found = form.encode(messages, TOOLS)
    begin = form.encode(messages[:2], TOOLS)
    turn = text_of(found.ids[found.trainable])
    ends = turn.split("<｜end▁of▁sentence｜>")
    assert len(ends) == 3
    assert "look\n" in ends[0]
    assert "pear" in ends[0]
    assert "3\neuros" in ends[1]
    assert "two" not in turn
    assert not begin.trainable.any()
    assert found.ids[: len(begin.ids)].tolist() == begin.ids.tolist()


@pytest.mark.parametrize("form", [FORM, OfficialForm(tokenizer=BYTES)])
def test_appended_results_are_the_tokens_of_the_whole(form):
    whole = form.encode(CONVERSATION[:5], TOOLS).ids.tolist()
    begin = form.encode(CONVERSATION[:2], TOOLS).ids.tolist()
    turn = form.encode(CONVERSATION[:3], TOOLS).ids.tolist()[len(begin) :]
    assert begin + turn + form.results(["3", "two\nlines"], turn) == whole
    # A turn that was cut gets the end that it lacks.
    assert turn[:-1] + form.results(["3", "two\nlines"], turn[:-1]) == whole[len(begin) :]


def test_a_new_user_message_takes_the_reasoning_out_and_leaves_calls_and_results():
    asked = [*CONVERSATION, {"role": "user", "content": "And a plum?"}]
    text = text_of(FORM.encode(asked, TOOLS).ids)
    assert "look" not in text
    assert "!price pear" in text
    assert "=two" in text
    official = text_of(OfficialForm(tokenizer=BYTES).encode(asked, TOOLS).ids)
    assert "look" not in official
    assert ">pear<" in official
    assert "two\nlines" in official


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Rome", "nights": 2},
        {"city": "New York", "nights": -1, "code": "x=1"},
        {"city": "", "nights": 2, "code": "city=Rome"},
        {"city": "3", "nights": 2, "extras": ["a b", "c"]},
        {"city": "[a", "nights": 2, "extras": None, "code": '"'},
        {"city": "two\nlines", "nights": 2},
        {"nights": 2, "city": "Rome"},
    ],
)
def test_compact_calls_are_read_as_they_were_written(arguments):
    ids = written("book", arguments)
    assert text_of(ids).count("\n") == 0
    turn = FORM.read(ids, TOOLS)
    assert turn.problems == ()
    assert json.loads(turn.message["tool_calls"][0]["function"]["arguments"]) == arguments


@pytest.mark.parametrize("item", ["pear", "a b", "item=x", '"x"', "", " x", "a\nb", "{", "3"])
def test_the_one_text_of_a_tool_stands_as_it_is(item):
    ids = written("price", {"item": item})
    turn = FORM.read(ids, TOOLS)
    assert json.loads(turn.message["tool_calls"][0]["function"]["arguments"]) == {"item": item}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "'hello' begins with none of # ! >"),
        ("", "there is neither a call nor an answer"),
        ("#only thought", "there is neither a call nor an answer"),
        ("!book Rome 2 [] x y", "book: 'y' is one argument too many"),
        ("!book Rome city=Paris", "book: city is given twice"),
        ("!book Rome 2 [", "book: extras is no JSON: '['"),
    ],
)
def test_what_can_not_be_read_is_said_in_a_line(text, problem):
    turn = FORM.read(BYTES.encode(text), TOOLS)
    assert turn.problems == (problem,)
    assert turn.message["tool_calls"] == []


def test_words_get_the_types_of_the_schema():
    turn = FORM.read(BYTES.encode("!book 7 7"), TOOLS)
    assert json.loads(turn.message["tool_calls"][0]["function"]["arguments"]) == {
        "city": "7",
        "nights": 7,
    }


def test_reading_an_official_turn_keeps_good_calls_beside_broken_ones():
    form = OfficialForm(tokenizer=BYTES)
    good = form.encode([assistant(calls=[("price", {"item": "pear"})])], ()).ids[1:]
    text = text_of(good).replace(
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="price">?</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    )
    turn = form.read(BYTES.encode("why" + text.removesuffix("<｜end▁of▁sentence｜>")), ())
    assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["price"]
    assert len(turn.problems) == 1
    assert turn.message["reasoning_content"] == "why"


def test_descriptions_come_only_where_they_are_asked_for():
    tool = Tool(name="go", description="Go\nthere.", parameters={"type": "object"}, function=print)
    asked = [{"role": "user", "content": "x"}]
    assert text_of(CompactForm(tokenizer=BYTES, describe=True).encode(asked, [tool]).ids[1:]) == (
        "@go - Go there.\n?x\n"
    )
    assert text_of(FORM.encode(asked, [tool]).ids[1:]) == "@go\n?x\n"
