"""GRPO as DeepSeek-V3.2 trains with it, pure functions on arrays: advantages, ratio, unbiased KL, off-policy mask.

Arrays of tokens are [*G, O]: responses, and the tokens of each; what is said of a response is [*G]. `mask` is True on
the tokens that the policy drew. Log-probabilities are natural and finite where the mask is True; elsewhere they may be
anything.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dsv32_jax.config import require

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "std"]
Reduction = Literal["sequence_mean", "token_mean", "constant"]
MIN_STD = 1e-6  # a group whose rewards are all equal has advantages of 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is maximised.

    Attributes:
        baseline: What a reward is compared with: the group's mean, or the mean of the others.
        scale: "none", or divide by the group's standard deviation as the first GRPO did.
        clip_low: The ratio counts from 1 - clip_low on where an advantage is negative.
        clip_high: And up to 1 + clip_high where it is positive.
        reduction: "sequence_mean" averages over a response's tokens, then over a group's responses, then over groups;
            "token_mean" over all tokens; "constant" sums tokens and divides by groups x `max_tokens`.
        kl_strength: Factor on the KL from the reference; a domain may have its own. 0 leaves it out.
        off_policy_delta: Nats a token by which a response with a negative advantage may have become less likely
            before its policy term is dropped; None keeps all.
    """

    baseline: Baseline = "mean"
    scale: Scale = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    reduction: Reduction = "sequence_mean"
    kl_strength: float
    off_policy_delta: float | None

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 < self.clip_low <= 1, f"clip_low={self.clip_low} must be in (0, 1]")
        require(self.clip_high > 0, f"clip_high={self.clip_high} must be positive")
        require(
            0 <= self.kl_strength < math.inf,
            f"kl_strength={self.kl_strength} must be finite and not negative",
        )
        delta = self.off_policy_delta
        require(
            delta is None or delta > 0,
            f"off_policy_delta={delta} must be positive, or None for no mask",
        )


def advantages(
    rewards_G: Float[Array, "*P G"], *, baseline: Baseline = "mean", scale: Scale = "none"
) -> Float[Array, "*P G"]:
    """Compare each reward with those of its group.

    `R_i - mean(R)`; "leave_one_out" takes the mean of the others, which is that times G / (G - 1). With scale="std" it
    is divided by the group's standard deviation (of the population); a group of equal rewards has zeros.

    Args:
        rewards_G: Rewards of the responses to one prompt along the last axis.
        baseline: What they are compared with.
        scale: What the difference is divided by.

    Returns:
        float32.

    Raises:
        ValueError: If `leave_one_out` is asked of groups of one.

    Source: DeepSeek-V3.2 report, section 3.1.
    """
    rewards_G = rewards_G.astype(jnp.float32)
    n = rewards_G.shape[-1]
    differences_G = rewards_G - rewards_G[..., :1]  # equal rewards then have exactly no advantage
    differences_G -= jnp.mean(differences_G, axis=-1, keepdims=True)
    if baseline == "leave_one_out":
        require(n > 1, "baseline='leave_one_out' needs groups of at least 2 responses")
        differences_G *= n / (n - 1)
    if scale == "std":
        std = jnp.std(rewards_G, axis=-1, keepdims=True)
        differences_G = jnp.where(std > MIN_STD, differences_G / jnp.maximum(std, MIN_STD), 0.0)
    return differences_G


def unbiased_kl(
    logp: Float[Array, "*N"], logp_old: Float[Array, "*N"], logp_ref: Float[Array, "*N"]
) -> Float[Array, "*N"]:
    """Estimate KL(policy || reference) from tokens that an older policy drew; the ratio is differentiated too.

    `pi / pi_old * (rho - log rho - 1)` with `rho = pi_ref / pi`: its mean over tokens drawn from pi_old is the reverse
    KL, and the mean of its gradient that KL's gradient. Without the ratio the gradient is another one even where
    pi_old = pi.

    Args:
        logp: Of the policy that is trained.
        logp_old: Of the policy that drew.
        logp_ref: Of the reference.

    Returns:
        The estimate a token, nats; at least 0.

    Source: DeepSeek-V3.2 report, section 3.1.
    """
    log_rho = logp_ref - logp
    return jnp.exp(logp - logp_old) * (jnp.expm1(log_rho) - log_rho)


def off_policy_mask(
    logp: Float[Array, "*G O"],
    logp_sampler: Float[Array, "*G O"],
    advantages: Float[Array, "*G"],
    mask: Bool[Array, "*G O"],
    delta: float,
) -> Float[Array, "*G"]:
    """Drop responses that did worse than their group and that the policy has moved away from.

    0 where the advantage is negative and `mean_t(logp_sampler - logp) > delta`, else 1: one decision a response. The
    sampler's own log-probabilities show both how old its weights were and how its engine differs.

    Args:
        logp: Of the policy that is trained.
        logp_sampler: As the sampler reported them.
        advantages: Of the responses.
        mask: Which tokens the policy drew; a response without one is kept.
        delta: Nats a token.

    Returns:
        float32 0 or 1, without gradient.

    Source: DeepSeek-V3.2 report, section 3.1.
    """
    lost = _token_mean(jax.lax.stop_gradient(logp_sampler - logp), mask)
    return jnp.where((advantages < 0) & (lost > delta), 0.0, 1.0)


class Responses(NamedTuple):
    """What the objective is told of responses.

    Attributes:
        logp_old: Log-probabilities that the ratio is taken against.
        logp_sampler: As the sampler reported them.
        logp_ref: Of the reference; None where no response has a KL.
        mask: Which tokens the policy drew.
        advantages: See `advantages`.
        weight: What a mean over a response's tokens counts, see `response_weights`.
        kl_strength: Factor on each response's KL.
    """

    logp_old: Float[Array, "*G O"]
    logp_sampler: Float[Array, "*G O"]
    logp_ref: Float[Array, "*G O"] | None
    mask: Bool[Array, "*G O"]
    advantages: Float[Array, "*G"]
    weight: Float[Array, "*G"]
    kl_strength: Float[Array, "*G"]


class Figures(NamedTuple):
    """What the objective did, as sums, so that microbatches add up.

    Attributes:
        policy: Weighted policy term; the loss without the KL.
        kl: KL estimates, unweighted, over tokens.
        ratio: Ratios over tokens.
        clipped: Tokens whose ratio was clipped.
        tokens: Tokens that the policy drew.
        masked: Responses that the off-policy mask dropped.
        negative: Responses with a negative advantage.
        responses: Responses with a token.
    """

    policy: Float[Array, ""]
    kl: Float[Array, ""]
    ratio: Float[Array, ""]
    clipped: Float[Array, ""]
    tokens: Float[Array, ""]
    masked: Float[Array, ""]
    negative: Float[Array, ""]
    responses: Float[Array, ""]


def response_weights(
    lengths_PG: Float[Array, "P G"], reduction: Reduction, *, max_tokens: int | None = None
) -> Float[Array, "P G"]:
    """Return what the mean over each response's tokens counts in the loss of a batch.

    "sequence_mean": 1 / (groups x responses of the group). "token_mean": the response's share of all tokens.
    "constant": tokens / (responses x max_tokens). Empty responses (length 0) count nowhere.

    Args:
        lengths_PG: Tokens of each response, a group a row; 0 where a group has fewer.
        reduction: How the batch is averaged.
        max_tokens: The longest response allowed, for "constant".

    Returns:
        float32; together 1 for the two means.

    Raises:
        ValueError: If "constant" lacks `max_tokens`.
    """
    lengths_PG = lengths_PG.astype(jnp.float32)
    present_PG = (lengths_PG > 0).astype(jnp.float32)
    if reduction == "token_mean":
        return lengths_PG / jnp.maximum(jnp.sum(lengths_PG), 1.0)
    if reduction == "constant":
        require(max_tokens is not None, "reduction='constant' needs max_tokens")
        return lengths_PG / (jnp.maximum(jnp.sum(present_PG), 1.0) * (max_tokens or 1))
    in_group_P1 = jnp.sum(present_PG, axis=1, keepdims=True)
    n_groups = jnp.sum(in_group_P1 > 0)
    return present_PG / (jnp.maximum(in_group_P1, 1.0) * jnp.maximum(n_groups, 1))


def grpo_loss(
    logp: Float[Array, "*G O"],
    responses: Responses,
    *,
    clip_low: float,
    clip_high: float,
    delta: float | None,
) -> tuple[Float[Array, ""], Figures]:
    """Return the loss whose gradient trains the policy.

    `-sum_i w_i mean_t [ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) M - beta KL ]`, with the token's ratio
    `r = pi / pi_old`, A the response's advantage, M `off_policy_mask`, which leaves the KL alone.

    Args:
        logp: Of the policy that is trained; what is differentiated.
        responses: The rest.
        clip_low: See `ObjectiveConfig`.
        clip_high: See `ObjectiveConfig`.
        delta: Of the mask; None for none.

    Returns:
        (loss, what it did).

    Source: DeepSeek-V3.2 report, section 3.1.
    """
    mask = responses.mask
    # Where there is no token, differences are 0 and nothing overflows, in the backward pass neither.
    logp, logp_old, logp_sampler = (
        jnp.where(mask, x.astype(jnp.float32), 0.0)
        for x in (logp, responses.logp_old, responses.logp_sampler)
    )
    ratio = jnp.exp(logp - logp_old)
    advantage = responses.advantages[..., None]
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    kept = jnp.ones_like(responses.advantages)
    if delta is not None:
        kept = off_policy_mask(logp, logp_sampler, responses.advantages, mask, delta)
    policy = -jnp.sum(responses.weight * kept * _token_mean(gain, mask))
    loss, kl = policy, jnp.zeros_like(logp)
    if responses.logp_ref is not None:
        logp_ref = jnp.where(mask, responses.logp_ref.astype(jnp.float32), 0.0)
        kl = unbiased_kl(logp, logp_old, logp_ref)
        loss += jnp.sum(responses.weight * responses.kl_strength * _token_mean(kl, mask))
    some = jnp.any(mask, axis=-1)
    figures = Figures(
        policy=policy,
        kl=_total(kl, mask),
        ratio=_total(ratio, mask),
        clipped=_total(ratio * advantage > clipped * advantage, mask),
        tokens=_total(1.0, mask),
        masked=_total(kept == 0, some),
        negative=_total(responses.advantages < 0, some),
        responses=_total(1.0, some),
    )
    return loss, jax.lax.stop_gradient(figures)


def _token_mean(x: Array, mask: Array) -> Array:
    """Average over a response's tokens; 0 for a response without one."""
    n_tokens = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, x, 0.0), axis=-1) / jnp.maximum(n_tokens, 1.0)


def _total(x: Array | float, mask: Array) -> Array:
    return jnp.sum(jnp.where(mask, x, 0.0), dtype=jnp.float32)
