import json
import time

import numpy as np
import pytest

from dsv32_jax import encoding
from dsv32_jax.encoding import markup
from dsv32_jax.errors import UsageError
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.tokenizer import ByteTokenizer
from tests.train.agents.shop import Scripted, Shop
from train.agents import schemas, trajectory
from train.agents.attempt import Job, Limits
from train.agents.context import ContextConfig
from train.agents.forms import CompactForm, OfficialForm
from train.agents.loop import Loop, play_all

BYTES = ByteTokenizer()
COMPACT = CompactForm(tokenizer=BYTES)
LIMITS = Limits()


def say(*turns):
    """Return a script of turns by the number of those that were drawn before."""

    def script(prompt):
        said = prompt.count(BYTES.eos_id)
        return [*BYTES.encode(turns[min(said, len(turns) - 1)]), BYTES.eos_id]

    return script


def play(*turns, form=COMPACT, limits=LIMITS, n=1, user=None, context=None, **engine):
    shop = Shop()
    task = next(shop.tasks("train"))
    script = turns[0] if callable(turns[0]) else say(*turns)
    scripted = Scripted(script, **engine)
    loop = Loop(scripted, form, limits=limits, context=context)
    found = play_all(loop, [Job(shop, task, user=user)] * n)
    assert shop.opened == shop.closed == n
    return (*found, scripted)


def results(found):
    return [(call.name, call.outcome, call.result) for call in found.calls]


def text_of(tokens):
    return encoding.decode_text(tokens, BYTES)


def test_an_episode_calls_reads_and_answers():
    found, _ = play("#look\n!price pear", ">3")
    assert (found.end, found.answer, found.steps, found.grade.score) == ("answer", "3", 2, 1.0)
    assert results(found) == [("price", "ok", "3")]
    assert [message["role"] for message in found.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.messages[1]["reasoning_content"] == "look"
    assert found.tokens == len("#look\n!price pear") + 1 + len(">3") + 1


@pytest.mark.parametrize("form", [COMPACT, OfficialForm(tokenizer=BYTES)])
def test_exactly_the_sampled_tokens_are_trainable(form):
    official = isinstance(form, OfficialForm)
    call = {"function": {"name": "price", "arguments": '{"item": "pear"}'}}
    written = encoding.encode_messages(
        [
            {"role": "user", "content": ""},
            {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        ],
        thinking_mode="thinking",
    )
    first = written.partition("<think>")[2].removesuffix(markup.EOS) if official else "!price pear"
    last = "so</think>3" if official else ">3"
    found, _ = play(first, last, form=form)
    drawn = found.rollout
    assert found.answer == "3"
    assert text_of(drawn.drawn) == f"{first}{markup.EOS}{last}{markup.EOS}"
    assert len(drawn.log_p) == drawn.trainable.sum() == found.tokens
    between = text_of(drawn.tokens[drawn.n_prompt :][~drawn.trainable[drawn.n_prompt :]])
    assert "3" in between
    assert markup.EOS not in between
    # The whole is what the messages say, reasoning included: nothing was dropped within the turn.
    task = next(Shop().tasks("train"))
    with Shop().open(task) as episode:
        assert form.encode(found.messages, episode.tools).ids.tolist() == drawn.tokens.tolist()


def test_the_tokens_of_an_episode_only_grow():
    found, engine = play("!price pear", "!sell pear 2", ">3")
    assert len(engine.prompts) == 3
    for shorter, longer in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    assert found.rollout.starts == (0,)


def test_parallel_calls_are_answered_in_order():
    found, engine = play("!price pear\n!price plum\n!sell plum n=4", ">3")
    assert results(found) == [
        ("price", "ok", "3"),
        ("price", "ok", "5"),
        ("sell", "ok", "sold"),
    ]
    assert text_of(engine.prompts[1]).endswith("=3\n=5\n=sold\n")
    assert found.steps == 2


def test_faults_of_calls_are_answered_and_the_episode_goes_on():
    found, _ = play("!price fig", "!price", "!pirce x", "price pear", "!crash", ">3")
    assert [(call.step, call.outcome) for call in found.calls] == [
        (1, "error"), (2, "error"), (3, "unknown"), (4, "unreadable"), (5, "defect"),
    ]  # fmt: skip
    assert [call.result for call in found.calls] == [
        "error: there is no fig",
        "error: price: 'item' is a required property; it takes item",
        "error: there is no tool 'pirce'; there are price, sell, crash",
        "error: 'price pear' begins with none of # ! >",
        "error: crash failed: RuntimeError: out of paper",
    ]
    assert found.solved


def test_a_broken_call_beside_a_good_one_gets_a_result_of_its_own():
    found, engine = play("!price pear\nnonsense", ">3")
    assert [call.outcome for call in found.calls] == ["ok", "unreadable"]
    assert text_of(engine.prompts[1]).endswith("=3\n=error: 'nonsense' begins with none of # ! >\n")
    # The history can be written anew, with a call in the place of what could not be read.
    assert "!unreadable_call" in text_of(COMPACT.encode(found.messages, ()).ids)


@pytest.mark.parametrize(
    ("limits", "engine", "end"),
    [
        (Limits(steps=3), {}, "steps"),
        (Limits(tokens=30), {}, "tokens"),
        (Limits(row=110), {}, "tokens"),
        (Limits(), {"max_len": 120}, "context"),
        (Limits(seconds=1e-9), {}, "seconds"),
    ],
)
def test_every_limit_ends_an_episode_with_its_name(limits, engine, end):
    found, _ = play("!price pear", limits=limits, **engine)
    assert (found.end, found.answer, found.grade.score) == (end, "", 0.0)
    if end == "steps":
        assert found.steps == 3
    if end == "tokens":
        assert found.tokens <= limits.tokens
        assert limits.row is None or len(found.rollout.tokens) <= limits.row
    if end == "context":
        assert len(found.rollout.tokens) <= 120
    if end == "seconds":
        assert found.rollout is None


def test_a_turn_is_cancelled_when_the_time_is_over():
    def endless(prompt):
        time.sleep(0.2)
        return BYTES.encode("#" * 1000)

    found, _ = play(endless, limits=Limits(seconds=0.1))
    assert found.end == "seconds"
    assert found.tokens < 1000


def test_a_turn_that_is_cut_is_no_answer():
    found, _ = play(">3", limits=Limits(tokens=2))
    assert (found.end, found.answer, found.tokens) == ("tokens", "", 2)


def test_a_new_user_message_begins_a_context_without_the_reasoning():
    said = iter(["And now?", None])
    found, engine = play(
        "#think\n!price pear", ">3", "#again\n>3", user=lambda messages: next(said)
    )
    assert (found.end, found.steps, found.resets) == ("answer", 3, 1)
    assert "#think" in text_of(engine.prompts[1])
    assert "think" not in text_of(engine.prompts[2])
    assert "!price pear" in text_of(engine.prompts[2])
    drawn = found.rollout
    first, second = drawn.contexts
    assert text_of(drawn.tokens[first][drawn.trainable[first]]) == (
        f"#think\n!price pear{markup.EOS}>3{markup.EOS}"
    )
    assert text_of(drawn.tokens[second][drawn.trainable[second]]) == f"#again\n>3{markup.EOS}"
    assert drawn.tokens[first].tolist() == engine.prompts[1] + [*BYTES.encode(">3"), BYTES.eos_id]


def test_the_context_is_managed_at_its_share_of_the_window():
    turns = iter(["!price pear"] * 5 + [">3"])

    def script(prompt):
        return [*BYTES.encode(next(turns)), BYTES.eos_id]

    found, engine = play(
        script, max_len=120, context=ContextConfig(strategy="discard_all", share=0.8)
    )
    assert found.solved
    assert found.resets >= 1
    assert len(found.rollout.starts) == found.resets + 1
    first = engine.prompts[0]
    assert engine.prompts.count(first) == 1 + found.resets  # it goes back to the question
    over = [p for p in engine.prompts if len(p) > 0.8 * 120]
    assert over == []
    # What is dropped from the context stays in the record.
    assert [m["role"] for m in found.messages].count("tool") == 5
    assert text_of(found.rollout.drawn).count("!price pear") == 5


def test_a_summary_is_a_turn_of_its_own():
    def script(prompt):
        text = text_of(prompt)
        if text.endswith("Call no tool.\n"):
            said = ">pears cost 3"
        else:
            said = ">3" if "pears cost 3" in text else "!price pear"
        return [*BYTES.encode(said), BYTES.eos_id]

    found, engine = play(script, max_len=400, context=ContextConfig(strategy="summary", share=0.3))
    assert found.solved
    assert text_of(engine.prompts[-1]).endswith("\nWhat was found so far:\npears cost 3\n")
    assert found.steps == len(engine.prompts)
    assert len(found.rollout.starts) == 3


def test_episodes_are_independent_and_each_gets_its_place():
    shop = Shop()
    tasks = list(shop.tasks("train"))

    def script(prompt):
        text = text_of(prompt)
        item = "pear" if "pear" in text else "plum"
        said = f"!price {item}" if "=" not in text else ">" + text.rpartition("=")[2].strip()
        return [*BYTES.encode(said), BYTES.eos_id]

    for workers in (0, 2):
        loop = Loop(Scripted(script, n_slots=3), COMPACT, workers=workers)
        found = play_all(loop, [Job(shop, task) for task in tasks * 5])
        loop.close()
        assert [one.answer for one in found] == ["3", "5"] * 5
        assert all(one.solved for one in found)
    assert shop.opened == shop.closed == 20


def test_an_environment_that_can_not_be_opened_fails_its_episode_alone():
    class Closed(Shop):
        def open(self, task):
            raise OSError("no shop today")

    task = next(Shop().tasks("train"))
    loop = Loop(Scripted(say(">3")), COMPACT)
    bad, good = play_all(loop, [Job(Closed(), task), Job(Shop(), task)])
    assert (bad.end, bad.note, bad.grade) == ("failed", "no shop today", None)
    assert good.solved


def test_what_is_open_is_closed_when_nobody_wants_more():
    shop = Shop()
    task = next(shop.tasks("train"))
    loop = Loop(Scripted(say(">3")), COMPACT)
    playing = loop.play([Job(shop, task)] * 9)
    next(playing)
    playing.close()
    assert 0 < shop.opened == shop.closed < 9


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_open_is_closed_when_a_library_is_missing(monkeypatch, workers):
    def missing(*_, **__):
        raise UsageError("no jsonschema")

    monkeypatch.setattr(schemas, "check", missing)
    shop = Shop()
    loop = Loop(Scripted(say("!price pear")), COMPACT, workers=workers)
    with pytest.raises(UsageError, match="no jsonschema"):
        play_all(loop, [Job(shop, next(shop.tasks("train")))] * 2)
    assert shop.opened == shop.closed == 2


def test_a_trajectory_goes_to_json_and_back():
    found, _ = play("!price pear", "!what", ">3")
    text = json.dumps(trajectory.to_json(found))
    assert trajectory.from_json(json.loads(text)) == found
    with pytest.raises(ValueError, match="no trajectory"):
        trajectory.from_json({"task": "x"})


def test_rollouts_carry_how_they_were_drawn():
    shop = Shop()
    loop = Loop(Scripted(say(">3")), COMPACT)
    params = SamplingParams(temperature=0.7)
    (found,) = play_all(loop, [Job(shop, next(shop.tasks("train")), params)], version=5)
    assert (found.rollout.temperature, found.rollout.version) == (0.7, 5)
    np.testing.assert_array_equal(found.rollout.log_p, np.float32([-0.5, -0.5, -0.5]))
