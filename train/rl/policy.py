"""The policy's log-probabilities of packed rollouts, computed as the sampler computed them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv32_jax import compiling, parameters, segments
from dsv32_jax.config import ModelConfig
from dsv32_jax.parameters import Parameters
from train import head, losses
from train.rl.packing import Packed, take_responses


class Scores(NamedTuple):
    """What a policy says of rollouts.

    Attributes:
        log_p: float32 [B, S, O], of each token, under the sampler's temperature and kept sets.
        entropy: float32 [B, S, O], of what it was drawn from; without gradient.
        rerouted: float32 [], expert choices that the policy's gates would have made otherwise.
        load: float32 [L, E], tokens of each expert.
        indexer_kl: float32 [], the indexers' KL summed over tokens and layers; 0 where it was not asked for.
    """

    log_p: Float[Array, "B S O"]
    entropy: Float[Array, "B S O"]
    rerouted: Float[Array, ""]
    load: Float[Array, "L E"] | None
    indexer_kl: Float[Array, ""]


def score(
    cfg: ModelConfig,
    params: Parameters,
    packed: Packed,
    *,
    replay: bool = True,
    kept: bool = True,
    indexer_loss: bool = False,
) -> Scores:
    """Score packed rollouts.

    Args:
        cfg: The model.
        params: Its arrays.
        packed: The rollouts.
        replay: Take the sampler's experts; without, the gates choose.
        kept: Stay within the sampler's kept sets; without, every token is open.
        indexer_loss: Also sum the indexers' KL, over every token of prompts and responses.

    Returns:
        The scores. No gradient of the log-probabilities reaches the indexers, and none of the KL anything else.
    """
    model = parameters.assemble(cfg, params)
    output = model(
        packed.tokens,
        packed.segment_ids,
        mode="sparse",
        experts=packed.experts if replay else None,
        indexer_loss=indexer_loss,
    )
    targets = segments.shift_left(packed.tokens)
    found = head.predict(
        output.hidden,
        model.head[...],
        targets,
        temperature_BT=packed.temperature,
        kept=packed.kept if kept else None,
        entropy=True,
    )
    assert found.entropy is not None
    rerouted = load = None
    if output.moe is not None:
        rerouted, load = output.moe.rerouted, output.moe.load
    return Scores(
        take_responses(found.log_p, packed),
        jax.lax.stop_gradient(take_responses(found.entropy, packed)),
        jnp.zeros(()) if rerouted is None else jnp.sum(rerouted),
        load,
        losses.indexer_kl(output),
    )


@functools.cache
def make_score(
    cfg: ModelConfig, *, replay: bool = True, kept: bool = True
) -> Callable[[Parameters, Packed], Scores]:
    """Return `score` under jit; equal arguments return the same function."""
    run = functools.partial(score, cfg, replay=replay, kept=kept)
    return jax.jit(run, compiler_options=compiling.compiler_options())
