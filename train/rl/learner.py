"""The learner: gradients of the objective over stacked microbatches of packed rollouts, and the optimizer step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dsv32_jax import compiling
from dsv32_jax.config import ModelConfig
from dsv32_jax.parameters import Arrays, Parameters
from train.optimizer import AdamConfig, Rates, apply_updates, group_norm, make_optimizer
from train.rl import objective, policy
from train.rl.objective import Figures, ObjectiveConfig, Responses
from train.rl.packing import Packed
from train.stage import Stage
from train.state import TrainState, trainable

STAGE: Stage = "rl"


class Targets(NamedTuple):
    """What the learner is told of the rollouts of a microbatch beside what the sampler reported.

    Attributes:
        log_p_old: float32 [B, S, O], that the ratio is taken against.
        log_p_ref: float32 [B, S, O], of the reference; None where there is no KL.
        advantages: float32 [B, S].
        weight: float32 [B, S], see `objective.response_weights`; 0 where there is no rollout.
        kl_strength: float32 [B, S].
        n_tokens: float32 [], tokens of prompts and responses of the whole minibatch, which the indexers' KL is a mean
            over, so that packing cannot change it; None where the indexers stay as they are.
    """

    log_p_old: Float[Array, "B S O"]
    log_p_ref: Float[Array, "B S O"] | None
    advantages: Float[Array, "B S"]
    weight: Float[Array, "B S"]
    kl_strength: Float[Array, "B S"]
    n_tokens: Float[Array, ""] | None = None


class Sums(NamedTuple):
    """What microbatches add up to.

    Attributes:
        loss: What the policy minimises; the indexers' KL is apart.
        figures: Of the objective.
        entropy: Over tokens, nats.
        rerouted: Expert choices that the gates would have made otherwise.
        indexer_kl: The indexers' KL over tokens and layers, nats; 0 where they stay as they are.
    """

    loss: Float[Array, ""]
    figures: Figures
    entropy: Float[Array, ""]
    rerouted: Float[Array, ""]
    indexer_kl: Float[Array, ""]


def place_by_rollout(values: np.ndarray, packed: Packed) -> np.ndarray:
    """Lay one number a rollout out as [B, S]; 0 where there is none."""
    index = np.asarray(packed.rollout)
    return np.where(index >= 0, values[np.maximum(index, 0)], 0).astype(np.float32)


def make_gradients(
    cfg: ModelConfig,
    objective_cfg: ObjectiveConfig,
    *,
    replay: bool = True,
    kept: bool = True,
    indexer_kl: float | None = None,
) -> Callable[[Parameters, Packed, Targets], tuple[Arrays, Sums]]:
    """Return the gradient of one microbatch, of what reinforcement learning moves; to be traced under jit.

    The indexers' KL is taken over every token, of prompts too: each one's selection is part of what the policy reads,
    and the KL, which knows neither rewards nor who drew a token, asks the same of all, as in the sparse stage. A prompt
    counts once for each of its responses.

    Args:
        cfg: The model.
        objective_cfg: What is maximised.
        replay: See `policy.score`.
        kept: See `policy.score`.
        indexer_kl: Factor on the KL that the indexers train by; None leaves them as they are.

    Returns:
        (params, packed, targets) -> (gradients by name, sums); those of microbatches add up to the batch's.
    """
    trains_indexer = indexer_kl is not None

    def loss(moving: Arrays, params: Parameters, packed: Packed, targets: Targets) -> tuple:
        whole = params._replace(weights=params.weights | moving)
        scores = policy.score(
            cfg, whole, packed, replay=replay, kept=kept, indexer_loss=trains_indexer
        )
        responses = Responses(
            logp_old=targets.log_p_old,
            logp_sampler=packed.log_p,
            logp_ref=targets.log_p_ref,
            mask=packed.mask,
            advantages=targets.advantages,
            weight=targets.weight,
            kl_strength=targets.kl_strength,
        )
        value, figures = objective.grpo_loss(
            scores.log_p,
            responses,
            clip_low=objective_cfg.clip_low,
            clip_high=objective_cfg.clip_high,
            delta=objective_cfg.off_policy_delta,
        )
        entropy = jnp.sum(jnp.where(packed.mask, scores.entropy, 0.0))
        sums = Sums(value, figures, entropy, scores.rerouted, scores.indexer_kl)
        if indexer_kl is None:
            return value, sums
        assert targets.n_tokens is not None, "the indexers' KL is a mean over the minibatch"
        return value + indexer_kl * scores.indexer_kl / targets.n_tokens, sums

    def gradients(params: Parameters, packed: Packed, targets: Targets) -> tuple[Arrays, Sums]:
        moving = trainable("rl_indexer" if trains_indexer else STAGE, params.weights)
        return jax.grad(loss, has_aux=True)(moving, params, packed, targets)

    return gradients


def make_update(
    adam: AdamConfig,
) -> Callable[[TrainState, Arrays, Rates], tuple[TrainState, Float[Array, ""]]]:
    """Return the update by summed gradients; to be traced under jit.

    Args:
        adam: The optimizer.

    Returns:
        (state, gradients, rates) -> (state, norm of the gradients before clipping). What has a gradient moves; one that
        is not finite leaves parameters and moments as they are, and the norm says so.
    """
    optimizer = make_optimizer(adam)

    def update(state: TrainState, grads: Arrays, rates: Rates) -> tuple[TrainState, Array]:
        norm = optax.tree.norm(grads)
        moving = {name: state.parameters.weights[name] for name in grads}
        updates, opt_state = optimizer.update(grads, state.opt_state, moving)
        moved = apply_updates(moving, updates, rates)
        good = jnp.isfinite(norm)
        moved, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (moved, opt_state),
            (moving, state.opt_state),
        )
        params = state.parameters
        params = params._replace(weights=params.weights | moved)
        return TrainState(params, opt_state, state.step + 1), norm

    return update


class Norms(NamedTuple):
    """Norms of a step's gradients before clipping, float32.

    Attributes:
        whole: Of all.
        main: Of the main model's, which are clipped apart from the indexers'.
        indexer: Of the indexers'; 0 where they stay as they are.
    """

    whole: Float[Array, ""]
    main: Float[Array, ""]
    indexer: Float[Array, ""]


class Work(NamedTuple):
    """What one optimizer step learns from: microbatches, stacked along a first axis that no mesh axis cuts.

    Attributes:
        packed: The rollouts.
        targets: What is told of them; where there is a reference, its log-probabilities come from the step.
        n_microbatches: int32 [], how many are worked on; the others are padding, which costs nothing. Few sizes of
            stacks are ever compiled.
    """

    packed: Packed
    targets: Targets
    n_microbatches: Any


@functools.cache
def make_step(
    cfg: ModelConfig,
    objective_cfg: ObjectiveConfig,
    adam: AdamConfig,
    *,
    replay: bool = True,
    kept: bool = True,
    indexer_kl: float | None = None,
) -> Callable[[TrainState, Parameters | None, Work, Rates], tuple[TrainState, Sums, Norms]]:
    """Return the jitted optimizer step: gradients of the microbatches, added up in float32, and the update.

    Args:
        cfg: The model.
        objective_cfg: What is maximised.
        adam: The optimizer.
        replay: See `policy.score`.
        kept: See `policy.score`.
        indexer_kl: See `make_gradients`.

    Returns:
        (state, reference or None, work, rates) -> (state, sums, norms of the gradients), see `make_update`; the state
        is donated. Equal arguments return the same function.
    """
    gradients = make_gradients(cfg, objective_cfg, replay=replay, kept=kept, indexer_kl=indexer_kl)
    update = make_update(adam)

    def step(
        state: TrainState, reference: Parameters | None, work: Work, rates: Rates
    ) -> tuple[TrainState, Sums, Norms]:
        def take(i: Array | int) -> tuple[Packed, Targets]:
            stacked = (work.packed, work.targets)
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), stacked)

        def gradients_of(packed: Packed, targets: Targets) -> tuple[Arrays, Sums]:
            if reference is not None:
                found = policy.score(cfg, reference, packed, replay=replay, kept=kept)
                targets = targets._replace(log_p_ref=found.log_p)
            return gradients(state.parameters, packed, targets)

        def add(carry: tuple) -> tuple:
            i, total = carry
            return i + 1, jax.tree.map(jnp.add, total, gradients_of(*take(i)))

        def more(carry: tuple) -> Array:
            # The second bound is known when the step is compiled, for those who read the program.
            return (carry[0] < work.n_microbatches) & (carry[0] < len(work.packed.tokens))

        shapes = jax.eval_shape(lambda: gradients_of(*take(0)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        _, (grads, sums) = jax.lax.while_loop(more, add, (jnp.zeros((), jnp.int32), zeros))
        state, norm = update(state, grads, rates)
        main, indexer = (group_norm(grads, group) for group in ("main", "indexer"))
        return state, sums, Norms(norm, main, indexer)

    return jax.jit(step, donate_argnums=0, compiler_options=compiling.compiler_options())
