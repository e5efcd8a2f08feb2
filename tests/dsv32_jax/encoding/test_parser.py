import json
import time

import pytest

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
    parse_completion,
    parse_completion_tolerant,
)

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x "y"\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">[1, {"k": null}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
F_ARGUMENTS = r'{"a": "x \"y\"\n", "b": [1, {"k": null}]}'


def message(content="", reasoning="", calls=()):
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }


BOTH_CALLS = [("f", F_ARGUMENTS), ("g", "{}")]
TOKENS = [BOS, EOS, "<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜Assistant｜>"]
EMPTY_BLOCK = "\n\n<｜DSML｜function_calls>\n</｜DSML｜function_calls>"
TIGHT_CALL = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        ("chat", f"hi\n{EOS}", message("hi\n")),
        ("chat", EOS, message()),
        ("thinking", f"r\n</think>hi{EOS}", message("hi", "r\n")),
        ("thinking", f"</think>{EOS}", message()),
        ("thinking", f"r</think>c{CALLS}{EOS}", message("c", "r", BOTH_CALLS)),
        ("thinking", f"</think>{CALLS}", message(calls=BOTH_CALLS)),
        ("chat", f"c\n{CALLS}", message("c\n", calls=BOTH_CALLS)),
        ("chat", EMPTY_BLOCK, message()),
        ("chat", TIGHT_CALL + EOS, message(calls=[("g", "{}")])),
        (
            "chat",
            f"a < b <thin <｜User｜> </thi\n\n<｜DSM{EOS}",
            message("a < b <thin <｜User｜> </thi\n\n<｜DSM"),
        ),
    ],
)
def test_what_is_in_the_format_is_read(mode, text, expected):
    assert parse_completion(text, thinking_mode=mode) == expected
    assert parse_completion_tolerant(text, thinking_mode=mode) == (expected, [])


def test_json_values_pass_unchecked_and_texts_are_escaped():
    text = CALLS.replace('[1, {"k": null}]', "[1, oops").replace('"y"', "\\y\té</think>" + EOS)
    [first, _] = parse_completion(text, thinking_mode="chat")["tool_calls"]
    assert first["function"]["arguments"] == (
        '{"a": "x \\\\y\\té</think>' + EOS + '\\n", "b": [1, oops}'
    )


@pytest.mark.parametrize(
    ("mode", "text", "kind", "position", "kept"),
    [
        ("chat", "", "missing_end", 0, message()),
        ("chat", "hi", "missing_end", 2, message("hi")),
        ("chat", f"hi{EOS}more", "text_after_end", 2 + len(EOS), message("hi")),
        ("chat", f"hi{EOS}{EOS}", "text_after_end", 2 + len(EOS), message("hi")),
        ("chat", f"a</think>b{EOS}", "control_text", 1, message("ab")),
        ("chat", f"a<think>b{EOS}", "control_text", 1, message("ab")),
        ("chat", f"{BOS}b{EOS}", "control_text", 0, message("b")),
        ("chat", f"a｜DSML｜b{EOS}", "control_text", 1, message("ab")),
        ("thinking", "hmm", "missing_think_end", 3, message(reasoning="hmm")),
        ("thinking", f"hmm{EOS}", "missing_think_end", 3, message(reasoning="hmm")),
        ("thinking", f"hmm{CALLS}", "missing_think_end", 3, message("", "hmm", BOTH_CALLS)),
        ("thinking", f"<think>r</think>c{EOS}", "control_text", 0, message("c", "r")),
        ("thinking", f"r</think>a</think>b{EOS}", "control_text", 10, message("ab", "r")),
        ("chat", f"c{CALLS[1:]}", "misplaced_calls", 2, message("c\n", calls=BOTH_CALLS)),
        ("chat", f"{CALLS}!{EOS}", "text_after_calls", len(CALLS), message(calls=BOTH_CALLS)),
        ("chat", f"{CALLS}\n", "text_after_calls", len(CALLS), message(calls=BOTH_CALLS)),
        ("chat", f"{CALLS}{EOS}\n", "text_after_end", len(CALLS + EOS), message(calls=BOTH_CALLS)),
        ("chat", "\n\n<｜DSML｜function_calls", "unterminated_calls", 23, message()),
    ],
)
def test_what_is_not_in_the_format_is_a_problem_and_the_rest_is_kept(
    mode, text, kind, position, kept
):
    found, problems = parse_completion_tolerant(text, thinking_mode=mode)

    assert [(problem.kind, problem.position) for problem in problems] == [(kind, position)]
    assert found == kept
    with pytest.raises(EncodingError, match=f"at code point {position}"):
        parse_completion(text, thinking_mode=mode)


def test_an_unknown_mode_is_an_error_in_each_of_the_parsers():
    for parse in (parse_completion, parse_completion_tolerant):
        with pytest.raises(EncodingError, match="must be one of chat, thinking"):
            parse("", thinking_mode="think")
    with pytest.raises(EncodingError, match="must be one of chat, thinking"):
        StreamingParser("think")


def test_a_stream_says_what_is_certain_as_soon_as_it_is():
    parser = StreamingParser("thinking")

    assert parser.feed("so") == [ReasoningDelta("so")]
    assert parser.feed(" be it<") == [ReasoningDelta(" be it")]
    assert parser.feed("/think") == []
    assert parser.feed(">Yes\n") == [ContentDelta("Yes")]
    assert parser.feed("\n") == []
    assert parser.feed("no\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=") == [
        ContentDelta("\n\nno")
    ]
    assert parser.feed('"f">\n<｜DSML｜parameter') == [CallStart(0, "f")]
    assert parser.feed(' name="a" string="true">1"') == [
        ArgumentsDelta(0, '{"a": "'),
        ArgumentsDelta(0, '1\\"'),
    ]
    assert parser.feed("2</｜DSML｜") == [ArgumentsDelta(0, "2")]
    assert parser.feed("parameter>\n</｜DSML｜invoke>") == [
        ArgumentsDelta(0, '"'),
        ArgumentsDelta(0, "}"),
        CallEnd(0),
    ]
    assert parser.feed(f"\n</｜DSML｜function_calls>{EOS}") == []
    assert parser.message()["tool_calls"][0]["function"]["arguments"] == '{"a": "1\\"2"}'
    assert parser.finish() == [Finished("tool_calls")]


def test_a_stream_gives_out_what_it_held_back_when_it_ends():
    parser = StreamingParser("chat")
    assert parser.feed("a\n\n<｜DSML") == [ContentDelta("a")]
    held, problem, finished = parser.finish()
    assert held == ContentDelta("\n\n<｜DSML")
    assert isinstance(problem, Problem)
    assert parser.problems == [problem]
    assert finished == Finished("length")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a{EOS}", "stop"),
        ("a", "length"),
        (CALLS, "tool_calls"),
        (CALLS + EOS, "tool_calls"),
        (CALLS[:-2], "length"),
        (EMPTY_BLOCK, "stop"),
        (f"{CALLS[:-2]}{EOS}", "tool_calls"),
    ],
)
def test_the_finish_tells_a_cut_from_a_stop_and_from_calls(text, reason):
    parser = StreamingParser("chat")
    parser.feed(text)
    assert parser.finish()[-1] == Finished(reason)


def test_a_finished_stream_takes_no_more():
    parser = StreamingParser("chat")
    parser.finish()
    for more in (lambda: parser.feed("a"), parser.finish):
        with pytest.raises(ValueError, match="the completion is finished"):
            more()


OPENINGS = {
    "content": "",
    "block": "\n\n<｜DSML｜function_calls",
    "call": "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke",
    "parameter": '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter',
    "name": '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="',
    "value": CALLS[: CALLS.index("x ")],
    "broken": "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke\n</｜DSML｜invok",
    "after": CALLS,
}
FILLINGS = [
    "<",
    "\n",
    "</",
    "<think>" + "<" * 93,
    "\n\n<｜DSML",
    "<｜DSML｜invoke" + "\n" * 86,
    ' name="',
    CALLS,
]
LONG = 500_000  # code points
# Linear work takes a tenth of this, type checks included; quadratic work takes minutes.
SECONDS = 3.0


@pytest.mark.parametrize("opening", OPENINGS)
def test_the_work_on_a_whole_text_is_linear(opening):
    for filling in FILLINGS:
        text = OPENINGS[opening] + filling * (LONG // len(filling))
        start = time.process_time()
        parse_completion_tolerant(text, thinking_mode="chat")
        assert time.process_time() - start < SECONDS, filling


@pytest.mark.parametrize("opening", OPENINGS)
def test_the_work_on_a_stream_is_linear(opening):
    text = OPENINGS[opening] + "\n\n<｜DSML" * (LONG // 8)
    parser = StreamingParser("chat")
    start = time.process_time()
    for i in range(0, LONG, 100):
        parser.feed(text[i : i + 100])
    assert time.process_time() - start < SECONDS


def test_messages_of_problems_spell_no_control_token():
    block = "\n\n<｜DSML｜function_calls>\n"
    junk = f"<｜User｜><think>{EOS}<｜Assistant｜></think>{BOS}｜DSML｜"
    for text in (
        f"{junk}",
        f"{block}<｜DSML｜invoke name={junk}<｜DSML｜parameter",
        f'{block}{junk.replace(EOS, "")}<｜DSML｜invoke name="f">\n<｜DSML｜parameter{junk}/｜DSML｜parameter',
    ):
        _, problems = parse_completion_tolerant(text, thinking_mode="thinking")
        assert problems
        for problem in problems:
            assert not [token for token in TOKENS if token in problem.message]


def test_arguments_are_json_whenever_their_values_are():
    [first, second] = parse_completion(CALLS, thinking_mode="chat")["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"a": 'x "y"\n', "b": [1, {"k": None}]}
    assert json.loads(second["function"]["arguments"]) == {}
