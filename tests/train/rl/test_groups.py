import numpy as np
import pytest

from train.rl import groups
from train.rl.objective import ObjectiveConfig
from train.rl.rollout import Rollout

CFG = ObjectiveConfig(kl_strength=0.5, off_policy_delta=None)


def make(n_drawn):
    tokens = np.arange(2 + n_drawn, dtype=np.int32)
    log_p = np.zeros(n_drawn, np.float32)
    return Rollout(tokens, 2, log_p, None, None, 1.0, "stop", 0)


def test_responses_without_a_reward_or_a_token_are_left_out():
    drawn = [make(3), make(0), make(1), make(2)]

    found = groups.make_group("maths", drawn, [1.0, 1.0, None, 0.0])

    assert found.rollouts == (drawn[0], drawn[3])
    assert found.rewards == (1.0, 0.0)


@pytest.mark.parametrize("rewards", [[None, None], [1.0, None], []])
def test_less_than_two_rewards_are_no_group(rewards):
    assert groups.make_group("maths", [make(1)] * len(rewards), rewards) is None


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="is no number; one that is missing must be None"):
        groups.make_group("maths", [make(1), make(1)], [1.0, reward])


def test_equal_rewards_are_degenerate():
    rollouts = [make(1)] * 3
    assert groups.make_group("a", rollouts, [0.3] * 3).is_degenerate
    assert not groups.make_group("a", rollouts, [0.3, 0.3, 0.4]).is_degenerate


def test_groups_of_different_size_count_the_same_and_domains_have_their_own_kl():
    some = [
        groups.make_group("maths", [make(1), make(4), make(2)], [1.0, 0.0, 0.5]),
        groups.make_group("writing", [make(3), make(3)], [2.0, 4.0]),
    ]

    found = groups.make_lessons(some, CFG, {"writing": 0.1, "other": 9.0}, max_tokens=8)

    assert found.rollouts == some[0].rollouts + some[1].rollouts
    np.testing.assert_allclose(found.advantages, [0.5, -0.5, 0, -1, 1], atol=1e-6)
    np.testing.assert_allclose(found.weight, [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(found.kl_strength, [0.5, 0.5, 0.5, 0.1, 0.1])


@pytest.mark.parametrize(
    ("n_groups", "n", "sizes"), [(8, 4, [2] * 4), (5, 2, [2, 3]), (2, 4, [1, 1])]
)
def test_minibatches_hold_every_group_once_in_order(n_groups, n, sizes):
    some = [groups.make_group(str(i), [make(1)] * 2, [0.0, 1.0]) for i in range(n_groups)]

    found = groups.split_minibatches(some, n)

    assert [len(part) for part in found] == sizes
    assert [g.domain for part in found for g in part] == [str(i) for i in range(n_groups)]
