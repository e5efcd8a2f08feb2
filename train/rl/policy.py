"""The policy's log-probabilities of packed rollouts, computed as the sampler computed them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv32_jax import compiling, parameters, segments
from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import AttentionTensors, list_keys
from dsv32_jax.model import ModelOutput
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
        selection: int32 [layers, B, T, K], places in its rollout of the keys that each token's attention read in each
            layer, ascending, then -1; None where it was not asked for.
    """

    log_p: Float[Array, "B S O"]
    entropy: Float[Array, "B S O"]
    rerouted: Float[Array, ""]
    load: Float[Array, "L E"] | None
    indexer_kl: Float[Array, ""]
    selection: Int[Array, "layers B T K"] | None


def score(
    cfg: ModelConfig,
    params: Parameters,
    packed: Packed,
    *,
    replay: bool = True,
    kept: bool = True,
    indexer_loss: bool = False,
    selection: bool = False,
) -> Scores:
    """Score packed rollouts.

    Args:
        cfg: The model.
        params: Its arrays.
        packed: The rollouts.
        replay: Take the sampler's experts; without, the gates choose.
        kept: Stay within the sampler's kept sets; without, every token is open.
        indexer_loss: Also sum the indexers' KL, over every token of prompts and responses.
        selection: Also return the keys that were read.

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
        probe=functools.partial(_selected, cfg.indexer.topk) if selection else None,
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
        _stacked(output) if selection else None,
    )


def _selected(topk: int, tensors: AttentionTensors) -> Array:
    """Return the keys that a layer's attention read, counted from the start of each token's document."""
    assert tensors.chosen is not None, "sparse attention has a selection"
    keys_BTK = list_keys(tensors.chosen, topk)
    return jnp.where(keys_BTK < 0, -1, keys_BTK - tensors.start[..., None])


def _stacked(output: ModelOutput) -> Array:
    """Return what the probe found in all main layers in order."""
    return jnp.concatenate([part.probe for part in (output.dense, output.moe) if part is not None])


@functools.cache
def make_score(
    cfg: ModelConfig, *, replay: bool = True, kept: bool = True, selection: bool = False
) -> Callable[[Parameters, Packed], Scores]:
    """Return `score` under jit; equal arguments return the same function."""
    run = functools.partial(score, cfg, replay=replay, kept=kept, selection=selection)
    return jax.jit(run, compiler_options=compiling.compiler_options())
