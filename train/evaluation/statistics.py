"""What attempts at tasks say of a policy, with 95% intervals: pass@k, means, and ratings of several policies.

Tasks are the independent draws, attempts at one task are not. So intervals resample tasks, each with all its attempts
(percentile bootstrap, a fixed seed). Where every task has the same value a bootstrap would claim certainty; there, and
where each task has one attempt that is right or wrong, the interval is Clopper and Pearson's, exact for such tasks and
wide enough for any values in [0, 1].
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
ELO_SCALE = 400.0  # a difference at which the odds are 10 to 1
ELO_MEAN = 1000.0
PRIOR_TIES = 1.0  # between each two policies, so that one that wins every task has a finite rating
STEPS = 10_000


class Estimate(NamedTuple):
    """A figure and its interval.

    Attributes:
        value: The figure.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased chance that at least one of k attempts at a task is right.

    1 - C(n - right, k) / C(n, k): the share of the sets of k of the n attempts made that hold a right one.

    Source: Chen et al., Evaluating Large Language Models Trained on Code, 2021.

    Args:
        n: Attempts made.
        right: Of them.
        k: Of the sets, at most n.

    Returns:
        In [0, 1].
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right attempts of {n} is not defined")
    wrong = n - right
    # A product of ratios: binomial coefficients of hundreds of attempts overflow.
    none = np.prod((wrong - np.arange(k)) / (n - np.arange(k))) if wrong >= k else 0.0
    return float(1.0 - none)


def clopper_pearson(right: float, n: int) -> tuple[float, float]:
    """Return the exact interval of a share.

    Args:
        right: How many; may be a sum of values in [0, 1] that are all 0 or all 1.
        n: Of how many.

    Returns:
        (low, high).
    """
    tail = (1 - LEVEL) / 2
    low = 0.0 if right == 0 else float(stats.beta.ppf(tail, right, n - right + 1))
    high = 1.0 if right == n else float(stats.beta.ppf(1 - tail, right + 1, n - right))
    return low, high


def share(values: Sequence[float]) -> Estimate:
    """Return the mean over tasks of values in [0, 1].

    Args:
        values: One a task, at least one.

    Returns:
        The mean; its interval as the module says.
    """
    array = np.asarray(values, np.float64)
    if array.min() < 0 or array.max() > 1:
        raise ValueError(f"values in [{array.min()}, {array.max()}] are no shares")
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        return Estimate(mean, *clopper_pearson(float(array.sum()), len(array)))
    if array.min() == array.max():
        return Estimate(mean, 0.0, 1.0)  # equal, but neither right nor wrong: nothing to go by
    return mean_of(values)


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over tasks of any values, with its bootstrap interval.

    Args:
        values: One a task, at least one.

    Returns:
        The mean.
    """
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(SEED).integers(len(array), size=(RESAMPLES, len(array)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(array[drawn].mean(axis=1), (tail, 1 - tail))
    return Estimate(float(array.mean()), float(low), float(high))


def wins(scores: Sequence[Sequence[Sequence[float]]]) -> Float[np.ndarray, "N P P"]:
    """Count what each policy wins of each other, task by task.

    Two policies' attempts at a task are compared each with each: the higher score wins, equal ones are half a win.

    Args:
        scores: Of each task, each policy's attempts.

    Returns:
        [N, P, P], the share of the comparisons at a task that the first policy wins of the second; they add up to 1.
    """
    n_policies = len(scores[0])
    found = np.zeros((len(scores), n_policies, n_policies))
    for t, attempts in enumerate(scores):
        for i in range(n_policies):
            for j in range(n_policies):
                if i != j:
                    a, b = np.asarray(attempts[i])[:, None], np.asarray(attempts[j])[None, :]
                    found[t, i, j] = np.mean((a > b) + 0.5 * (a == b))
    return found


def ratings(wins_NPP: Float[np.ndarray, "N P P"]) -> list[Estimate]:
    """Rate policies on Elo's scale by the Bradley-Terry model.

    The chance that a policy wins a task of another is 1 / (1 + 10^(-difference / 400)). Most likely ratings, with one
    tie between each two policies added, mean 1000; they compare the policies given, on these tasks, and nothing else.

    Args:
        wins_NPP: Of `wins`.

    Returns:
        A rating of each policy, with the bootstrap interval over tasks.
    """
    n_tasks = len(wins_NPP)
    drawn = np.random.default_rng(SEED).integers(n_tasks, size=(RESAMPLES // 10, n_tasks))
    each = np.stack([_bradley_terry(wins_NPP[tasks].sum(axis=0)) for tasks in drawn])
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(each, (tail, 1 - tail), axis=0)
    values = _bradley_terry(wins_NPP.sum(axis=0))
    return [Estimate(*map(float, one)) for one in zip(values, low, high, strict=True)]


def _bradley_terry(wins_PP: Float[np.ndarray, "P P"]) -> Float[np.ndarray, " P"]:
    """Return the ratings of most likelihood, by Zermelo's iteration."""
    total = wins_PP + PRIOR_TIES / 2 * (1 - np.eye(len(wins_PP)))
    games = total + total.T
    strength = np.ones(len(total))
    for _ in range(STEPS):
        after = total.sum(axis=1) / (games / (strength[:, None] + strength[None, :])).sum(axis=1)
        after /= np.exp(np.log(after).mean())
        if np.abs(np.log(after / strength)).max() < 1e-10:
            break
        strength = after
    elo = ELO_SCALE * np.log10(strength)
    return elo - elo.mean() + ELO_MEAN
