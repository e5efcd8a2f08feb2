"""Cold-start data of agents: traces of solutions, what is kept of a policy's attempts, and the command."""

import contextlib
import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.encoding import markup
from train.agents import cold_start
from train.agents.cold_start import Prompted
from train.agents.environment import Grade
from train.agents.forms import CompactForm, OfficialForm
from train.data import examples
from train.evaluation import players

PLACE = f"{Path(__file__).parent / 'adding.py'}:make"
WORDS = tokenizers.ByteTokenizer()


@pytest.fixture
def adding():
    spec = importlib.util.spec_from_file_location("adding", PLACE.rpartition(":")[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


@pytest.fixture
def traced(adding):
    """Return a function of a kind: its environment, the first task and the solution's trajectory."""

    def trace(kind):
        environment = Prompted(adding, kind)
        task = next(environment.tasks("train"))
        return environment, task, cold_start.solve_as_trajectory(environment, task, seed=0)

    return trace


def text_of(entry, which):
    """Return the tokens that train, or the others, as text; | between stretches."""
    tokens, trained = np.array(entry["tokens"]), np.array(entry["trained"], bool)
    edges = np.flatnonzero(np.diff(trained.astype(int))) + 1
    parts = [
        WORDS.decode(part[part < 256].tolist())
        for part, mask in zip(np.split(tokens, edges), np.split(trained, edges), strict=True)
        if mask[0] == which
    ]
    return "|".join(parts)


def test_a_solution_becomes_a_trace_whose_own_words_alone_train(traced):
    environment, task, trajectory = traced("calls_in_thinking")
    entry = cold_start.example_of(trajectory, environment, task, CompactForm(tokenizer=WORDS))

    assert cold_start.why_not(trajectory, "calls_in_thinking") is None
    said = text_of(entry, True).split("|")
    assert len(said) == 2
    assert said[0].startswith("#")
    assert said[0].endswith("\n!add 0 30")
    assert said[1] == f"#{cold_start.LAST_THOUGHT}\n>30"
    assert "?0+30?\n" in text_of(entry, False)
    assert text_of(entry, False).endswith("|=30\n")


def test_without_thinking_there_are_calls_and_the_answer(traced):
    environment, task, trajectory = traced("calls")
    entry = cold_start.example_of(trajectory, environment, task, CompactForm(tokenizer=WORDS))

    assert text_of(entry, True) == "!add 0 30|>30"
    assert cold_start.PROMPTS["calls"] in text_of(entry, False)


def test_in_the_official_format_thinking_goes_on_between_calls(traced):
    environment, task, trajectory = traced("calls_in_thinking")
    form = OfficialForm(tokenizer=WORDS, thinking_mode="thinking")
    entry = cold_start.example_of(trajectory, environment, task, form)

    first, last = text_of(entry, True).split("|", 1)[0], text_of(entry, True)
    assert markup.THINK_END in first
    assert last.endswith(f"{cold_start.LAST_THOUGHT}{markup.THINK_END}30")


def test_the_line_is_an_example_of_fine_tuning(traced):
    environment, task, trajectory = traced("calls")
    entry = cold_start.example_of(trajectory, environment, task, CompactForm(tokenizer=WORDS))
    found = examples.parse_example(json.dumps(entry), "x:1", WORDS)

    assert found.tokens.tolist() == entry["tokens"]
    assert found.trained.tolist() == [bool(t) for t in entry["trained"]]


def say(trajectory, **changes):
    """Change what the policy said first."""
    messages = list(trajectory.messages)
    place = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    messages[place] = {**messages[place], **changes}
    return dataclasses.replace(trajectory, messages=tuple(messages))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("calls", lambda t: dataclasses.replace(t, grade=Grade(score=0.9)), "not solved"),
        ("calls", lambda t: dataclasses.replace(t, grade=None), "not solved"),
        ("calls", lambda t: dataclasses.replace(t, end="steps"), "no answer"),
        ("calls", lambda t: dataclasses.replace(t, resets=1), "context begun anew"),
        (
            "calls",
            lambda t: dataclasses.replace(
                t, calls=(dataclasses.replace(t.calls[0], outcome="unreadable"),)
            ),
            "unreadable call",
        ),
        ("calls", lambda t: say(t, reasoning_content="Hm."), "other kind"),
        ("calls", lambda t: dataclasses.replace(t, calls=()), "other kind"),
        ("calls_in_thinking", lambda t: say(t, reasoning_content=" "), "other kind"),
        ("calls_in_thinking", lambda t: dataclasses.replace(t, calls=t.calls * 21), "other kind"),
        ("reasoning", lambda t: t, "other kind"),
    ],
)
def test_what_is_no_example_of_its_kind_is_left_out(traced, kind, change, reason):
    _, _, trajectory = traced("calls" if kind == "calls" else "calls_in_thinking")

    assert cold_start.why_not(change(trajectory), kind) == reason


def test_reasoning_without_calls_is_an_example_of_reasoning(traced):
    _, _, trajectory = traced("calls_in_thinking")
    system, user, *_, last = trajectory.messages
    bare = dataclasses.replace(trajectory, messages=(system, user, last), calls=())

    assert cold_start.why_not(bare, "reasoning") is None


def test_the_command_writes_examples_of_both_kinds_and_says_how_many(tmp_path, capsys):
    out = tmp_path / "traces.jsonl"
    status = cold_start.main([str(out), PLACE, "--form", "compact", "--tasks", "5"])

    assert status == 0, capsys.readouterr().err
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == ["calls"] * 5 + ["calls_in_thinking"] * 5
    assert {entry["environment"] for entry in entries} == {"adding"}
    assert "10 examples of 10 trajectories" in capsys.readouterr().out


def test_examples_beyond_the_limit_are_left_out_and_counted(tmp_path, capsys):
    out = tmp_path / "traces.jsonl"
    args = [str(out), PLACE, "--form", "compact", "--tasks", "2"]
    lengths = {}
    assert cold_start.main(args) == 0
    for line in out.read_text().splitlines():
        entry = json.loads(line)
        lengths.setdefault(entry["kind"], []).append(len(entry["tokens"]))
    capsys.readouterr()

    assert cold_start.main([*args, "--max-tokens", str(max(lengths["calls"]))]) == 0
    assert min(lengths["calls_in_thinking"]) > max(lengths["calls"])
    assert f"2 examples of 4 trajectories in {out}: 2 calls, 2 more than" in capsys.readouterr().out
    assert cold_start.main([*args, "--max-tokens", "10"]) == 1
    assert "no trajectory is an example" in capsys.readouterr().err


@pytest.fixture
def scripted(monkeypatch):
    """Make the policy one that solves every second job as the environment does and else says 7; list its jobs."""
    played = []

    @contextlib.contextmanager
    def open_player(cfg, policy):
        def play(jobs):
            for place, job in enumerate(jobs):
                played.append(job.task.name)
                found = cold_start.solve_as_trajectory(job.environment, job.task, seed=0)
                if place % 2:
                    found = dataclasses.replace(found, grade=Grade(score=0.0), answer="7")
                yield place, found

        yield play

    monkeypatch.setattr(players, "open_player", open_player)
    return played


def test_of_a_policys_attempts_the_right_ones_become_examples_and_none_is_made_twice(
    tmp_path, capsys, scripted
):
    out = tmp_path / "traces.jsonl"
    args = [str(out), PLACE, "--form", "compact", "--tasks", "3", "--samples", "2"]
    args += ["--policy", "somewhere", "--kind", "calls"]

    assert cold_start.main(args) == 0, capsys.readouterr().err
    assert len(scripted) == 6
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["task"] for entry in entries] == ["train-0", "train-1", "train-2"]
    assert all(text_of(entry, True).startswith("!add") for entry in entries)
    assert "3 examples of 6 trajectories" in capsys.readouterr().out

    out.unlink()
    assert cold_start.main(args) == 0
    assert len(scripted) == 6
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([PLACE, "--kind", "reasoning"], "kind reasoning needs --policy"),
        ([PLACE.replace(":make", ":nothing")], "returned a int, no environment"),
        ([PLACE.replace(":make", ":none")], "has no function 'none'"),
        (["adding"], "there is no environment 'adding'"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, capsys, words, message):
    assert cold_start.main([str(tmp_path / "o.jsonl"), *words, "--form", "compact"]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
