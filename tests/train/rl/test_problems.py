import pickle

import pytest
import reasoning_gym.factory

from dsv32_jax.errors import UsageError
from train.rl import fence, verifiers
from train.rl.pool import LocalWorkers, Pool
from train.rl.problems import Family, draw_problem

SMALL = Family(name="chain_sum", settings=(("max_terms", 2), ("max_digits", 1)))


def test_a_key_stands_for_one_problem():
    first = draw_problem(SMALL, "train", 0, 5)

    assert draw_problem(SMALL, "train", 0, 5) == first
    assert pickle.loads(pickle.dumps(first)) == first
    assert (first.domain, first.verifier) == ("arithmetic", "reasoning_gym")


@pytest.mark.parametrize("other", [("train", 0, 6), ("train", 1, 5), ("heldout", 0, 5)])
def test_other_keys_stand_for_other_problems(other):
    wide = Family(name="chain_sum", settings=(("min_digits", 6), ("max_digits", 9)))

    assert draw_problem(wide, *other).question != draw_problem(wide, "train", 0, 5).question


def test_settings_reach_the_generator():
    problems = [draw_problem(SMALL, i) for i in range(20)]

    assert all(task.data["entry"]["metadata"]["num_terms"] == 2 for task in problems)


def test_a_family_is_read_off_a_command_line():
    assert Family.from_text("chain_sum") == Family(name="chain_sum")
    assert Family.from_text("chain_sum@2.5:max_terms=2:allow_negation=true") == Family(
        name="chain_sum", weight=2.5, settings=(("max_terms", 2), ("allow_negation", True))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain_sum@x", "weight 'x' must be a number"),
        ("chain_sum@0", "must be a positive"),
        ("a:b", "setting=value"),
    ],
)
def test_a_family_written_wrongly_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Family.from_text(text)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Family(name="chain_sums"), "no family 'chain_sums'; did you mean chain_sum"),
        (Family(name="chain_sum", settings=(("depth", 2),)), "does not take settings"),
        (Family(name="chain_sum", settings=(("min_terms", 0),)), "does not take settings"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_named(family, message):
    with pytest.raises(UsageError, match=message):
        draw_problem(family, 0)


def ready():
    """Prepare nothing."""


def score_two_of_each(names):
    families = [Family(name=name) for name in names]
    problems = [draw_problem(family, i) for family in families for i in range(2)]
    with fence.closed():
        return {task.name: verifiers.verify(task.answer, task) for task in problems if task.answer}


def test_every_family_makes_problems_whose_answers_are_right_behind_the_fence():
    names = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})  # which needs settings
    with Pool(1, LocalWorkers(timeout_s=300.0, memory_mib=4096, prepare=ready)) as pool:
        scores = pool.call(score_two_of_each, names)

    assert len(names) > 100
    assert len(scores) > 190
    assert [name for name, score in scores.items() if score != 1] == []
