"""Groups of responses to one prompt: which of them teach something, and what the learner is told of each."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from train.rl import objective
from train.rl.objective import ObjectiveConfig
from train.rl.rollout import Rollout


class Group(NamedTuple):
    """The responses to one prompt that have a reward.

    Attributes:
        domain: Of the task.
        rollouts: The responses.
        rewards: One each, finite.
    """

    domain: str
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]

    @property
    def is_degenerate(self) -> bool:
        """Whether its rewards are all equal, so that nothing can be learned from it."""
        return min(self.rewards) == max(self.rewards)


class Lessons(NamedTuple):
    """Rollouts with what the learner is told of each.

    Attributes:
        rollouts: Rollouts.
        advantages: float32 [N].
        weight: float32 [N], see `objective.response_weights`.
        kl_strength: float32 [N], by domain.
    """

    rollouts: tuple[Rollout, ...]
    advantages: Float[np.ndarray, " N"]
    weight: Float[np.ndarray, " N"]
    kl_strength: Float[np.ndarray, " N"]


def make_group(
    domain: str, rollouts: Sequence[Rollout], rewards: Sequence[float | None]
) -> Group | None:
    """Keep the responses that have a reward and at least one token.

    Args:
        domain: Of the task.
        rollouts: The responses to one prompt.
        rewards: Their rewards; None where there is none.

    Returns:
        The group, or None where fewer than two are left to be compared.

    Raises:
        ValueError: If a reward is not finite.
    """
    wrong = [r for r in rewards if r is not None and not np.isfinite(r)]
    if wrong:
        raise ValueError(f"a reward of {wrong[0]} is no number; one that is missing must be None")
    kept = [
        (rollout, float(reward))
        for rollout, reward in zip(rollouts, rewards, strict=True)
        if reward is not None and rollout.n_drawn
    ]
    if len(kept) < 2:
        return None
    return Group(domain, tuple(r for r, _ in kept), tuple(reward for _, reward in kept))


def make_lessons(
    groups: Sequence[Group],
    cfg: ObjectiveConfig,
    kl_strength: Mapping[str, float],
    *,
    max_tokens: int,
) -> Lessons:
    """Compute advantages and weights of a batch of groups.

    Args:
        groups: At least one.
        cfg: What is maximised.
        kl_strength: Of the domains that have one of their own.
        max_tokens: Longest response allowed.

    Returns:
        The rollouts of all groups in order.
    """
    size = max(len(group.rollouts) for group in groups)
    lengths = np.zeros((len(groups), size), np.float32)
    for row, group in zip(lengths, groups, strict=True):
        row[: len(group.rollouts)] = [r.n_drawn for r in group.rollouts]
    weights = np.asarray(
        objective.response_weights(jnp.asarray(lengths), cfg.reduction, max_tokens=max_tokens)
    )
    advantages = [
        np.asarray(
            objective.advantages(
                jnp.asarray(group.rewards, jnp.float32), baseline=cfg.baseline, scale=cfg.scale
            )
        )
        for group in groups
    ]
    strengths = [
        kl_strength.get(group.domain, cfg.kl_strength) for group in groups for _ in group.rollouts
    ]
    return Lessons(
        tuple(r for group in groups for r in group.rollouts),
        np.concatenate(advantages),
        weights[lengths > 0],
        np.asarray(strengths, np.float32),
    )


def split_minibatches(groups: Sequence[Group], n: int) -> list[list[Group]]:
    """Deal groups out to n minibatches of nearly equal size, in order; empty ones are left out.

    Args:
        groups: The groups of a step.
        n: Minibatches.

    Returns:
        The minibatches.
    """
    bounds = np.linspace(0, len(groups), n + 1).round().astype(int)
    return [list(groups[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
