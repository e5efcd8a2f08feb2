"""Solved tasks as text, or as examples whose answers alone train."""

import dataclasses
import json
import re

import numpy as np
import pytest

from configs import grpo as default
from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.errors import UsageError
from train import config_file
from train.data import corpus, examples
from train.rl import answer, cold_start, questions
from train.rl.agent_tasks import AgentSource
from train.rl.problems import Family
from train.rl.task_source import TaskConfig, TaskFile, TaskSource


@pytest.fixture(scope="module")
def source():
    return TaskSource(TaskConfig(families=(Family(name="spell_backward"),), held_out=4))


def write(source, path, **changes):
    settings = {
        "n": 5,
        "style": "plain",
        "instruction": "",
        "masked": True,
        "show": lambda text: None,
    }
    cold_start.write_examples(source, path, **(settings | changes))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_masked_examples_train_the_answer_and_the_end_of_the_turn(source, tmp_path):
    for i, entry in enumerate(write(source, tmp_path / "a" / "e.jsonl")):
        task = source[cold_start.FIRST_EXAMPLE + i]
        found = examples.parse_example(json.dumps(entry), "x:1", tokenizers.ByteTokenizer())
        trained = found.tokens[found.trained].tolist()
        assert trained == [*task.answer.encode(), tokenizers.ByteTokenizer.eos_id]
        shown = found.tokens[~found.trained].tolist()
        assert shown == [tokenizers.ByteTokenizer.bos_id, *f"{task.question}\n".encode()]


def test_text_is_the_same_without_the_ends_that_the_corpus_adds(source, tmp_path):
    masked = write(source, tmp_path / "masked.jsonl")
    plain = write(source, tmp_path / "plain.jsonl", masked=False)

    for one, other in zip(masked, plain, strict=True):
        assert list(other) == ["text"]
        assert other["text"] in one["prompt"] + one["response"]
        assert len(one["prompt"] + one["response"]) > len(other["text"])


def test_a_file_that_is_there_stays(source, tmp_path):
    first = write(source, tmp_path / "e.jsonl", n=2)

    assert write(source, tmp_path / "e.jsonl", n=5) == first


def test_a_task_without_an_answer_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"q{i}", "rubric": "r"}) + "\n" for i in range(9))
    )
    source = TaskSource(TaskConfig(files=(TaskFile(path=str(path)),)))

    with pytest.raises(UsageError, match=r"task t:\d has no answer"):
        write(source, tmp_path / "e.jsonl")


@pytest.mark.parametrize("masked", [False, True])
def test_the_cold_start_of_reinforcement_learning_trains_as_it_says(masked):
    cfg = default.get_config()
    cold = dataclasses.replace(cfg.cold_start, masked=masked)

    run = dataclasses.replace(cfg, cold_start=cold).cold_start_run("e.jsonl")

    assert run.data.examples == masked


def test_a_share_of_the_examples_shows_the_steps_as_thinking(tmp_path):
    settings = (("min_terms", 2), ("max_terms", 3))
    sums = TaskSource(TaskConfig(families=(Family(name="chain_sum", settings=settings),)))
    shares = {}
    for worked in (0.0, 0.25, 1.0):
        entries = write(sums, tmp_path / f"{worked}", n=200, style="thinking", worked=worked)
        thoughts = [entry["response"].partition("</think>")[0] for entry in entries]
        shares[worked] = sum(map(bool, thoughts)) / len(thoughts)

    assert shares[0.0] == 0
    assert shares[1.0] == 1
    assert 0.15 < shares[0.25] < 0.35


def test_steps_need_a_format_with_thinking(source):
    with pytest.raises(ValueError, match="no place for thinking"):
        questions.solution_text(source[0], "plain", thinking="n o")
    with pytest.raises(ValueError, match="has several"):
        questions.solution_text(dataclasses.replace(source[0], answer="a\nb"), "lines")
    cfg = default.get_config()
    plain = dataclasses.replace(cfg.rewards, style="plain")
    with pytest.raises(ValueError, match=r"worked=0\.5 needs rewards\.style"):
        dataclasses.replace(
            cfg, rewards=plain, cold_start=dataclasses.replace(cfg.cold_start, worked=0.5)
        )


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("thinking", "n o</think>A<｜end▁of▁sentence｜>"),
        ("tags", "n o<answer>A</answer><｜end▁of▁sentence｜>"),
        ("lines", "n o\nA<｜end▁of▁sentence｜>"),
    ],
)
def test_a_solution_reads_back_as_its_thinking_and_answer(source, style, text):
    task = dataclasses.replace(source[0], answer="A")

    solution = questions.solution_text(task, style, thinking="n o")

    assert solution == text
    found = answer.read(solution, style, cut=False)
    assert (found.thinking, found.final, found.well_formed) == ("n o", "A", True)


@pytest.fixture
def traced(tmp_path):
    """Return a function that writes traces, masked or not, and returns the documents as ids and masks."""

    def trace(*, masked, n=3, worked=1.0):
        base = config_file.load_config("agent_tools")
        cold = dataclasses.replace(base.cold_start, examples=n, masked=masked, worked=worked)
        cfg = dataclasses.replace(base, cold_start=cold)
        name = cold_start.EXAMPLES_FILE if masked else cold_start.TRACES_FILE
        path = tmp_path / name
        source = AgentSource(cfg.agent, 7)
        cold_start.write_traces(cfg, source, path, show=lambda text: None)
        run = cfg.cold_start_run(str(path))
        (found,) = corpus.open_corpora(run.data)
        return found

    return trace


def test_masked_traces_are_the_same_tokens_and_train_the_policys_own(traced):
    masked, plain = traced(masked=True), traced(masked=False)

    words = tokenizers.ByteTokenizer()
    for i, length in enumerate(masked.lengths.tolist()):
        tokens = masked.tokens(i, 0, length)
        np.testing.assert_array_equal(tokens, plain.tokens(i, 0, length))
        trained = masked.trained_tokens(i, 0, length)
        said = words.decode(tokens[trained & (tokens < 256)].tolist())
        assert said.startswith("!")
        assert ">" in said
        assert "?" not in said
        assert tokens[np.flatnonzero(trained)[-1]] == words.eos_id
    assert len(masked.lengths) == len(plain.lengths) == 3


def test_a_share_of_the_traces_has_the_calls_and_the_others_the_answer_alone(traced):
    found = traced(masked=True, n=60, worked=0.4)

    words, called = tokenizers.ByteTokenizer(), 0
    for i, length in enumerate(found.lengths.tolist()):
        tokens, trained = found.tokens(i, 0, length), found.trained_tokens(i, 0, length)
        said = words.decode(tokens[trained & (tokens < 256)].tolist())
        assert re.fullmatch(r"(!\w+ [a-h])*>\d\d", said)
        called += said.startswith("!")
    assert 0.2 < called / 60 < 0.6


def test_a_cold_start_that_would_show_no_call_is_refused():
    base = config_file.load_config("agent_tools")
    with pytest.raises(ValueError, match="would show no call"):
        dataclasses.replace(base, cold_start=dataclasses.replace(base.cold_start, worked=0.0))
