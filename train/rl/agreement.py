"""Whether the learner sees rollouts as the sampler did; a run whose log-probabilities differ does not start."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

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
        place: Which token of its response.
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
    rows = packing.plan_rows([len(r.tokens) for r in rollouts], row_length)
    for first in range(0, len(rows), n_rows):
        part = rows[first : first + n_rows]
        packed = packing.pack(rollouts, part, n_rows=n_rows, row_length=row_length)
        scores = score(params, packed)
        rerouted += float(scores.rerouted)
        log_p = np.asarray(scores.log_p)
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


def _token(rollouts: Sequence[Rollout], learner: list[np.ndarray], i: int, place: int) -> Token:
    drawn = rollouts[i]
    return Token(
        i, place, int(drawn.response[place]), float(drawn.log_p[place]), float(learner[i][place])
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
