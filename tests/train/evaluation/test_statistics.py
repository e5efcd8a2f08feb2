import itertools
import math

import numpy as np
import pytest

from train.evaluation import statistics


@pytest.mark.parametrize(
    ("n", "right", "k"), [(1, 0, 1), (4, 1, 1), (6, 2, 3), (6, 5, 2), (5, 5, 5)]
)
def test_pass_at_k_is_the_share_of_all_sets_of_k_attempts_with_a_right_one(n, right, k):
    sets = list(itertools.combinations([True] * right + [False] * (n - right), k))

    assert statistics.pass_at_k(n, right, k) == pytest.approx(np.mean([any(s) for s in sets]))


def test_pass_at_k_of_many_attempts_is_finite_and_exact():
    expected = 1 - math.comb(1990, 100) / math.comb(2000, 100)

    assert statistics.pass_at_k(2000, 10, 100) == pytest.approx(expected, rel=1e-9)


def test_pass_at_k_is_unbiased_where_the_plain_guess_is_not():
    p, n, k, rng = 0.3, 6, 4, np.random.default_rng(0)
    rights = rng.binomial(n, p, size=40_000)
    truth = 1 - (1 - p) ** k

    unbiased = np.mean([statistics.pass_at_k(n, int(r), k) for r in rights])
    plugged_in = np.mean(1 - (1 - rights / n) ** k)

    assert unbiased == pytest.approx(truth, abs=0.005)
    assert abs(plugged_in - truth) > 0.03


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, 1, 0), (4, 1, 5)])
def test_what_has_no_pass_at_k_is_refused(n, right, k):
    with pytest.raises(ValueError, match="is not defined"):
        statistics.pass_at_k(n, right, k)


def test_the_interval_of_right_and_wrong_tasks_is_the_exact_one():
    # Clopper and Pearson's 95% interval of 3 of 10, from their tables: 0.067 to 0.652.
    found = statistics.share([1.0] * 3 + [0.0] * 7)

    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((0.0667, 0.6525), abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_agreement_of_all_tasks_is_no_certainty(value):
    found = statistics.share([value] * 20)

    far = 1 - 0.025 ** (1 / 20)  # where 20 of 20 agree with a chance of 2.5%
    assert found.value == value
    assert (found.low, found.high) == pytest.approx((0, far) if value == 0 else (1 - far, 1))


def test_equal_shares_between_nothing_and_all_claim_nothing():
    assert statistics.share([0.5] * 8) == (0.5, 0.0, 1.0)


def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(300):
        found = statistics.share(list(rng.beta(2, 5, size=60)))
        covered += found.low <= 2 / 7 <= found.high

    assert 0.91 <= covered / 300 <= 0.98


def test_the_interval_of_a_mean_scales_as_the_spread_does():
    found = statistics.mean_of([10.0, 20.0, 30.0, 40.0] * 25)

    standard_error = np.std([10.0, 20.0, 30.0, 40.0]) / 10
    assert found.value == 25
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * standard_error, rel=0.1)


def test_wins_compare_each_attempt_with_each():
    found = statistics.wins([[[1.0, 0.0], [0.0]], [[0.5], [1.0]]])

    np.testing.assert_allclose(found[0], [[0, 0.75], [0.25, 0]])  # one win, one tie
    np.testing.assert_allclose(found[1], [[0, 0], [1, 0]])


def test_ratings_find_the_chances_that_the_wins_were_drawn_with():
    truth, rng = np.array([1150.0, 1000.0, 850.0]), np.random.default_rng(2)
    wins = np.zeros((4000, 3, 3))
    for i, j in itertools.combinations(range(3), 2):
        chance = 1 / (1 + 10 ** ((truth[j] - truth[i]) / 400))
        won = rng.random(4000) < chance
        wins[:, i, j], wins[:, j, i] = won, ~won

    found = statistics.ratings(wins)

    assert [one.value for one in found] == pytest.approx(truth, abs=12)
    assert all(one.low < one.value < one.high for one in found)


def test_two_policies_are_rated_by_the_odds_with_a_tie_added():
    wins = np.zeros((9, 2, 2))
    wins[:, 0, 1] = 1

    first, second = (one.value for one in statistics.ratings(wins))

    assert first - second == pytest.approx(400 * math.log10(9.5 / 0.5))
    assert first + second == pytest.approx(2000)
