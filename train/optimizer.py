"""AdamW with DeepSeek-V3's settings: one group for the main model, one for the indexers, each clipped by itself."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from dsv32_jax.config import Dtype, require
from dsv32_jax.parameters import Arrays, is_indexer


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over steps: linear warm-up, constant, cosine to a final value, then constant pieces.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps from 0 to the peak.
        hold_steps: Steps at the peak after the warm-up, before the decay.
        decay_steps: Steps of the cosine; 0 stays at the peak.
        final: Rate at the end of the cosine.
        tail: (step, rate) pairs, ascending: from that step on, that constant rate.
    """

    peak: float
    warmup_steps: int = 0
    hold_steps: int = 0
    decay_steps: int = 0
    final: float = 0.0
    tail: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 < self.peak < math.inf, f"peak={self.peak} must be positive and finite")
        require(
            0 <= self.final <= self.peak, f"final={self.final} must be in [0, peak={self.peak}]"
        )
        for name in ("warmup_steps", "hold_steps", "decay_steps"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        require(
            self.decay_steps > 0 or (self.hold_steps == 0 and self.final == 0),
            f"hold_steps={self.hold_steps} and final={self.final} need decay_steps above 0",
        )
        steps = [step for step, _ in self.tail]
        require(steps == sorted(set(steps)), f"tail={self.tail} must have ascending steps")
        require(
            all(step >= 1 and 0 < rate < math.inf for step, rate in self.tail),
            f"tail={self.tail} must have steps of at least 1 and positive rates",
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: 0 for the first; a warm-up of n steps starts at peak / n.

        Returns:
            The rate.
        """
        return float(self._build()(step))

    def _build(self) -> optax.Schedule:
        pieces: list[optax.Schedule] = []
        ends: list[int] = []
        if self.warmup_steps:
            n = self.warmup_steps
            pieces.append(lambda step: self.peak * jnp.minimum((step + 1) / n, 1.0))
            ends.append(n)
        pieces.append(optax.constant_schedule(self.peak))
        if self.decay_steps:
            ends.append(self.warmup_steps + self.hold_steps)
            ratio = self.final / self.peak
            pieces.append(optax.cosine_decay_schedule(self.peak, self.decay_steps, alpha=ratio))
        for step, rate in self.tail:
            ends.append(step)
            pieces.append(optax.constant_schedule(rate))
        return optax.join_schedules(pieces, ends)


class Rates(NamedTuple):
    """Learning rates of one step, float32.

    Attributes:
        main: Of the main model.
        indexer: Of the indexers.
    """

    main: Any
    indexer: Any


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """AdamW but for its learning rates.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Of the main model's matrices, not of norms and biases; decoupled, times the learning rate.
        indexer_weight_decay: Of the indexers' matrices.
        clip_norm: Largest global gradient norm, of each group by itself, so that the KL cannot shrink the main
            model's step.
        mu_dtype: Dtype of the first moment.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    indexer_weight_decay: float = 0.0
    clip_norm: float = 1.0
    mu_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 <= self.b1 < 1, f"b1={self.b1} must be in [0, 1)")
        require(0 <= self.b2 < 1, f"b2={self.b2} must be in [0, 1)")
        for name in ("eps", "clip_norm"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        for name in ("weight_decay", "indexer_weight_decay"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates, and AdamW.

    Attributes:
        main: Learning rate of everything but the indexers; None in a stage that does not train it.
        indexer: Learning rate of the indexers, the MTP layer's included; None in a stage that does not train them.
        adam: The rest.
    """

    main: Schedule | None = None
    indexer: Schedule | None = None
    adam: AdamConfig = AdamConfig()


def group_of(name: str) -> str:
    """Return "indexer" or "main"."""
    return "indexer" if is_indexer(name) else "main"


def group_norm(grads: Arrays, group: str) -> Array:
    """Return the norm of a group's gradients, as its clipping measures it; 0 where it has none."""
    return optax.tree.norm(
        [g for name, g in grads.items() if group_of(name) == group] or [jnp.zeros(())]
    )


def decays(name: str) -> bool:
    """Tell whether weight decay applies: to matrices, not to norms and biases."""
    last_two = name.split(".")[-2:]
    return last_two[-1] != "bias" and not last_two[0].endswith("norm")


def make_optimizer(cfg: AdamConfig) -> optax.GradientTransformation:
    """Build the transformation of a flat dict of gradients; it holds state for what it is given only.

    The learning rates are left out: `apply_updates` takes them each step, so that one compiled step serves
    every schedule.

    Args:
        cfg: Settings.

    Returns:
        An optax transformation whose updates `apply_updates` subtracts.
    """

    def group(weight_decay: float) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(cfg.clip_norm),
            optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps, mu_dtype=jnp.dtype(cfg.mu_dtype)),
            optax.add_decayed_weights(
                weight_decay, mask=lambda tree: {name: decays(name) for name in tree}
            ),
        )

    groups = {"main": group(cfg.weight_decay), "indexer": group(cfg.indexer_weight_decay)}
    return optax.partition(groups, lambda tree: {name: group_of(name) for name in tree})


def apply_updates(weights: Arrays, updates: Arrays, rates: Rates) -> Arrays:
    """Return `w - rate * update`, with the rate of each weight's group."""
    return {
        name: weight - getattr(rates, group_of(name)) * updates[name]
        for name, weight in weights.items()
    }


def rates_at(cfg: OptimizerConfig, step: int) -> Rates:
    """Return the learning rates of a step, counted from 0; 0 for a group that does not train."""
    rates = (0.0 if group is None else group.rate(step) for group in (cfg.main, cfg.indexer))
    return Rates(*(np.float32(rate) for rate in rates))
