import pytest

from dsv32_jax.errors import UsageError
from train.agents.environments.calling import caller, grade_answer, solve_and_grade
from train.agents.environments.search import Search
from train.agents.tools import ToolError


def test_solutions_pass_and_no_answer_does_not(first):
    environment = Search()
    tasks = first(environment, "train", 60) + first(environment, "held_out", 5)
    assert {task.difficulty for task in tasks} == {0, 1, 2}
    for task in tasks:
        answer, grade = solve_and_grade(environment, task)
        assert grade.score == 1
        assert answer not in task.prompt
        for wrong in ("", "0", task.data["hops"][0], f"{answer}x"):
            assert grade_answer(environment, task, wrong).score == 0


def test_an_answer_follows_from_one_chain_only(first):
    """Each thing has one document, and that says each of its facts once."""
    environment = Search()
    task = first(environment, "train", 1)[0]
    name, relation, *_ = task.data["hops"]
    with environment.open(task) as episode:
        call = caller(episode.tools)
        found = [hit for hit in call("search", query=name) if hit["title"] == name]
        text = call("open", document=found[0]["document"])["text"]

    assert len(found) == 1
    assert relation
    assert text.count(name) >= 3


def test_splits_share_no_question_and_processes_agree(first, in_another_process, in_this_process):
    environment = Search()
    train, held_out = (
        {task.prompt for task in first(environment, split, 150)} for split in ("train", "held_out")
    )

    assert not train & held_out
    assert in_another_process("search") == in_this_process(environment)


def test_ones_own_folder_is_searched(tmp_path, first):
    (tmp_path / "a").mkdir()
    for n in range(40):
        (tmp_path / "a" / f"{n}.txt").write_text(
            f"A first sentence without one. The bridge at {chr(65 + n % 26)}{n // 26}ton was built in"
            f" {1700 + n} by a smith.\n"
        )
    environment = Search(tmp_path)
    train, held_out = first(environment, "train", 99), first(environment, "held_out", 99)

    assert len(train) + len(held_out) == 40
    assert not {t.prompt for t in train} & {t.prompt for t in held_out}
    for task in (*train[:5], *held_out):
        assert task.data["answer"] not in task.prompt
        assert solve_and_grade(environment, task)[1].score == 1
        assert grade_answer(environment, task, "1600").score == 0


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no text files"):
        Search(tmp_path)


def test_documents_are_opened_in_parts_and_searched_for_phrases(tmp_path, first):
    (tmp_path / "long.txt").write_text(
        "It was the year 1788 when the long book began here. " + "Word " * 2000
    )
    environment = Search(tmp_path)
    tasks = first(environment, "train", 1) + first(environment, "held_out", 1)
    with environment.open(tasks[0]) as episode:
        call = caller(episode.tools)
        page = call("open", document=1)
        assert page["more"]
        assert call("open", document=1, start=4000)["text"] != page["text"]
        assert call("find", document=1, phrase="LONG BOOK") == [
            "It was the year 1788 when the long book began here."
        ]
        assert call("search", query='"AND (* nothing') == []
        for arguments in ({"document": 7}, {"document": 1, "start": -1}, {"document": 2**70}):
            with pytest.raises(ToolError):
                call("open", **arguments)
