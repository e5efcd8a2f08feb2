"""Mixture of experts: dropless dispatch to the routed experts, and the shared expert."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv32_jax import expert_rows, expert_travel, layers, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.expert_rows import MAX_BLOCK
from dsv32_jax.gate import Gate, Routing
from dsv32_jax.segments import Segments
from dsv32_jax.sharding import spec
from pallas_kernels import dispatch

# Rows for tokens of all experts here that are alive at once: 1.9 GB of the released width.
MAX_ROWS = 2**17
MIN_DEVICES = 4  # on which tokens travel: see choose_dispatch


class MoE(nnx.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            cfg: The model.
            rngs: Source of randomness.
        """
        moe, dim, std = cfg.moe, cfg.dim, cfg.init_std
        self.cfg = cfg
        self.gate = Gate(cfg, rngs=rngs)
        self.w1 = layers.normal(rngs, (moe.n_experts, dim, moe.expert_dim), std)
        self.w3 = layers.normal(rngs, (moe.n_experts, dim, moe.expert_dim), std)
        self.w2 = layers.normal(rngs, (moe.n_experts, moe.expert_dim, dim), std)
        self.shared = layers.FeedForward(dim, moe.n_shared * moe.expert_dim, std, rngs=rngs)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        documents: Segments,
        experts: Int[Array, "B T A"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Apply the shared expert and each token's routed experts, summed in float32.

        Args:
            x_BTD: Tokens.
            documents: The documents, for the gate's statistics.
            experts: In place of the gate's own choice, see `Gate`.

        Returns:
            (output in the dtype of `x_BTD`, the routing).
        """
        routing = self.gate(x_BTD, documents, experts)
        weights = (self.w1[...], self.w3[...], self.w2[...])
        routed_BTD = _sharded_experts(x_BTD, routing, weights, self.cfg)
        out_BTD = routed_BTD + self.shared(x_BTD).astype(jnp.float32)
        return out_BTD.astype(x_BTD.dtype), routing


def why_gather(cfg: ModelConfig, n_choices: int, n_devices: int) -> str:
    """Say why tokens are better gathered than sent, see `choose_dispatch`; "" where they are not.

    Args:
        cfg: The model.
        n_choices: Experts that the tokens of one device chose.
        n_devices: Of the expert axis.

    Returns:
        The reason.
    """
    if n_devices < MIN_DEVICES:
        return "the expert axis is short"
    return (
        "few tokens at a time" if n_choices * n_devices**2 <= cfg.moe.n_experts * MAX_BLOCK else ""
    )


def choose_dispatch(cfg: ModelConfig, n_choices: int) -> str:
    """Return how tokens come to their experts on the context's mesh; the choice is logged once.

    A device gathers every token of its expert axis, or is sent those that chose its experts ("ragged" and
    "all_to_all", see `exchange`). Gathering has rows for the worst case, n times an even load on n devices, and passes
    over them a third as often, so that on fewer than 4 devices it is the cheaper; and where even the worst case does
    not fill one block of each expert, their weights are what is read.

    Args:
        cfg: The model.
        n_choices: Experts that the tokens of one device chose.

    Returns:
        "ragged", "all_to_all" or "all_gather".

    Raises:
        NotImplementedError: If the named one cannot run here.
    """
    asked, reason = cfg.expert_dispatch, why_gather(cfg, n_choices, sharding.axis_size("expert"))

    def check_worth() -> None:
        if asked == "auto" and reason:
            raise NotImplementedError(reason)

    def check_ragged() -> None:
        check_worth()
        if dispatch.platform() == "cpu":
            raise NotImplementedError("XLA has no ragged all-to-all on a CPU")

    choices = {"ragged": check_ragged, "all_to_all": check_worth, "all_gather": None}
    return dispatch.choose("expert_dispatch", None if asked == "auto" else asked, choices)


def filled(cfg: ModelConfig, n_choices: int) -> float:
    """Return the share of the experts' rows that have a choice, where the load is even; arguments as above."""
    travels = choose_dispatch(cfg, n_choices) != "all_gather"
    return 1 / min(sharding.axis_size("expert"), expert_travel.SLACK if travels else math.inf)


def _sharded_experts(x: Array, routing: Routing, weights: tuple, cfg: ModelConfig) -> Array:
    """Run each device's experts on the tokens that chose them, and sum on each token's device.

    Weights are gathered as they are multiplied; their gradients are summed and cut in float32. Tokens travel in pieces.
    A batch or a sequence that its mesh axes do not divide, such as one prompt's piece, is on every device instead.
    """
    part = (x, routing.experts, routing.gates)
    if sharding.axis_size(*sharding.AXES) == 1:
        return _run_flat(*part, weights, 0, cfg.implementation)
    sizes = {
        name: sharding.axis_size(*sharding.RULES[name])
        for name in ("batch", "sequence", "expert_embed")
    }
    split = x.shape[0] % sizes["batch"] == 0 and x.shape[1] % sizes["sequence"] == 0
    # Without a split the result is the same on every device, which the types of gathered weights would not say.
    embed = "expert_embed" if split and x.shape[2] % sizes["expert_embed"] == 0 else None

    def local(x: Array, experts: Array, gates: Array, weights: tuple) -> Array:
        if embed:
            weights = tuple(
                _whole(w, axis, str(x.dtype)) for w, axis in zip(weights, (1, 1, 2), strict=True)
            )
        if not split:
            return jax.lax.psum(_here(x, experts, gates, weights, cfg), ("tensor", "expert"))
        how = choose_dispatch(cfg, experts.size)
        if how == "all_gather":
            run = functools.partial(_gather_tokens, weights=weights, cfg=cfg)
            return _in_pieces(run, (x, experts, gates), sharding.axis_size("expert"))
        weights = sharding.vary(weights, "experts", "ffn", *([embed] if embed else []))
        run = functools.partial(_send_tokens, weights=weights, cfg=cfg, ragged=how == "ragged")
        return _in_pieces(run, (x, experts, gates), expert_travel.SLACK)

    token = spec("batch", "sequence") if split else spec()
    weight_specs = (
        spec("experts", embed, "ffn"),
        spec("experts", embed, "ffn"),
        spec("experts", "ffn", embed),
    )
    return sharding.shard_map(local, (token, token, token, weight_specs), token)(*part, weights)


def _gather_tokens(part: tuple, weights: tuple, cfg: ModelConfig) -> Array:
    """Run the experts here on all tokens of the expert axis, and sum over it."""
    x, experts, gates = jax.lax.all_gather(part, "expert", tiled=True)
    out = _here(x, experts, gates, weights, cfg)
    return jax.lax.psum_scatter(jax.lax.psum(out, "tensor"), "expert", tiled=True)


def _send_tokens(part: tuple, weights: tuple, cfg: ModelConfig, ragged: bool) -> Array:
    """Send tokens to their experts, and sum what comes back."""
    x = part[0]
    n_devices = sharding.axis_size("expert")
    sizes = expert_travel.Sizes(
        n_devices=n_devices,
        n_local=weights[0].shape[0],
        reach=expert_travel.reach(cfg.moe, n_devices),
        ragged=ragged,
        implementation=cfg.implementation,
    )
    x_ND, experts_NA, gates_NA = sharding.vary(
        tuple(a.reshape(-1, a.shape[-1]) for a in part), "batch", "sequence"
    )
    out = expert_travel.run_travelling(x_ND, experts_NA, gates_NA, weights, sizes)
    return jax.lax.psum(out, "tensor").reshape(x.shape)


def _here(x: Array, experts: Array, gates: Array, weights: tuple, cfg: ModelConfig) -> Array:
    """Run the experts of this device."""
    first = jax.lax.axis_index("expert") * weights[0].shape[0]
    return _run_flat(x, experts, gates, weights, first, cfg.implementation)


def _run_flat(
    x: Array,
    experts: Array,
    gates: Array,
    weights: tuple,
    first: Array | int,
    implementation: str | None,
) -> Array:
    x_ND, experts_NA, gates_NA = (a.reshape(-1, a.shape[-1]) for a in (x, experts, gates))
    out = expert_rows.run_experts(x_ND, experts_NA, gates_NA, weights, first, implementation)
    return out.reshape(x.shape)


def _in_pieces(run: Callable, part: tuple[Array, Array, Array], rows: float) -> Array:
    """Apply run to pieces of the sequence, so that no more than MAX_ROWS rows are alive, forward and back.

    Rows are those allotted, over the choices of the tokens here.
    """
    batch, length, n_active = part[1].shape
    pieces = 1
    while batch * length * n_active * rows > pieces * MAX_ROWS and length % (2 * pieces) == 0:
        pieces *= 2
    if pieces == 1:
        return run(part)
    cut = jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(batch, pieces, -1, a.shape[-1]), 1, 0), part
    )
    out = jax.lax.map(jax.checkpoint(run), cut)
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(weight: Array, axis: int, dtype: str) -> Array:
    """Gather a weight's shards in the dtype of its products."""
    return jax.lax.all_gather(
        weight.astype(dtype), sharding.RULES["expert_embed"], axis=axis, tiled=True
    )


def _whole_fwd(weight: Array, axis: int, dtype: str) -> tuple[Array, None]:
    return _whole(weight, axis, dtype), None


def _whole_bwd(axis: int, dtype: str, saved: None, grad: Array) -> tuple[Array]:
    del dtype, saved
    axes = sharding.RULES["expert_embed"]
    return (
        jax.lax.psum_scatter(grad.astype(jnp.float32), axes, scatter_dimension=axis, tiled=True),
    )


_whole.defvjp(_whole_fwd, _whole_bwd)
