"""Rows of tokens sorted by expert, and the products of the experts held here."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from dsv32_jax import layers

COUNT_PIECE = 512  # places whose running count is one product
MIN_BLOCK, MAX_BLOCK = 8, 128  # rows that share one expert's weight in the blocked product


class Dispatch(NamedTuple):
    """Rows sorted by expert, each expert's rows padded to whole blocks.

    Attributes:
        token: int32 [M], the token in each row; N where the row is padding.
        choice: int32 [M], its place among the choices, `token * A + a`; N * A where the row is padding.
        row: int32 [N, A], the row of each choice; M where its expert is not local.
        sizes: int32 [E], rows of each local expert, multiples of the block.
    """

    token: Int[Array, " M"]
    choice: Int[Array, " M"]
    row: Int[Array, "N A"]
    sizes: Int[Array, " E"]


def plan_dispatch(
    experts_NA: Int[Array, "N A"],
    n_local: int,
    first_expert: Int[Array, ""] | int,
    block: int,
    most: int | None = None,
) -> Dispatch:
    """Give every choice of a local expert a row; none is dropped.

    Args:
        experts_NA: Chosen experts of each token; negative where there is none.
        n_local: Experts held here.
        first_expert: Index of the first of them.
        block: Rows are padded to multiples of it, expert by expert.
        most: Upper bound, known to the caller, of the choices of local experts; None where all may be.

    Returns:
        The plan.
    """
    n_tokens, n_active = experts_NA.shape
    n_choices = n_tokens * n_active
    local = experts_NA.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < n_local), local, n_local)
    chose_EN = local == jnp.arange(n_local)[:, None]
    upto_EN = running_count(chose_EN)
    sizes = -(-upto_EN[:, -1] // block) * block
    first_row_E = jnp.cumsum(sizes) - sizes
    n_rows = -(-(n_choices if most is None else most) // block) * block + n_local * block
    # A sum over the local experts, of which one was chosen: gathers from small tables compile for half a minute on TPU.
    row = jnp.sum(jnp.where(chose_EN, first_row_E[:, None] + upto_EN - 1, 0), axis=0)
    row = jnp.where(local < n_local, row, n_rows)
    choice = jnp.full(n_rows, n_choices, jnp.int32)
    choice = choice.at[row].set(jnp.arange(n_choices, dtype=jnp.int32), mode="drop")
    row = row.reshape(n_tokens, n_active).astype(jnp.int32)
    return Dispatch(choice // n_active, choice, row, sizes)


def running_count(chose_EN: Bool[Array, "E N"]) -> Int[Array, "E N"]:
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


def block_rows(n_choices: int, n_experts: int) -> int:
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
    block = block_rows(experts_NA.size, n_local)
    plan = plan_dispatch(experts_NA, n_local, first_expert, block)
    x_MD = _to_rows(x_ND, plan.token, plan.row)
    out_MD = multiply_rows(x_MD, (w1_EDF, w3_EDF, w2_EFD), plan.sizes, block, implementation)
    out_NAD = _from_rows(out_MD, plan.token, plan.row)
    return jnp.einsum("na,nad->nd", gates_NA, out_NAD.astype(jnp.float32))


def multiply_rows(
    x_MD: Float[Array, "M D"],
    weights: tuple[Array, Array, Array],
    sizes_E: Int[Array, " E"],
    block: int,
    implementation: str | None = None,
    gates_M: Float[Array, " M"] | None = None,
) -> Float[Array, "M D"]:
    """Apply each row's expert: `w2(gate * silu(w1 x) * w3 x)`.

    Args:
        x_MD: Rows sorted by expert.
        weights: (w1 [E, D, F], w3 [E, D, F], w2 [E, F, D]) in the dtype of `x_MD`.
        sizes_E: int32, rows of each expert, multiples of the block.
        block: Rows that share one expert.
        implementation: Of `grouped_matmul`.
        gates_M: float32 factors; None is 1.

    Returns:
        Rows in the dtype of `x_MD`.
    """
    w1_EDF, w3_EDF, w2_EFD = weights

    def multiply(x: Array, w: Array) -> Array:
        return pallas_kernels.grouped_matmul(
            x, w, sizes_E, align=block, implementation=implementation
        )

    hidden_MF = layers.swiglu(multiply(x_MD, w1_EDF), multiply(x_MD, w3_EDF))
    if gates_M is not None:
        hidden_MF = (gates_M[:, None] * hidden_MF.astype(jnp.float32)).astype(hidden_MF.dtype)
    return multiply(hidden_MF, w2_EFD)


def _run_chosen(x_ND: Array, local_NA: Array, gates_NA: Array, weights: tuple) -> Array:
    """Read each choice's own weights: with fewer choices than experts, as in decoding, the rest need not be read."""
    n_local = weights[0].shape[0]
    here_NA = (local_NA >= 0) & (local_NA < n_local)
    w1_NADF, w3_NADF, w2_NAFD = (w[jnp.where(here_NA, local_NA, 0)] for w in weights)
    gate_NAF, up_NAF = (jnp.einsum("nd,nadf->naf", x_ND, w) for w in (w1_NADF, w3_NADF))
    out_NAD = jnp.einsum("naf,nafd->nad", layers.swiglu(gate_NAF, up_NAF), w2_NAFD)
    gates_NA = jnp.where(here_NA, gates_NA, 0)
    return jnp.einsum("na,nad->nd", gates_NA, out_NAD.astype(jnp.float32))
