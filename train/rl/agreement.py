"""Whether the learner sees rollouts as the sampler did; a run whose log-probabilities differ does not start."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsv32_jax import sharding
from dsv32_jax.errors import WorkFailedError
from dsv32_jax.parameters import Parameters
from train.rl import packing
from train.rl.packing import Packed
from train.rl.policy import Scores
from train.rl.rollout import Rollout


class Token(NamedTuple):
    """A token on which sampler and learner differ.

    Attributes:
        rollout: Which of the rollouts.
        place: Which of its drawn tokens.
        token: Its id.
        sampler: The sampler's log-probability.
        learner: The learner's.
    """

    rollout: int
    place: int
    token: int
    sampler: float
    learner: float


class Agreement(NamedTuple):
    """How sampler and learner compare.

    Attributes:
        tokens: Tokens compared.
        ratio_mean: Mean of the learner's probability over the sampler's; 1 where they agree.
        largest: Largest difference of log-probabilities, nats; infinite where one is no number.
        over: Tokens whose difference is above the tolerance.
        first: The first of them, or None.
        rerouted: Expert choices that the learner's gates would have made otherwise.
    """

    tokens: int
    ratio_mean: float
    largest: float
    over: int
    first: Token | None
    rerouted: int


class Selection(NamedTuple):
    """How the keys compare that sampler and learner selected.

    Attributes:
        sets: Sets compared: one a layer of each token that the sampler ran and that has more keys than a set holds; any
            other reads all its keys, whatever its indexer says.
        differ: Sets that are not equal.
        keys: Keys of the sampler's sets that the learner's lack.
        tokens: Tokens with a set that differs, in whatever layer.
        by_layer: Sets that differ, of each layer; after the first such layer inputs differ too.
    """

    sets: int
    differ: int
    keys: int
    tokens: int
    by_layer: tuple[int, ...]

    def describe(self) -> str:
        """Say it in a line."""
        if not self.sets:
            return "selection: no token has more keys than it may select, nothing to compare"
        line = f"selection: {self.differ} of {self.sets} sets differ, {self.keys} keys"
        if not self.differ:
            return line
        first = next(i for i, n in enumerate(self.by_layer) if n)
        return f"{line}, of {self.tokens} tokens, from layer {first} on"


def compare(
    score: Callable[[Parameters, Packed], Scores],
    params: Parameters,
    rollouts: Sequence[Rollout],
    *,
    n_rows: int,
    row_length: int,
    tolerance: float,
) -> Agreement:
    """Score rollouts with the weights that they were drawn with.

    Args:
        score: `policy.make_score(...)`.
        params: Those weights.
        rollouts: The rollouts.
        n_rows: Rows of a microbatch.
        row_length: Tokens of a row.
        tolerance: Nats by which log-probabilities may differ.

    Returns:
        The comparison.
    """
    learner = [np.zeros(0, np.float32)] * len(rollouts)
    rerouted = 0.0
    for packed in _microbatches(rollouts, n_rows, row_length):
        scores = score(params, packed)
        rerouted += float(scores.rerouted)
        log_p = sharding.to_host(scores.log_p)
        for b, s in np.argwhere(packed.rollout >= 0):
            learner[packed.rollout[b, s]] = log_p[b, s][packed.mask[b, s]]
    differences = [
        np.nan_to_num(np.abs(mine - r.log_p), nan=np.inf)
        for mine, r in zip(learner, rollouts, strict=True)
    ]
    far = [np.flatnonzero(d > tolerance) for d in differences]
    first_far = next(((i, int(places[0])) for i, places in enumerate(far) if len(places)), None)
    sampled = np.concatenate([r.log_p for r in rollouts])
    return Agreement(
        tokens=len(sampled),
        ratio_mean=float(np.mean(np.exp(np.concatenate(learner) - sampled))),
        largest=float(max(d.max(initial=0.0) for d in differences)),
        over=sum(map(len, far)),
        first=None if first_far is None else _token(rollouts, learner, *first_far),
        rerouted=int(rerouted),
    )


def compare_selection(
    score: Callable[[Parameters, Packed], Scores],
    params: Parameters,
    rollouts: Sequence[Rollout],
    *,
    n_rows: int,
    row_length: int,
) -> Selection:
    """Select keys with the weights that rollouts were drawn with, and compare them with the sampler's.

    Args:
        score: `policy.make_score(..., selection=True)`.
        params: Those weights.
        rollouts: The rollouts, with selections.
        n_rows: Rows of a microbatch.
        row_length: Tokens of a row.

    Returns:
        The comparison.
    """
    found = []
    for packed in _microbatches(rollouts, n_rows, row_length):
        selected = sharding.to_host(score(params, packed).selection)
        for b, row in enumerate(packed.rollout):
            first = 0
            for drawn in (rollouts[int(i)] for i in row if i >= 0):
                mine, theirs = selected[:, b, first : first + len(drawn.tokens)], drawn.selection
                assert theirs is not None, "the sampler was asked for selections"
                for context in drawn.contexts:
                    # The first tokens read all their keys, and the last was never run by the sampler.
                    compared = slice(context.start + mine.shape[-1], context.stop - 1)
                    found.append(_count_missing(theirs[:, compared], mine[:, compared]))
                first += len(drawn.tokens)
    missing_LT, differ_LT = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return Selection(
        sets=differ_LT.size,
        differ=int(differ_LT.sum()),
        keys=int(missing_LT.sum()),
        tokens=int(differ_LT.any(axis=0).sum()),
        by_layer=tuple(int(n) for n in differ_LT.sum(axis=1)),
    )


def _count_missing(theirs_LTK: np.ndarray, mine_LTK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of their keys are not mine [L, T], and whether the sets differ."""
    differ = np.any(theirs_LTK != mine_LTK, axis=-1)  # lists in order: equal sets are equal lists
    missing = np.zeros(differ.shape, np.int64)
    for place in np.argwhere(differ):
        at = tuple(place)
        missing[at] = np.setdiff1d(theirs_LTK[at], [*mine_LTK[at], -1]).size
    return missing, differ


def _microbatches(rollouts: Sequence[Rollout], n_rows: int, row_length: int) -> Iterator[Packed]:
    """Pack rollouts as the learner would."""
    rows = packing.plan_rows([len(r.tokens) for r in rollouts], row_length)
    for first in range(0, len(rows), n_rows):
        part = rows[first : first + n_rows]
        yield packing.pack(rollouts, part, n_rows=n_rows, row_length=row_length)


def _token(rollouts: Sequence[Rollout], learner: list[np.ndarray], i: int, place: int) -> Token:
    drawn = rollouts[i]
    return Token(
        i, place, int(drawn.drawn[place]), float(drawn.log_p[place]), float(learner[i][place])
    )


def require_agreement(found: Agreement, *, tolerance: float, share: float) -> None:
    """Stop a run whose sampler and learner are not the same policy.

    Args:
        found: The comparison.
        tolerance: As it was made with, for the message.
        share: Of the tokens, that may differ by more: a key at the edge of a selection, or an expert, may flip by
            rounding.

    Raises:
        WorkFailedError: If more of them do, naming the first.
    """
    if found.first is None or found.over <= share * found.tokens:
        return
    where = found.first
    raise WorkFailedError(
        f"sampler and learner disagree on {found.over} of {found.tokens} tokens by more than {tolerance} nats"
        f" (mean ratio {found.ratio_mean:.4f}); the first is token {where.place} of response {where.rollout}, id"
        f" {where.token}: log-probability {where.sampler:.4f} in the sampler, {where.learner:.4f} in the learner"
    )
