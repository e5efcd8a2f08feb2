import dataclasses

import pytest

from train.agents import context
from train.agents.context import ContextConfig
from train.agents.trajectory import Trajectory


def rounds(n, first=0):
    return [
        message
        for i in range(first, first + n)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [i]},
            {"role": "tool", "content": f"{i}a"},
            {"role": "tool", "content": f"{i}b"},
        )
    ]


SYSTEM, ASK = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("strategy", "n", "left"),
    [
        ("discard_all", 4, 0),
        ("discard_75", 4, 1),
        ("discard_75", 10, 2),
        ("discard_75", 1, 0),
        ("discard_all", 0, 0),
    ],
)
def test_the_first_rounds_of_calls_go_with_their_results(strategy, n, left):
    messages = [SYSTEM, ASK, *rounds(n)]
    assert context.discard(messages, strategy) == [SYSTEM, ASK, *rounds(left, first=n - left)]


def test_what_stands_before_the_last_question_stays():
    before = [SYSTEM, ASK, *rounds(2), {"role": "assistant", "content": "a"}, ASK]
    assert context.discard([*before, *rounds(2)], "discard_all") == before


def test_a_summary_takes_the_place_of_the_history_and_of_the_last_summary():
    first = context.with_summary([SYSTEM, ASK, *rounds(2)], " found a ")
    assert [m["role"] for m in first] == ["system", "user"]
    assert first[1]["content"] == "q\n\nWhat was found so far:\nfound a"
    second = context.with_summary([*first, *rounds(1)], "found b")
    assert second[1]["content"] == "q\n\nWhat was found so far:\nfound b"
    assert context.ask_summary(first)[:-1] == first


def test_of_parallel_attempts_the_one_with_fewest_steps_counts_and_all_are_paid_for():
    one = Trajectory(
        task="t", environment="e", messages=(), calls=(), end="answer", answer="", steps=5,
        tokens=10, seconds=0.0,
    )  # fmt: skip
    attempts = [
        one,
        dataclasses.replace(one, steps=3, tokens=7),
        dataclasses.replace(one, steps=1, tokens=1, end="context"),
    ]
    assert context.fewest_steps(attempts) == (attempts[1], 9, 18)
    assert context.fewest_steps(attempts[2:]).chosen is attempts[2]


def test_a_share_beyond_the_window_is_refused():
    with pytest.raises(ValueError, match=r"share=1\.0"):
        ContextConfig(strategy="summary", share=1.0)
