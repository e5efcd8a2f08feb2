"""Mixture of experts: dropless dispatch to the routed experts, and the shared expert."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from dsv32_jax import layers, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.gate import Gate, Routing
from dsv32_jax.segments import Segments
from dsv32_jax.sharding import spec

MAX_ROWS = (
    2**17
)  # rows for tokens of all experts here that are alive at once: 1.9 GB of the released width
COUNT_PIECE = 512  # places whose running count is one product
MIN_BLOCK, MAX_BLOCK = 8, 128  # rows that share one expert's weight in the blocked product


class Dispatch(NamedTuple):
    """Rows sorted by expert, each expert's rows padded to whole blocks.

    Attributes:
        token: int32 [M], the token in each row; N where the row is padding.
        row: int32 [N, A], the row of each choice; M where its expert is not local.
        sizes: int32 [E], rows of each local expert, multiples of the block.
    """

    token: Int[Array, " M"]
    row: Int[Array, "N A"]
    sizes: Int[Array, " E"]


def plan_dispatch(
    experts_NA: Int[Array, "N A"], n_local: int, first_expert: Int[Array, ""] | int, block: int
) -> Dispatch:
    """Give every choice of a local expert a row; none is dropped.

    Args:
        experts_NA: Chosen experts of each token.
        n_local: Experts held here.
        first_expert: Index of the first of them.
        block: Rows are padded to multiples of it, expert by expert.

    Returns:
        The plan.
    """
    n_tokens, n_active = experts_NA.shape
    n_choices = n_tokens * n_active
    local = experts_NA.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < n_local), local, n_local)
    chose_EN = local == jnp.arange(n_local)[:, None]
    upto_EN = _running_count(chose_EN)
    sizes = -(-upto_EN[:, -1] // block) * block
    first_row_E = jnp.cumsum(sizes) - sizes
    n_rows = -(-n_choices // block) * block + n_local * block
    # A sum over the local experts, of which one was chosen: gathers from small tables compile for half a minute on TPU.
    row = jnp.sum(jnp.where(chose_EN, first_row_E[:, None] + upto_EN - 1, 0), axis=0)
    row = jnp.where(local < n_local, row, n_rows)
    token = jnp.full(n_rows, n_tokens, jnp.int32)
    token = token.at[row].set(jnp.arange(n_choices, dtype=jnp.int32) // n_active, mode="drop")
    return Dispatch(token, row.reshape(n_tokens, n_active).astype(jnp.int32), sizes)


def _running_count(chose_EN: Bool[Array, "E N"]) -> Int[Array, "E N"]:
    """Count the true entries of each row up to and with each place: within pieces by a product, which is exact."""
    n = chose_EN.shape[1]
    pieces = jnp.pad(chose_EN, ((0, 0), (0, -n % COUNT_PIECE)))
    pieces = pieces.reshape(chose_EN.shape[0], -1, COUNT_PIECE).astype(jnp.bfloat16)
    upto = jnp.triu(jnp.ones((COUNT_PIECE, COUNT_PIECE), jnp.bfloat16))
    count = jnp.einsum("ebi,ij->ebj", pieces, upto, preferred_element_type=jnp.float32)
    count = count.astype(jnp.int32)
    total = count[:, :, -1]
    count += (jnp.cumsum(total, axis=1) - total)[..., None]
    return count.reshape(chose_EN.shape[0], -1)[:, :n]


@jax.custom_vjp
def _to_rows(x_ND: Array, token_M: Array, row_NA: Array) -> Array:
    """Copy each row's token; its transpose gathers too, so no scatter-add decides the order of a sum."""
    return x_ND.at[token_M].get(mode="fill", fill_value=0)


def _to_rows_fwd(x_ND: Array, token_M: Array, row_NA: Array) -> tuple[Array, Array]:
    return _to_rows(x_ND, token_M, row_NA), row_NA


def _to_rows_bwd(row_NA: Array, grad_MD: Array) -> tuple[Array, None, None]:
    picked_NAD = grad_MD.at[row_NA].get(mode="fill", fill_value=0)
    return jnp.sum(picked_NAD.astype(jnp.float32), axis=1).astype(grad_MD.dtype), None, None


_to_rows.defvjp(_to_rows_fwd, _to_rows_bwd)


@jax.custom_vjp
def _from_rows(out_MD: Array, token_M: Array, row_NA: Array) -> Array:
    """Return each choice's row [N, A, D]; 0 where the expert is elsewhere."""
    return out_MD.at[row_NA].get(mode="fill", fill_value=0)


def _from_rows_fwd(out_MD: Array, token_M: Array, row_NA: Array) -> tuple[Array, tuple]:
    return _from_rows(out_MD, token_M, row_NA), (token_M, row_NA)


def _from_rows_bwd(saved: tuple, grad_NAD: Array) -> tuple[Array, None, None]:
    token_M, row_NA = saved
    n_tokens, n_active, dim = grad_NAD.shape
    choice_NA = jnp.arange(n_tokens * n_active, dtype=jnp.int32).reshape(n_tokens, n_active)
    choice_M = jnp.full(token_M.shape, n_tokens * n_active, jnp.int32)
    choice_M = choice_M.at[row_NA].set(choice_NA, mode="drop")
    grad_MD = grad_NAD.reshape(-1, dim).at[choice_M].get(mode="fill", fill_value=0)
    return grad_MD, None, None


_from_rows.defvjp(_from_rows_fwd, _from_rows_bwd)


def _block_rows(n_choices: int, n_experts: int) -> int:
    """Choose a block near the rows an expert gets, a power of two."""
    per_expert = max(n_choices // n_experts, 1)
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (per_expert.bit_length() - 1)))


def run_experts(
    x_ND: Float[Array, "N D"],
    experts_NA: Int[Array, "N A"],
    gates_NA: Float[Array, "N A"],
    weights: tuple[Array, Array, Array],
    first_expert: Int[Array, ""] | int = 0,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """Sum the gated outputs of each token's experts that are held here.

    `y[n] = sum_a gate[n, a] * w2_e(silu(w1_e x[n]) * w3_e x[n])`, e the a-th choice; float32.

    Args:
        x_ND: Tokens.
        experts_NA: int32, their chosen experts.
        gates_NA: float32 weights.
        weights: (w1 [E, D, F], w3 [E, D, F], w2 [E, F, D]) of the local experts.
        first_expert: Index of the first local expert.
        implementation: Of `grouped_matmul`.

    Returns:
        float32 sums; choices of experts held elsewhere add nothing.
    """
    w1_EDF, w3_EDF, w2_EFD = (w.astype(x_ND.dtype) for w in weights)
    n_local = w1_EDF.shape[0]
    if experts_NA.size < n_local:
        return _run_chosen(x_ND, experts_NA - first_expert, gates_NA, (w1_EDF, w3_EDF, w2_EFD))
    block = _block_rows(experts_NA.size, n_local)
    plan = plan_dispatch(experts_NA, n_local, first_expert, block)
    x_MD = _to_rows(x_ND, plan.token, plan.row)

    def multiply(x: Array, w: Array) -> Array:
        return pallas_kernels.grouped_matmul(
            x, w, plan.sizes, align=block, implementation=implementation
        )

    hidden_MF = layers.swiglu(multiply(x_MD, w1_EDF), multiply(x_MD, w3_EDF))
    out_NAD = _from_rows(multiply(hidden_MF, w2_EFD), plan.token, plan.row)
    return jnp.einsum("na,nad->nd", gates_NA, out_NAD.astype(jnp.float32))


def _run_chosen(x_ND: Array, local_NA: Array, gates_NA: Array, weights: tuple) -> Array:
    """Read each choice's own weights: with fewer choices than experts, as in decoding, the rest need not be read."""
    n_local = weights[0].shape[0]
    here_NA = (local_NA >= 0) & (local_NA < n_local)
    w1_NADF, w3_NADF, w2_NAFD = (w[jnp.where(here_NA, local_NA, 0)] for w in weights)
    gate_NAF, up_NAF = (jnp.einsum("nd,nadf->naf", x_ND, w) for w in (w1_NADF, w3_NADF))
    out_NAD = jnp.einsum("naf,nafd->nad", layers.swiglu(gate_NAF, up_NAF), w2_NAFD)
    gates_NA = jnp.where(here_NA, gates_NA, 0)
    return jnp.einsum("na,nad->nd", gates_NA, out_NAD.astype(jnp.float32))


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
        routed_BTD = _sharded_experts(
            x_BTD, routing.experts, routing.gates, weights, self.cfg.implementation
        )
        out_BTD = routed_BTD + self.shared(x_BTD).astype(jnp.float32)
        return out_BTD.astype(x_BTD.dtype), routing


def _sharded_experts(
    x: Array, experts: Array, gates: Array, weights: tuple, implementation: str | None
) -> Array:
    """Run each device's experts on the tokens of its expert axis, and sum back to each token's device.

    Weights are gathered as they are multiplied; their gradients are summed and cut in float32. Tokens travel in pieces,
    as rows for the worst case, every token on one device, are many times those of the usual one. A batch or a sequence
    that its mesh axes do not divide, such as one prompt's piece, is on every device instead.
    """
    if sharding.axis_size(*sharding.AXES) == 1:
        return _run_flat(x, experts, gates, weights, 0, implementation)
    sizes = {
        name: sharding.axis_size(*sharding.RULES[name])
        for name in ("batch", "sequence", "expert_embed")
    }
    split = x.shape[0] % sizes["batch"] == 0 and x.shape[1] % sizes["sequence"] == 0
    # Without a split the result is the same on every device, which the types of gathered weights would not say.
    embed = "expert_embed" if split and x.shape[2] % sizes["expert_embed"] == 0 else None

    def local(x: Array, experts: Array, gates: Array, weights: tuple) -> Array:
        first_expert = jax.lax.axis_index("expert") * weights[0].shape[0]
        if embed:
            weights = tuple(
                _whole(w, axis, str(x.dtype)) for w, axis in zip(weights, (1, 1, 2), strict=True)
            )

        def run(part: tuple[Array, Array, Array]) -> Array:
            if split:
                part = jax.lax.all_gather(part, "expert", tiled=True)
            out = _run_flat(*part, weights, first_expert, implementation)
            out = jax.lax.psum(out, "tensor")
            if split:
                return jax.lax.psum_scatter(out, "expert", tiled=True)
            return jax.lax.psum(out, "expert")

        return _in_pieces(run, (x, experts, gates), sharding.axis_size("expert") if split else 1)

    token = spec("batch", "sequence") if split else spec()
    weight_specs = (
        spec("experts", embed, "ffn"),
        spec("experts", embed, "ffn"),
        spec("experts", "ffn", embed),
    )
    return sharding.shard_map(local, (token, token, token, weight_specs), token)(
        x, experts, gates, weights
    )


def _run_flat(
    x: Array,
    experts: Array,
    gates: Array,
    weights: tuple,
    first: Array | int,
    implementation: str | None,
) -> Array:
    x_ND, experts_NA, gates_NA = (a.reshape(-1, a.shape[-1]) for a in (x, experts, gates))
    out = run_experts(x_ND, experts_NA, gates_NA, weights, first, implementation)
    return out.reshape(x.shape)


def _in_pieces(run: Callable, part: tuple[Array, Array, Array], gathered: int) -> Array:
    """Apply run to pieces of the sequence, so that no more than MAX_ROWS rows are alive, forward and back."""
    batch, length, n_active = part[1].shape
    pieces = 1
    while batch * length * n_active * gathered > pieces * MAX_ROWS and length % (2 * pieces) == 0:
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
