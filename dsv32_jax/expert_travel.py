"""Tokens travel to the devices that hold their experts, and their experts' outputs back.

A token's row goes once to a device, whichever of its experts lie there. Back come the rows of each choice, in the
model's dtype: fewer bytes than one float32 sum a device, and the sum of a token's choices is then taken where the token
is, in float32 and in the order of the choices, so that it does not depend on the mesh.

Nothing is dropped however uneven the load: a device takes a bounded number of choices at a time, SLACK times an even
load's, in as many rounds as the fullest device needs. That number is known only when the step runs, so the rounds are a
`while` loop with a backward pass written here, which sends the tokens again and keeps nothing of a round.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv32_jax import expert_rows, sharding
from dsv32_jax.config import MoEConfig
from dsv32_jax.exchange import Route, exchange
from dsv32_jax.expert_rows import Dispatch

SLACK = 1.5  # choices that a device takes in a round, over those of an even load
ZEROS = 8  # rows of zeros behind the tokens of a round, of which padding is a copy: a tile of a TPU
LANES = (
    128  # of a TPU's tile: rows that travel are cut into tiles, so that each is one run of memory
)
AXIS = "expert"


class Sizes(NamedTuple):
    """What is known before the step runs.

    Attributes:
        n_devices: n, devices of the expert axis.
        n_local: Experts on each.
        reach: Most devices that one token's experts lie on.
        ragged: See `exchange`.
        implementation: Of `grouped_matmul`.
    """

    n_devices: int
    n_local: int
    reach: int
    ragged: bool
    implementation: str | None = None


class Plan(NamedTuple):
    """What a device sends, sorted by receiver and then by token.

    Attributes:
        token: int32 [S], the token in each row to send; N where the row is padding.
        back: int32 [N, A], the row that each choice comes back to.
        round: int32 [n, N], in which round a token goes to a device; -1 where it does not.
        weight: int32 [n, N], its choices there.
        first_row: int32 [n], the first row to send to each device.
        first_back: int32 [n], the first row that comes back from each device.
        n_rounds: int32 [], the same on every device of the mesh.
    """

    token: Int[Array, " S"]
    back: Int[Array, "N A"]
    round: Int[Array, "n N"]
    weight: Int[Array, "n N"]
    first_row: Int[Array, " n"]
    first_back: Int[Array, " n"]
    n_rounds: Int[Array, ""]


class Arrived(NamedTuple):
    """The tokens of one round, at the device that holds their experts.

    Attributes:
        there: The way of the tokens to here.
        back: The way of their choices back.
        rows: The choices' rows, sorted by expert.
        returning: int32 [R], the row of each choice, sorted by sender, token and choice.
        block: Rows of one expert are padded to multiples of it.
    """

    there: Route
    back: Route
    rows: Dispatch
    returning: Int[Array, " R"]
    block: int


def reach(cfg: MoEConfig, n_devices: int) -> int:
    """Return the most devices that the experts of one token lie on.

    Devices hold consecutive experts, as groups do, so that a group lies on neighbours of the expert axis and a token
    goes to `n_active_groups` such parts of it.

    Args:
        cfg: Experts, groups and choices.
        n_devices: Devices of the expert axis; divides the experts.

    Returns:
        Devices.
    """
    n_local = cfg.n_experts // n_devices
    widest = max(
        (first + cfg.group_size - 1) // n_local - first // n_local + 1
        for first in range(0, cfg.n_experts, cfg.group_size)
    )
    return min(n_devices, cfg.n_active, cfg.n_active_groups * widest)


def run_travelling(
    x_ND: Float[Array, "N D"],
    experts_NA: Int[Array, "N A"],
    gates_NA: Float[Array, "N A"],
    weights: tuple[Array, Array, Array],
    sizes: Sizes,
) -> Float[Array, "N D"]:
    """Sum the gated outputs of each token's experts, under `jax.shard_map`; every argument is of type `sharding.vary`.

    Args:
        x_ND: This device's tokens.
        experts_NA: int32, their chosen experts.
        gates_NA: float32 weights.
        weights: (w1 [E, D, F], w3 [E, D, F], w2 [E, F, D]) of the experts here.
        sizes: What is known before.

    Returns:
        float32 sums; where the hidden width is cut along an axis, of this device's part of it. The gradient takes the
        cotangent in the dtype of `x_ND`, to which the caller rounds the sum.
    """
    w1_EDF, w3_EDF, w2_EFD = (w.astype(x_ND.dtype) for w in weights)
    width = LANES if x_ND.shape[1] % LANES == 0 else x_ND.shape[1]
    tiles = x_ND.reshape(x_ND.shape[0], -1, width)
    out = _travel(tiles, experts_NA, gates_NA, (w1_EDF, w3_EDF, w2_EFD), sizes)
    return out.reshape(x_ND.shape)


def _budget(experts_NA: Array, sizes: Sizes) -> int:
    """Return the choices of a device's queue in which the tokens of one round begin."""
    n_tokens, n_active = experts_NA.shape
    worst = sizes.n_devices * n_tokens * min(n_active, sizes.n_local)
    return min(worst, max(1, round(SLACK * n_tokens * n_active)))


def plan_travel(experts_NA: Int[Array, "N A"], sizes: Sizes) -> Plan:
    """Give every token a place in the queue of each device that holds one of its experts.

    A device's queue has the tokens of the first device of the axis, then of the second, and so on; a token belongs to
    the round in which its first choice falls.

    Args:
        experts_NA: Chosen experts of this device's tokens.
        sizes: What is known before.

    Returns:
        The plan.
    """
    n_tokens, n_active = experts_NA.shape
    n = sizes.n_devices
    device_n = jnp.arange(n, dtype=jnp.int32)
    chose = experts_NA.reshape(-1) // sizes.n_local == device_n[:, None]  # [n, N * A]
    upto = expert_rows.running_count(chose)
    upto_nN = upto.reshape(n, n_tokens, n_active)[:, :, -1]
    before_nN = jnp.pad(upto_nN, ((0, 0), (1, 0)))[:, :-1]
    goes_nN = upto_nN > before_nN
    rank_nN = expert_rows.running_count(goes_nN)
    first_row, first_back = (jnp.cumsum(a[:, -1]) - a[:, -1] for a in (rank_nN, upto))

    queued = jax.lax.all_gather(upto[:, -1], AXIS)  # [n senders, n]
    earlier = jnp.where(device_n[:, None] < jax.lax.axis_index(AXIS), queued, 0)
    budget = _budget(experts_NA, sizes)
    round_nN = (jnp.sum(earlier, axis=0)[:, None] + before_nN) // budget
    n_rounds = -(-jnp.max(jnp.sum(queued, axis=0)) // budget)

    n_rows = n_tokens * sizes.reach
    place = jnp.where(goes_nN, first_row[:, None] + rank_nN - 1, n_rows)
    token = jnp.full(n_rows, n_tokens, jnp.int32)
    token = token.at[place].set(
        jnp.broadcast_to(jnp.arange(n_tokens, dtype=jnp.int32), place.shape), mode="drop"
    )
    back = jnp.sum(jnp.where(chose, first_back[:, None] + upto - 1, 0), axis=0)
    return Plan(
        token=token,
        back=back.reshape(n_tokens, n_active),
        round=jnp.where(goes_nN, round_nN, -1),
        weight=upto_nN - before_nN,
        first_row=first_row,
        first_back=first_back,
        n_rounds=jax.lax.pmax(n_rounds, sharding.AXES),
    )


def _routes(plan: Plan, round_: Array) -> tuple[Route, Route]:
    """Return the ways there and back of one round, of which each device learns from the senders."""
    now, gone = plan.round == round_, (plan.round >= 0) & (plan.round < round_)
    rows, rows_gone = (jnp.sum(a, axis=1, dtype=jnp.int32) for a in (now, gone))
    choices, choices_gone = (
        jnp.sum(jnp.where(a, plan.weight, 0), axis=1, dtype=jnp.int32) for a in (now, gone)
    )
    sent = jnp.stack([rows, choices, plan.first_back + choices_gone])
    table = jax.lax.all_gather(sent, AXIS)  # [n senders, 3, n]
    me = jax.lax.axis_index(AXIS)
    to_me = jax.lax.dynamic_index_in_dim(table, me, axis=2, keepdims=False)
    earlier = jnp.arange(table.shape[0])[:, None] < me
    there = Route(
        start=plan.first_row + rows_gone,
        length=rows,
        place=jnp.sum(jnp.where(earlier, table[:, 0], 0), axis=0),
        arriving=to_me[:, 0],
    )
    back = Route(
        start=jnp.cumsum(to_me[:, 1]) - to_me[:, 1],
        length=to_me[:, 1],
        place=to_me[:, 2],
        arriving=choices,
    )
    return there, back


def _arrive(plan: Plan, experts_NA: Array, round_: Array, sizes: Sizes) -> Arrived:
    """Learn which tokens come in a round and give each of their choices of experts here a row."""
    there, back = _routes(plan, round_)
    n_tokens, n_active = experts_NA.shape
    none = sharding.vary(jnp.full((_tokens_of_a_round(experts_NA, sizes), n_active), -1, jnp.int32))
    experts_CA = _send(_pick(experts_NA, plan.token), none, there, n_tokens, sizes)
    most = _budget(experts_NA, sizes) + min(n_active, sizes.n_local) - 1
    block = expert_rows.block_rows(n_tokens * n_active, sizes.n_local)
    first = jax.lax.axis_index(AXIS) * sizes.n_local
    rows = expert_rows.plan_dispatch(experts_CA, sizes.n_local, first, block, most)
    n_rows = rows.choice.shape[0]
    here = (rows.row < n_rows).reshape(1, -1)
    rank = jnp.where(here, expert_rows.running_count(here) - 1, most)[0]
    returning = jnp.full(most, n_rows, jnp.int32).at[rank].set(rows.row.reshape(-1), mode="drop")
    return Arrived(there, back, rows, returning, block)


def _tokens_of_a_round(experts_NA: Array, sizes: Sizes) -> int:
    return min(_budget(experts_NA, sizes), sizes.n_devices * experts_NA.shape[0]) + ZEROS


def _pick(rows: Array, index: Array) -> Array:
    """Copy rows; past the end the last, where nobody reads it or it is 0: filling in would be a pass of its own."""
    return rows.at[index].get(mode="clip")


def _send(rows: Array, into: Array, there: Route, n_tokens: int, sizes: Sizes) -> Array:
    longest = min(n_tokens, into.shape[0])
    return exchange(rows, into, there, AXIS, longest=longest, ragged=sizes.ragged)


def _bring_rows(tokens: Array, arrived: Arrived, experts_NA: Array, sizes: Sizes) -> Array:
    """Send rows once a device and copy them to each of their choices there, as rows [M, D] of products."""
    # Rows that nothing is written to are not read either, but for the last, which is padding's.
    into = jnp.empty((_tokens_of_a_round(experts_NA, sizes), *tokens.shape[1:]), tokens.dtype)
    into = sharding.vary(into.at[-ZEROS:].set(0))
    here = _send(tokens, into, arrived.there, experts_NA.shape[0], sizes)
    rows = _pick(here, arrived.rows.token)
    return rows.reshape(rows.shape[0], -1)


def _return_rows(
    rows: Array, into: Array, arrived: Arrived, experts_NA: Array, sizes: Sizes
) -> Array:
    """Send each choice's row back to its token's device."""
    sent = _pick(rows.reshape(-1, *into.shape[1:]), arrived.returning)
    longest = min(experts_NA.shape[0] * min(experts_NA.shape[1], sizes.n_local), sent.shape[0])
    return exchange(sent, into, arrived.back, AXIS, longest=longest, ragged=sizes.ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _travel(x: Array, experts_NA: Array, gates_NA: Array, weights: tuple, sizes: Sizes) -> Array:
    """Do the work of `run_travelling` on tokens cut into tiles, [N, tiles, width]."""
    plan = plan_travel(experts_NA, sizes)
    tokens = _pick(x, plan.token)

    def run_round(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        round_, back = carry
        arrived = _arrive(plan, experts_NA, round_, sizes)
        x_MD = _bring_rows(tokens, arrived, experts_NA, sizes)
        out_MD = expert_rows.multiply_rows(
            x_MD, weights, arrived.rows.sizes, arrived.block, sizes.implementation
        )
        return round_ + 1, _return_rows(out_MD, back, arrived, experts_NA, sizes)

    back = sharding.vary(jnp.empty((experts_NA.size, *x.shape[1:]), x.dtype))
    back = _pick(_rounds(plan, run_round, back), plan.back)
    return jnp.einsum("na,natd->ntd", gates_NA, back.astype(jnp.float32))


def _rounds(plan: Plan, run_round: Any, carried: Any) -> Any:
    start = (jnp.zeros((), jnp.int32), carried)
    return jax.lax.while_loop(lambda carry: carry[0] < plan.n_rounds, run_round, start)[1]


def _travel_fwd(
    x: Array, experts_NA: Array, gates_NA: Array, weights: tuple, sizes: Sizes
) -> tuple[Array, tuple]:
    saved = (x, experts_NA, gates_NA, weights)
    return _travel(*saved, sizes), saved


def _travel_bwd(sizes: Sizes, saved: tuple, d_out: Array) -> tuple:
    """Send tokens and cotangents once a device; gradients of rows and gates come back by choice.

    Here the gate stands before the last product, which it commutes with, so that its gradient needs no output.
    """
    x, experts_NA, gates_NA, weights = saved
    plan = plan_travel(experts_NA, sizes)
    tokens, d_tokens, gates = (_pick(a, plan.token) for a in (x, d_out.astype(x.dtype), gates_NA))

    def run_round(carry: tuple[Array, tuple]) -> tuple[Array, tuple]:
        round_, (dx_back, d_gates_back, d_weights) = carry
        arrived = _arrive(plan, experts_NA, round_, sizes)
        x_MD, d_out_MD = (_bring_rows(a, arrived, experts_NA, sizes) for a in (tokens, d_tokens))
        gates_M = _bring_gates(gates, arrived, experts_NA, sizes)

        def multiply(x_MD: Array, gates_M: Array, weights: tuple) -> Array:
            return expert_rows.multiply_rows(
                x_MD, weights, arrived.rows.sizes, arrived.block, sizes.implementation, gates_M
            )

        dx_MD, d_gates_M, d_round = jax.vjp(multiply, x_MD, gates_M, weights)[1](d_out_MD)
        dx_back = _return_rows(dx_MD, dx_back, arrived, experts_NA, sizes)
        d_gates_back = _return_rows(d_gates_M, d_gates_back, arrived, experts_NA, sizes)
        return round_ + 1, (dx_back, d_gates_back, jax.tree.map(jnp.add, d_weights, d_round))

    backs = (
        jnp.empty((experts_NA.size, *x.shape[1:]), x.dtype),
        jnp.empty((experts_NA.size, 1), jnp.float32),
    )
    carried = (*sharding.vary(backs), jax.tree.map(jnp.zeros_like, weights))
    dx_back, d_gates_back, d_weights = _rounds(plan, run_round, carried)
    dx, d_gates = (_pick(a, plan.back) for a in (dx_back, d_gates_back))
    return jnp.sum(dx.astype(jnp.float32), axis=1).astype(x.dtype), None, d_gates[..., 0], d_weights


def _bring_gates(gates: Array, arrived: Arrived, experts_NA: Array, sizes: Sizes) -> Array:
    """Send tokens' gates and give each row its own; 0 to padding."""
    into = jnp.zeros((_tokens_of_a_round(experts_NA, sizes), experts_NA.shape[1]), jnp.float32)
    here = _send(gates, sharding.vary(into), arrived.there, experts_NA.shape[0], sizes)
    return here.reshape(-1).at[arrived.rows.choice].get(mode="fill", fill_value=0)


_travel.defvjp(_travel_fwd, _travel_bwd)
