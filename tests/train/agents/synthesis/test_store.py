import pytest

from dsv32_jax.errors import UsageError
from train.agents.environments.calling import caller, grade_answer, solve_and_grade
from train.agents.environments.synthetic import Synthetic
from train.agents.synthesis import small
from train.agents.synthesis.procedural import make_world
from train.agents.synthesis.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    with Store(path, create=True) as store:
        for number in range(40):
            store.add(number, small.make_world(0, number, 4))
        store.add(40, make_world(0, 0, 5), frozenset({"library"}))
    return path


def names(environment, split, seed=0):
    return [task.name for task in environment.tasks(split, seed)]


def test_the_folder_is_an_environment(folder):
    environment = Synthetic(folder)
    for split in ("train", "held_out"):
        for task in list(environment.tasks(split))[:40]:
            assert solve_and_grade(environment, task)[1].score == 1
            assert grade_answer(environment, task, "").score == 0


def test_splits_are_disjoint_and_kinds_of_held_out_tasks_are_told_apart(folder):
    train = set(names(Synthetic(folder), "train"))
    both = set(names(Synthetic(folder), "held_out"))
    tasks = set(names(Synthetic(folder, "tasks"), "held_out"))
    tools = set(names(Synthetic(folder, "tools"), "held_out"))

    assert len(train) + len(both) == 40 * 4 + 5
    assert not train & both
    assert not tasks & tools
    assert tasks | tools == both
    assert tasks
    assert len([name for name in tools if name.startswith("library")]) == 5
    world = {name.rpartition("-")[0] for name in train}
    assert not world & {name.rpartition("-")[0] for name in tools}
    assert {name.rpartition("-")[0] for name in tasks} <= world
    assert set(names(Synthetic(folder, "tools"), "train")) == train


def test_training_tasks_are_shuffled_by_the_seed(folder):
    environment = Synthetic(folder)

    assert names(environment, "train", 1) == names(environment, "train", 1)
    assert names(environment, "train", 1) != names(environment, "train", 2)
    assert names(environment, "held_out", 1) == names(environment, "held_out", 2)


def test_attempts_do_not_see_each_others_changes(folder):
    environment = Synthetic(folder)
    task = next(t for t in environment.tasks("train") if t.prompt.startswith("make"))
    with environment.open(task) as one, environment.open(task) as other:
        environment.solve(task, caller(one.tools))
        assert one.grade("ok").score == 1
        assert other.grade("ok").score == 0


def test_what_a_policy_always_or_never_solves_is_left_out(tmp_path):
    with Store(tmp_path, create=True) as store:
        store.add(0, small.make_world(0, 0, 4))
        all_names = store.untried()
        for name, passed in zip(all_names, (0, 8, 3, 1), strict=True):
            store.set_rate(name, 8, passed)
        assert store.untried() == []
    environment = Synthetic(tmp_path)

    assert sorted(names(environment, "train") + names(environment, "held_out")) == all_names[2:]


def test_a_world_like_another_is_not_kept_twice(tmp_path):
    with Store(tmp_path, create=True) as store:
        assert store.add(0, small.make_world(0, 0, 4)) == 4
        assert store.add(1, small.make_world(0, 0, 4)) == 0
        assert store.unfinished(3) == [2]
        assert store.count("SELECT reason, count FROM rejected WHERE number = 1")[-1] == (
            "world seen before",
            4,
        )


def test_a_folder_of_another_author_is_not_mixed_up(tmp_path):
    with Store(tmp_path, create=True) as store:
        store.claim({"author": "small"})
        store.claim({"author": "small"})
        with pytest.raises(UsageError, match='was begun with author="small", not "procedural"'):
            store.claim({"author": "procedural"})
