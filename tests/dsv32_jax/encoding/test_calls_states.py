import pytest

from dsv32_jax.encoding import (
    CallEnd,
    CallStart,
    StreamingParser,
    parse_completion_tolerant,
)

EOS = "<｜end▁of▁sentence｜>"
OPEN, CLOSE = "\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"


def parameter(name, value="v", kind="true"):
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n'


def call(name, *parameters):
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters) or chr(10)}</｜DSML｜invoke>\n'


def read(*parts):
    text = OPEN + "".join(parts)
    message, problems = parse_completion_tolerant(text, thinking_mode="chat")
    calls = [tuple(c["function"].values()) for c in message["tool_calls"]]
    return calls, [problem.kind for problem in problems], problems


GOOD = call("good", parameter("a"))
GOOD_READ = ("good", '{"a": "v"}')


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ("<｜DSML｜invoke>\n\n</｜DSML｜invoke>\n", "bad_call"),
        ("<｜DSML｜invoke name='f'>\n\n</｜DSML｜invoke>\n", "bad_call"),
        ('<｜DSML｜invoke id="f">\n\n</｜DSML｜invoke>\n', "bad_call"),
        ('<｜DSML｜invoke name=">\n</｜DSML｜invoke>\n', "bad_call"),
        ('<｜DSML｜invoke name="f">\ntext' + parameter("a") + "</｜DSML｜invoke>\n", "bad_call"),
        (call("f", parameter("a") + "text\n"), "bad_call"),
        (call("f", parameter("a"), parameter("a")), "duplicate_parameter"),
        (call("f", parameter("a", kind="yes")), "bad_parameter"),
        (call("f", parameter("a").replace(' name="', " name='")), "bad_parameter"),
        (call("f", parameter("a").replace(' name="', '  name="')), "bad_parameter"),
        (call("f", parameter("a", "1/｜DSML｜parameter 2")), "bad_parameter"),
        (
            call("f", parameter("a").replace("</｜DSML｜parameter", "/｜DSML｜parameter")),
            "bad_parameter",
        ),
    ],
)
def test_a_broken_call_is_left_out_and_those_around_it_are_kept(broken, kind):
    calls, kinds, problems = read(GOOD, broken, GOOD, CLOSE, EOS)

    assert calls == [GOOD_READ, GOOD_READ]
    assert kinds == [kind]
    assert "call 2" in problems[0].message


@pytest.mark.parametrize(
    "shifted",
    [
        call("good", parameter("a")).replace('">\n', '">\n\n\n'),
        call("good", parameter("a") + "\n"),
        call("good", parameter("a").removesuffix("\n")),
        call("good", parameter("a")).removesuffix("\n"),
        call("good", parameter("a")) + "\n",
    ],
)
def test_a_call_whose_white_space_alone_is_wrong_is_kept_with_a_problem(shifted):
    calls, kinds, _ = read(shifted, GOOD, CLOSE, EOS)
    assert calls == [GOOD_READ, GOOD_READ]
    assert kinds == ["layout"]


def test_what_the_official_patterns_let_pass_passes():
    for lax in (
        GOOD.replace(' name="good', ' \n name="good'),
        GOOD.replace(' name="good', 'name="good'),
        GOOD.replace('good">\n', 'good">\n\n'),
        GOOD.replace("</｜DSML｜parameter", "<\n/｜DSML｜parameter"),
    ):
        assert read(lax, CLOSE)[:2] == ([GOOD_READ], [])


def test_text_between_calls_is_left_out_with_a_problem():
    calls, kinds, problems = read(GOOD, "and then\n", GOOD, CLOSE)
    assert calls == [GOOD_READ, GOOD_READ]
    assert kinds == ["unexpected_text"]
    assert "and then" in problems[0].message
    assert problems[0].position == len(OPEN + GOOD.removesuffix(">\n"))


def test_a_call_that_is_never_closed_is_left_out():
    for missing in ("</｜DSML｜invoke>\n", "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"):
        calls, kinds, problems = read(GOOD, GOOD.removesuffix(missing))
        assert calls == [GOOD_READ]
        assert kinds == ["unterminated_call"]
        assert problems[0].position == len(OPEN + GOOD)


def test_a_broken_call_without_its_end_does_not_take_the_next_one_with_it():
    broken = '<｜DSML｜invoke name="f"\n<｜DSML｜parameter name="a" string="true">v'
    calls, kinds, _ = read(broken, GOOD, CLOSE)
    assert calls == [GOOD_READ]
    assert kinds == ["bad_call"]


def test_a_broken_call_at_the_end_of_the_block_ends_with_it():
    calls, kinds, _ = read(GOOD, "<｜DSML｜invoke f>\n<｜DSML｜parameter", CLOSE, EOS)
    assert calls == [GOOD_READ]
    assert kinds == ["bad_call"]


def test_the_end_of_the_turn_inside_a_block_keeps_the_complete_calls():
    for rest, expected in (("", []), ("<｜DSML｜invoke f>\n<｜DSML｜parameter", ["bad_call"])):
        calls, kinds, problems = read(GOOD, rest, EOS)
        assert calls == [GOOD_READ]
        assert kinds == [*expected, "unterminated_calls"]
        assert problems[-1].position == len(OPEN + GOOD + rest)


def test_every_broken_call_is_reported():
    calls, kinds, problems = read(
        call("f", parameter("a", kind="no")),
        call("f", parameter("b"), parameter("b")),
        "<｜DSML｜invoke>\n\n</｜DSML｜invoke>\n",
        CLOSE,
    )
    assert calls == []
    assert kinds == ["bad_parameter", "duplicate_parameter", "bad_call"]
    assert [f"call {i}" in p.message for i, p in enumerate(problems, 1)] == [True] * 3


def test_a_value_ends_at_its_own_closing_tag_alone():
    value = f'a<\n</｜DSML｜invoke>\n{CLOSE}{EOS}<｜DSML｜parameter name="x" string="true"><'
    calls, kinds, _ = read(call("f", parameter("a", value)), CLOSE)
    assert kinds == []
    assert calls == [
        (
            "f",
            f'{{"a": "{value.replace(chr(34), chr(92) + chr(34)).replace(chr(10), chr(92) + "n")}"}}',
        )
    ]


def test_names_may_hold_quotes_and_brackets():
    name = 'a">\n">'
    calls, kinds, _ = read(
        call(name, parameter('b" string="maybe">', "1", "false")), call(name), CLOSE
    )
    assert kinds == []
    assert calls == [(name, '{"b\\" string=\\"maybe\\">": 1}'), (name, "{}")]


def test_a_stream_never_ends_a_broken_call_and_counts_it():
    parser = StreamingParser("chat")
    text = OPEN + call("f", parameter("a"), parameter("a")) + GOOD + CLOSE + EOS
    events = [*parser.feed(text), *parser.finish()]

    assert [e for e in events if isinstance(e, CallStart)] == [
        CallStart(0, "f"),
        CallStart(1, "good"),
    ]
    assert [e for e in events if isinstance(e, CallEnd)] == [CallEnd(1)]
