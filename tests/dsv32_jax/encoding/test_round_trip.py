"""Properties of encoder and parsers together, on generated conversations and on broken completions."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv32_jax.encoding import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    EncodingError,
    Finished,
    Problem,
    ReasoningDelta,
    StreamingParser,
    encode_messages,
    parse_completion,
    parse_completion_tolerant,
)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONTROL = (BOS, EOS, "<think>", "</think>", "｜DSML｜")
CALLS_START = "\n\n<｜DSML｜function_calls"
TAGS = [
    *CONTROL,
    CALLS_START,
    "<｜DSML｜function_calls",
    "</｜DSML｜function_calls>",
    "<｜DSML｜invoke",
    "</｜DSML｜invoke",
    "<｜DSML｜parameter",
    "</｜DSML｜parameter",
    "<\n/｜DSML｜parameter",
    "/｜DSML｜parameter",
    "<｜User｜>",
    "<function_results>",
    ' name="f">\n',
    ' name="',
    '" string="true">',
    '" string="false">',
    ">\n",
]
SCRAPS = [
    "<",
    ">",
    "\n",
    "\n\n",
    "</",
    "<｜",
    "｜DSML",
    "<th",
    '"',
    "\\",
    "{",
    "é🙂",
    "a",
    " ",
    "\u2028",
]
ALL_CUTS = 300  # code points of a text that is tried with every cut
MODES = st.sampled_from(["chat", "thinking"])

anything = st.one_of(
    st.lists(st.sampled_from(TAGS + SCRAPS), max_size=12).map("".join), st.text(max_size=20)
)
prose = anything.filter(lambda text: not any(token in text for token in CONTROL))
# A value ends at its closing tag and a name at the next piece of markup; nothing is escaped.
value_text = anything.filter(lambda text: "/｜DSML｜parameter" not in text)
names = st.one_of(
    st.sampled_from(["f", "get_weather", 'a"b', "名", "", 'x">\n', "<think>"]), st.text(max_size=8)
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | value_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments: {
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    },
    names,
    st.dictionaries(names, json_values, max_size=3),
)
turns = st.builds(
    lambda content, reasoning, tool_calls: {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    },
    prose,
    prose,
    st.lists(calls, max_size=3),
)


def completion_of(turn, mode):
    """Return what the model writes, by the encoder: the text that the message adds to a prompt."""
    context = [{"role": "user", "content": "?"}]
    return encode_messages([turn], context=context, thinking_mode=mode)


@st.composite
def thinking_turns(draw):
    """Draw a mode and a turn that has a text in it."""
    mode, turn = draw(MODES), draw(turns)
    if mode == "thinking" and not turn["reasoning_content"] and not turn["tool_calls"]:
        turn["reasoning_content"] = "r"
    return mode, turn


places = st.integers(0, 1 << 20)
edits = st.lists(st.tuples(places, places, st.just(None) | anything), max_size=3)
broken_turns = st.tuples(thinking_turns(), edits)
scribbles = st.tuples(MODES, anything) | broken_turns


def text_of(scribble):
    """Return the mode and the text of a scribble: text, or a completion that was edited.

    The encoder can not be called while drawing: its type checks use `random`.
    """
    first, second = scribble
    if isinstance(first, str):
        return first, second
    mode, turn = first
    text = completion_of(turn, mode)
    for i, j, new in second:
        i, j = sorted((i % (len(text) + 1), j % (len(text) + 1)))
        text = text[:i] + (text[i:j] * 2 if new is None else new) + text[j:]
    return mode, text


class Rejected(Exception):  # noqa: N818
    """What the oracle raises."""


def require(holds):
    if not holds:
        raise Rejected


def until(text, at, stops):
    """Return the text before the nearest of some strings, that string, and the place after it."""
    hits = [(place, stop) for stop in stops if (place := text.find(stop, at)) >= 0]
    if not hits:
        return text[at:], None, len(text)
    place, stop = min(hits)
    return text[at:place], stop, place + len(stop)


def oracle(text, mode):
    """Parse by the published rules, by searching and matching whole pieces.

    Differs from DeepSeek: there a text may also end without the token that ends the turn right
    after one of the block's tags, and what was read so far counts.
    """
    reasoning, at = "", 0
    if mode == "thinking":
        reasoning, stop, at = until(text, at, ["</think>", CALLS_START])
        require(stop == "</think>")
    content, stop, at = until(text, at, [EOS, CALLS_START])
    require(stop is not None)
    tool_calls = []
    if stop == CALLS_START:
        tool_calls, at = oracle_calls(text, at)
        rest = text[at:]
        require(rest in ("", EOS))
    else:
        require(at == len(text))
    require(not any(token in part for token in CONTROL for part in (reasoning, content)))
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    }


def oracle_calls(text, at):
    tool_calls = []
    while True:
        gap, stop, at = until(text, at, ["<｜DSML｜invoke", "</｜DSML｜function_calls>"])
        require(gap == ">\n" and stop is not None)
        if stop == "</｜DSML｜function_calls>":
            return tool_calls, at
        header, stop, at = until(text, at, ["<｜DSML｜parameter", "</｜DSML｜invoke"])
        name = re.fullmatch(r'\s*name="(.*?)">\n\n?', header, re.DOTALL)
        require(name and stop)
        parameters = {}
        while stop == "<｜DSML｜parameter":
            inner, stop, at = until(text, at, ["/｜DSML｜parameter"])
            require(stop)
            found = re.fullmatch(r' name="(.*?)" string="(true|false)">(.*)<\n?', inner, re.DOTALL)
            require(found and found[1] not in parameters)
            is_text = found[2] == "true"
            value = json.dumps(found[3], ensure_ascii=False) if is_text else found[3]
            parameters[found[1]] = value
            gap, stop, at = until(text, at, ["<｜DSML｜parameter", "</｜DSML｜invoke"])
            require(gap == ">\n" and stop)
        pairs = [f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in parameters.items()]
        function = {"name": name[1], "arguments": "{" + ", ".join(pairs) + "}"}
        tool_calls.append({"type": "function", "function": function})


def fold(events):
    """Return what the events say, however their text was cut."""
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    content = "".join(e.text for e in events if isinstance(e, ContentDelta))
    started = [e.name for e in events if isinstance(e, CallStart)]
    ended = [e.index for e in events if isinstance(e, CallEnd)]
    arguments = [
        "".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == i)
        for i in range(len(started))
    ]
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"type": "function", "function": {"name": started[i], "arguments": arguments[i]}}
            for i in ended
        ],
    }
    # Broken calls too have been told about, and must be told alike.
    rest = [
        list(zip(started, arguments, strict=True)),
        [e for e in events if isinstance(e, Finished)],
    ]
    return message, [e for e in events if isinstance(e, Problem)], rest


def stream(pieces, mode):
    parser = StreamingParser(mode)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    assert all(e.text for e in events if isinstance(e, ReasoningDelta | ContentDelta))
    return fold(events)


@given(thinking_turns())
def test_what_the_encoder_writes_the_parser_reads_back(drawn):
    mode, turn = drawn
    text = completion_of(turn, mode)
    expected = turn if mode == "thinking" else turn | {"reasoning_content": ""}

    assert parse_completion(text, thinking_mode=mode) == expected
    assert parse_completion_tolerant(text, thinking_mode=mode) == (expected, [])


@given(thinking_turns())
def test_what_the_parser_reads_the_encoder_writes_again(drawn):
    mode, turn = drawn
    text = completion_of(turn, mode)
    assert completion_of(parse_completion(text, thinking_mode=mode), mode) == text


@settings(max_examples=400)
@given(scribbles)
def test_strict_and_tolerant_agree_with_the_published_rules(drawn):
    mode, text = text_of(drawn)
    message, problems = parse_completion_tolerant(text, thinking_mode=mode)
    try:
        expected = oracle(text, mode)
    except Rejected:
        assert problems
        with pytest.raises(EncodingError):
            parse_completion(text, thinking_mode=mode)
    else:
        assert problems == []
        assert message == expected
        assert parse_completion(text, thinking_mode=mode) == expected


@given(scribbles)
def test_problems_lie_in_the_text_and_kept_prose_holds_no_control_token(drawn):
    mode, text = text_of(drawn)
    message, problems = parse_completion_tolerant(text, thinking_mode=mode)

    assert all(0 <= problem.position <= len(text) for problem in problems)
    assert all(not any(token in p.message for token in CONTROL) for p in problems)
    assert all(p.message and "\n" not in p.message for p in problems)
    # A kept text of two parts may spell a token across the place of one that was left out.
    if not [p for p in problems if p.kind == "control_text"]:
        kept = message["content"] + "\0" + message["reasoning_content"]
        assert not any(token in kept for token in CONTROL)


@settings(max_examples=20)
@given(scribbles)
def test_every_cut_of_a_stream_says_what_the_whole_text_says(drawn):
    mode, text = text_of(drawn)
    text = text[:ALL_CUTS]
    whole = stream([text], mode)
    assert whole[:2] == parse_completion_tolerant(text, thinking_mode=mode)
    assert stream(list(text), mode) == whole
    for i in range(len(text) + 1):
        assert stream([text[:i], text[i:]], mode) == whole


@settings(max_examples=200)
@given(scribbles, st.data())
def test_a_stream_in_many_pieces_says_what_the_whole_text_says(drawn, data):
    mode, text = text_of(drawn)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert stream(pieces, mode) == stream([text], mode)


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_every_cut_of_a_turn_with_everything_says_what_the_whole_turn_says(mode):
    arguments = json.dumps({"a": 'x "y"\n</', "b": [1, {"k": None}]})
    function = {"name": "f", "arguments": arguments}
    turn = {
        "role": "assistant",
        "content": "c\n",
        "reasoning_content": "r<",
        "tool_calls": [{"type": "function", "function": function}] * 2,
    }
    text = completion_of(turn, mode) + "more"
    # The first call is broken, the second is not.
    text = text.replace("</｜DSML｜parameter", "/｜DSML｜parameter", 1)
    whole = stream([text], mode)

    for i in range(len(text) + 1):
        assert stream([text[:i], text[i:]], mode) == whole


@given(scribbles, st.data())
def test_what_a_stream_said_stays_true_whatever_comes_next(drawn, data):
    mode, text = text_of(drawn)
    cut = data.draw(st.integers(0, len(text)))
    parser = StreamingParser(mode)
    early = fold(parser.feed(text[:cut]))
    final = stream([text], mode)

    assert final[0]["content"].startswith(early[0]["content"])
    assert final[0]["reasoning_content"].startswith(early[0]["reasoning_content"])
    assert final[0]["tool_calls"][: len(early[0]["tool_calls"])] == early[0]["tool_calls"]
    assert final[1][: len(early[1])] == early[1]
    assert parser.message() == early[0]
    assert parser.problems == early[1]
