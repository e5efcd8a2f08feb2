"""Rollouts as the arrays of microbatches: several in a row of tokens, each a document, or several, of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dsv32_jax import sharding
from train import hosts
from train.head import Kept
from train.rl.rollout import Rollout


class Packed(NamedTuple):
    """A microbatch of rollouts. [B, S, O]: rows, rollouts of a row, drawn tokens of a rollout.

    Stacked microbatches have a first axis more, see `stack`.

    Attributes:
        tokens: int32 [B, T].
        segment_ids: int32 [B, T], 1.. for the contexts of a row's rollouts in order, 0 for padding.
        temperature: float32 [B, T], of the token that the place predicts; 1 where it predicts none.
        kept: Of the places that predict a token that was cut from a set; None where none was.
        experts: int32 [L, B, T, A], -1 where the gate chooses; None without replay.
        place: int32 [B, S, O], the place that predicts each token that was drawn; 0 where there is none.
        mask: bool [B, S, O], whether there is one.
        log_p: float32 [B, S, O], as the sampler reported it.
        rollout: int32 [B, S], which of the packed rollouts; -1 for none.
    """

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    temperature: Float[Array, "B T"]
    kept: Kept | None
    experts: Int[Array, "L B T A"] | None
    place: Int[Array, "B S O"]
    mask: Bool[Array, "B S O"]
    log_p: Float[Array, "B S O"]
    rollout: Int[Array, "B S"]


def plan_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Put sequences into rows, the longest first, each into the fullest row that has room.

    Args:
        lengths: Their lengths.
        row_length: Tokens of a row.

    Returns:
        Which sequences each row holds, longest first.

    Raises:
        ValueError: If one is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > row_length:
            raise ValueError(
                f"a rollout of {lengths[i]} tokens is longer than row_length={row_length}"
            )
        fits = [r for r in range(len(rows)) if room[r] >= lengths[i]]
        if not fits:
            rows.append([])
            room.append(row_length)
            fits = [len(rows) - 1]
        best = min(fits, key=lambda r: (room[r], r))
        rows[best].append(i)
        room[best] -= lengths[i]
    return rows


def pack(
    rollouts: Sequence[Rollout],
    rows: Sequence[Sequence[int]],
    *,
    n_rows: int,
    row_length: int,
    max_tokens: int = 1,
) -> Packed:
    """Lay rollouts out as a microbatch.

    The sizes S, O and of the kept sets are rounded up to powers of two, so that few shapes are ever compiled, and are
    the same on every process.

    Args:
        rollouts: Rollouts.
        rows: Which of them each row holds, see `plan_rows`.
        n_rows: Rows of the microbatch, at least as many; further ones are padding.
        row_length: Tokens of a row.
        max_tokens: O is at least this, so that shorter responses have the same shape.

    Returns:
        numpy arrays.

    Raises:
        ValueError: If a token is not in the set that it is said to be drawn from, or some rollouts have experts and
            others none.
    """
    chosen = [rollouts[i] for row in rows for i in row]
    shape = (n_rows, round_up(hosts.largest(max((len(row) for row in rows), default=1))))
    width = round_up(hosts.largest(max([max_tokens, *(r.n_drawn for r in chosen)])))
    arrays: dict[str, Any] = {
        "tokens": np.zeros((n_rows, row_length), np.int32),
        "segment_ids": np.zeros((n_rows, row_length), np.int32),
        "temperature": np.ones((n_rows, row_length), np.float32),
        "kept": _pack_kept(rollouts, rows, n_rows, row_length),
        "experts": _empty_experts(chosen, n_rows, row_length),
        "place": np.zeros((*shape, width), np.int32),
        "mask": np.zeros((*shape, width), bool),
        "log_p": np.zeros((*shape, width), np.float32),
        "rollout": np.full(shape, -1, np.int32),
    }
    packed = Packed(**arrays)
    for b, row in enumerate(rows):
        first = 0
        for s, i in enumerate(row):
            _put(packed, (b, s, first), i, rollouts[i])
            first += len(rollouts[i].tokens)
    return packed


def _put(packed: Any, where: tuple[int, int, int], i: int, rollout: Rollout) -> None:
    """Write one rollout into row b, slot s, from token `first` on."""
    b, s, first = where
    n, n_drawn = len(rollout.tokens), rollout.n_drawn
    packed.tokens[b, first : first + n] = rollout.tokens
    number = packed.segment_ids[b].max()
    for context in rollout.contexts:
        number += 1
        packed.segment_ids[b, first + context.start : first + context.stop] = number
    predicts = first + rollout.places - 1
    packed.temperature[b, predicts] = rollout.temperature
    packed.place[b, s, :n_drawn] = predicts
    packed.mask[b, s, :n_drawn] = True
    packed.log_p[b, s, :n_drawn] = rollout.log_p
    packed.rollout[b, s] = i
    if packed.experts is not None:
        packed.experts[:, b, first : first + n] = rollout.experts


def _empty_experts(chosen: Sequence[Rollout], n_rows: int, row_length: int) -> np.ndarray | None:
    having = [r.experts for r in chosen if r.experts is not None]
    if not having:
        return None
    if len(having) < len(chosen):
        raise ValueError("some rollouts have experts and others none")
    n_layers, _, n_active = having[0].shape
    return np.full((n_layers, n_rows, row_length, n_active), -1, np.int32)


def _pack_kept(
    rollouts: Sequence[Rollout], rows: Sequence[Sequence[int]], n_rows: int, row_length: int
) -> Kept | None:
    """List the kept sets of each row by the place that predicts the token."""
    if not hosts.largest(any(rollouts[i].kept is not None for row in rows for i in row)):
        return None
    places: list[list[np.ndarray]] = [[] for _ in range(n_rows)]
    tokens: list[list[np.ndarray]] = [[] for _ in range(n_rows)]
    for b, row in enumerate(rows):
        first = 0
        for i in row:
            rollout = rollouts[i]
            if rollout.kept is not None:
                sizes = np.diff(rollout.kept.ends, prepend=0)
                _check_members(rollout, sizes)
                predicts = first + rollout.places - 1
                places[b].append(np.repeat(predicts, sizes))
                tokens[b].append(rollout.kept.tokens)
            first += len(rollout.tokens)
    width = round_up(hosts.largest(max(sum(map(len, row)) for row in tokens)))
    place: Any = np.full((n_rows, width), row_length, np.int32)
    token: Any = np.zeros((n_rows, width), np.int32)
    for b in range(n_rows):
        flat = np.concatenate([*places[b], np.zeros(0, np.int32)])
        place[b, : len(flat)] = flat
        token[b, : len(flat)] = np.concatenate([*tokens[b], np.zeros(0, np.int32)])
    return Kept(place, token)


def _check_members(rollout: Rollout, sizes: np.ndarray) -> None:
    assert rollout.kept is not None
    hits = rollout.kept.tokens == np.repeat(rollout.drawn, sizes)
    found = np.bincount(np.repeat(np.arange(rollout.n_drawn), sizes), weights=hits)
    missing = np.flatnonzero(found == 0)
    if len(missing):
        raise ValueError(
            f"token {missing[0]} of a response, {rollout.drawn[missing[0]]}, is not in the set it was drawn from"
        )


def stack(packed: Packed, n_microbatches: int) -> Packed:
    """Cut rows into microbatches, along a new first axis.

    Args:
        packed: numpy arrays of all their rows.
        n_microbatches: Divides the rows; those of a microbatch follow each other.

    Returns:
        The microbatches: tokens [M, B, T], experts [M, L, B, T, A], and so on.
    """

    def cut(x: np.ndarray) -> np.ndarray:
        return x.reshape(n_microbatches, -1, *x.shape[1:])

    experts: Any = packed.experts
    if experts is not None:
        experts = np.moveaxis(cut(np.moveaxis(experts, 1, 0)), 2, 1)
    rest = jax.tree.map(cut, packed._replace(experts=None))
    return rest._replace(experts=experts)


def on_mesh(microbatches: Packed, n_rows: int) -> Packed:
    """Put stacked microbatches on the context's mesh, rows and tokens where the model has them.

    Args:
        microbatches: numpy arrays, see `stack`. A process has every row of each microbatch, or those alone, in order,
            that its own devices hold.
        n_rows: Rows of a microbatch over all processes.

    Returns:
        Arrays of the whole; without a mesh those on one device.
    """

    def put(where: tuple[str | None, ...], x: Any) -> Any:
        return place_by_axes(x, n_rows, *where)

    return jax.tree.map(put, axes(microbatches), microbatches, is_leaf=lambda x: type(x) is tuple)


def axes(microbatches: Packed) -> Packed:
    """Return the logical axes of stacked microbatches, a tuple in place of each array."""
    token: Any = (None, "batch", "sequence")
    response: Any = (None, "batch", None, None)
    kept: Any = (None, "batch", None)
    experts: Any = (None, *token, None)
    return Packed(
        tokens=token,
        segment_ids=token,
        temperature=token,
        kept=microbatches.kept and Kept(kept, kept),
        experts=experts if microbatches.experts is not None else None,
        place=response,
        mask=response,
        log_p=response,
        rollout=kept,
    )


def place_by_axes(x: np.ndarray, n_rows: int, *logical: str | None) -> Array:
    """Put one array on the context's mesh, see `on_mesh`.

    Args:
        x: The array, or this process's rows of it.
        n_rows: Rows of the whole.
        logical: Of its axes, "batch" once.

    Returns:
        The array.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(x)
    rows = logical.index("batch")
    shape = (*x.shape[:rows], n_rows, *x.shape[rows + 1 :])
    where = P(*logical[:rows], *sharding.fitted(shape[rows:], *logical[rows:]))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, where), x, shape)


def round_up(n: int) -> int:
    """Return the next power of two."""
    return 1 << (n - 1).bit_length()


def take_responses(x_BT: Float[Array, "B T"], packed: Packed) -> Float[Array, "B S O"]:
    """Return what predicts each token of each response; anything where there is none."""
    flat = packed.place.reshape(len(packed.place), -1)
    return jnp.take_along_axis(x_BT, flat, axis=1).reshape(packed.place.shape)
