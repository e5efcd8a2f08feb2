import json
from collections import Counter

import pytest

from dsv32_jax.errors import UsageError
from train.rl.problems import Family
from train.rl.task_source import TaskConfig, TaskFile, TaskSource

TINY = Family(name="chain_sum", settings=(("max_terms", 2), ("max_digits", 1)))  # few questions


@pytest.fixture
def write(tmp_path):
    def write(name, questions):
        path = tmp_path / name
        line = {"answer": "4", "verifier": "exact"}
        path.write_text("\n".join(json.dumps({"question": q, **line}) for q in questions))
        return TaskFile(path=str(path))

    return write


def names(source, n, start=0):
    return [source[i].name for i in range(start, start + n)]


def test_the_same_seed_and_index_give_the_same_task():
    cfg = TaskConfig(families=(TINY, Family(name="countdown")), seed=3, held_out=4)

    assert [TaskSource(cfg)[i] for i in range(20)] == [TaskSource(cfg)[i] for i in range(20)]


def test_another_seed_gives_other_tasks_and_the_same_held_out():
    first, second = (
        TaskSource(TaskConfig(families=(Family(name="countdown"),), seed=s)) for s in (0, 1)
    )

    assert {first[i].question for i in range(9)}.isdisjoint(second[i].question for i in range(9))
    assert first.held_out == second.held_out


def test_training_never_asks_what_is_held_out():
    source = TaskSource(TaskConfig(families=(TINY,), held_out=60))
    held_out = {task.question for task in source.held_out}

    assert len(held_out) == 60
    assert held_out.isdisjoint(source[i].question for i in range(300))


def test_a_file_does_not_ask_what_a_family_holds_out(write):
    question = TaskSource(TaskConfig(families=(TINY,))).held_out[0].question
    file = write("a.jsonl", [question, "other"])
    source = TaskSource(TaskConfig(families=(TINY,), files=(file,), held_out_fraction=0.0))

    assert question not in {source[i].question for i in range(50)}


def test_copies_of_a_question_fall_on_one_side(write):
    questions = [f"q{i}" for i in range(200)]
    files = write("a.jsonl", questions), write("b.jsonl", questions[::-1])
    source = TaskSource(TaskConfig(files=files, held_out_fraction=0.25))
    held_out = Counter(task.question for task in source.held_out)

    assert 30 < len(held_out) < 70
    assert set(held_out.values()) == {2}
    assert held_out.keys().isdisjoint(source[i].question for i in range(600))


def test_an_epoch_of_a_file_has_each_task_once_in_its_own_order(write):
    source = TaskSource(TaskConfig(files=(write("a.jsonl", "abcdefgh"),), held_out_fraction=0.0))
    epochs = [names(source, 8, start) for start in (0, 8, 16)]

    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_sources_have_their_shares(write):
    file = TaskFile(path=write("a.jsonl", "abcdefgh").path, weight=3.0)
    source = TaskSource(TaskConfig(families=(TINY,), files=(file,), held_out_fraction=0.0))
    domains = Counter(source[i].domain for i in range(400))

    assert domains == {"a": 300, "arithmetic": 100}


def test_a_family_that_is_all_held_out_is_named():
    source = TaskSource(TaskConfig(families=(TINY,), held_out=600))

    with pytest.raises(UsageError, match="chain_sum has hardly a problem beside those held out"):
        names(source, 100)


def test_a_file_that_is_all_held_out_is_named(write):
    with pytest.raises(UsageError, match="all of its 1 tasks are held out"):
        TaskSource(TaskConfig(files=(write("a.jsonl", ["a"]),), held_out_fraction=0.9999))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "leave nothing to ask"),
        ({"families": (TINY,), "held_out": -1}, "held_out=-1"),
        ({"families": (TINY,), "held_out_fraction": 1.0}, "held_out_fraction=1.0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TaskConfig(**changes)


def test_a_file_is_read_off_a_command_line():
    assert TaskFile.from_text("a@b.jsonl@2") == TaskFile(path="a@b.jsonl", weight=2.0)
    assert TaskFile.from_text("a@b.jsonl") == TaskFile(path="a@b.jsonl")
