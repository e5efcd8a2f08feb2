"""The gate: which experts a token goes to, with what weight, and how even the load is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dsv32_jax import layers, segments
from dsv32_jax.config import ModelConfig, MoEConfig
from dsv32_jax.segments import Segments

MIN_GATE_SUM = 1e-20  # transformers' guard against a token all of whose sigmoids underflow


class RouterBias(nnx.Variable):
    """Per-expert bias of the selection: moved by a rule between steps, never by a gradient."""


class Routing(NamedTuple):
    """What the gate decided.

    Attributes:
        experts: int32 [B, T, A], the chosen experts.
        gates: float32 [B, T, A], their weights.
        load: float32 [E], tokens sent to each expert; padding is not counted.
        balance: float32 [], sum over documents of (tokens x balance loss), before alpha.
        rerouted: float32 [], choices of the gate that the given experts replaced; None where none were given.
    """

    experts: Int[Array, "B T A"]
    gates: Float[Array, "B T A"]
    load: Float[Array, " E"]
    balance: Float[Array, ""]
    rerouted: Float[Array, ""] | None


class Gate(nnx.Module):
    """Choose the experts of each token.

    Source: DeepSeek-V3.2 inference/model.py Gate; DeepSeek-V3 report, eqs. 12-20.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weight; the selection bias starts at 0.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        self.weight = layers.normal(rngs, (cfg.dim, cfg.moe.n_experts), cfg.init_std)
        self.bias = RouterBias(jnp.zeros(cfg.moe.n_experts, jnp.float32))
        self.cfg = cfg.moe

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        documents: Segments,
        experts: Int[Array, "B T A"] | None = None,
    ) -> Routing:
        """Route each token, in float32.

        `s = sigmoid(x W)`; the experts are the top A of `s + bias` within the best groups, their gates are
        `s / sum(s) * route_scale` over the chosen. The bias moves the choice only.

        Args:
            x_BTD: Tokens.
            documents: The documents, for the balance loss and the load.
            experts: int32, experts to take in place of the gate's own choice, as a sampler took them; -1 leaves the
                token's choice to the gate. Their weights come from the scores here, which so have their gradients.

        Returns:
            The routing.
        """
        scores_BTE = jax.nn.sigmoid(
            layers.project("btd,de->bte", x_BTD.astype(jnp.float32), self.weight)
        )
        bias_E = jax.lax.stop_gradient(self.bias[...])
        experts_BTA = select_experts(jax.lax.stop_gradient(scores_BTE) + bias_E, self.cfg)
        rerouted = None
        if experts is not None:
            given_BTA = jnp.where(experts >= 0, experts, experts_BTA)
            rerouted = _count_new(given_BTA, experts_BTA, documents.valid)
            experts_BTA = given_BTA
        gates_BTA = jnp.take_along_axis(scores_BTE, experts_BTA, axis=-1)
        if self.cfg.normalize_gates:
            gates_BTA /= jnp.sum(gates_BTA, axis=-1, keepdims=True) + MIN_GATE_SUM
        load_E = jnp.sum(_counts(experts_BTA, self.cfg.n_experts, documents.valid), axis=(0, 1))
        balance = balance_sum(scores_BTE, self.cfg, documents)
        return Routing(experts_BTA, gates_BTA * self.cfg.route_scale, load_E, balance, rerouted)


def select_experts(biased_BTE: Float[Array, "B T E"], cfg: MoEConfig) -> Int[Array, "B T A"]:
    """Return the top A experts within the groups whose two best experts sum highest.

    Args:
        biased_BTE: Scores with the selection bias.
        cfg: Sizes.

    Returns:
        int32 expert indices, best first; ties go to the smaller index.
    """
    if cfg.n_groups > 1:
        groups_BTGE = biased_BTE.reshape(*biased_BTE.shape[:-1], cfg.n_groups, cfg.group_size)
        best_two = jax.lax.top_k(groups_BTGE, 2)[0]
        _, chosen = jax.lax.top_k(jnp.sum(best_two, axis=-1), cfg.n_active_groups)
        kept_BTG = jnp.any(chosen[..., None] == jnp.arange(cfg.n_groups), axis=-2)
        biased_BTE = jnp.where(kept_BTG[..., None], groups_BTGE, -jnp.inf).reshape(biased_BTE.shape)
    return jax.lax.top_k(biased_BTE, cfg.n_active)[1].astype(jnp.int32)


def _count_new(given_BTA: Array, chosen_BTA: Array, valid_BT: Array) -> Float[Array, ""]:
    """Count the given experts of valid tokens that were not chosen."""
    known_BTA = jnp.any(given_BTA[..., None] == chosen_BTA[..., None, :], axis=-1)
    return jnp.sum(~known_BTA & valid_BT[..., None], dtype=jnp.float32)


def _counts(experts_BTA: Array, n_experts: int, valid_BT: Array) -> Float[Array, "B T E"]:
    """Return 1 where a valid token chose the expert."""
    chose = jnp.any(experts_BTA[..., None] == jnp.arange(n_experts), axis=-2)
    return (chose & valid_BT[..., None]).astype(jnp.float32)


def balance_sum(
    scores_BTE: Float[Array, "B T E"], cfg: MoEConfig, documents: Segments
) -> Float[Array, ""]:
    """Return the sequence-wise balance loss, each document weighted by its tokens.

    For a document of n tokens `n * sum_e f_e P_e`, with `f_e = E / (A n) * #{tokens whose top A by s contains e}`
    and `P_e` the mean of `s_e / sum(s)`. A document is a sequence, so packing does not change the loss.

    Args:
        scores_BTE: float32 sigmoid scores, without bias.
        cfg: Sizes.
        documents: The documents; padding counts nowhere.

    Returns:
        The sum over documents; alpha and the division by the token count are the caller's.

    Source: DeepSeek-V3 report, eqs. 17-20.
    """
    top_BTA = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), cfg.n_active)[1]
    chose_BTE = _counts(top_BTA, cfg.n_experts, documents.valid)
    share_BTE = scores_BTE / (jnp.sum(scores_BTE, axis=-1, keepdims=True) + MIN_GATE_SUM)
    length_BT = (documents.position + 1).astype(jnp.float32)
    f_BTE = segments.running_sum(chose_BTE, documents) * (cfg.n_experts / cfg.n_active)
    p_BTE = segments.running_sum(share_BTE, documents)
    term_BT = jnp.sum(f_BTE * p_BTE, axis=-1) / length_BT  # n * (f / n) * (P / n)
    return jnp.sum(jnp.where(_last_of_document(documents), term_BT, 0.0))


def _last_of_document(documents: Segments) -> Bool[Array, "B T"]:
    """Tell which tokens end their document."""
    next_start = jnp.pad(documents.position[:, 1:], ((0, 0), (0, 1)))
    return documents.valid & (next_start == 0)
