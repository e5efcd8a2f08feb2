"""Public ops: exact top-k selection, alone and fused with the indexer's scores."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.indexer_scores import op as scores_op
from pallas_kernels.indexer_scores import reference as scores_reference
from pallas_kernels.topk_select import reference

FOLDER = "pallas_kernels.topk_select."
KERNELS = ("pallas_gpu", "pallas_tpu")


def topk_select(
    scores_TS: Float[Array, "*B T S"],
    *,
    k: int,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    implementation: str | None = None,
) -> Int[Array, "*B T K"]:
    """Select the k largest scores of each row, exactly and repeatably.

    Membership is decided on the float32 values: largest first, ties to the smaller index, -0.0 equal to 0.0;
    NaN and infinities are never selected, nor keys outside [start, end).

    Args:
        scores_TS: float32 scores.
        k: Slots per row, at least 1; may exceed S.
        start: int32, first valid key of each row.
        end: int32, one past the last valid key.
        implementation: None picks the best.

    Returns:
        int32 key indices in ascending order, then -1 where fewer than k keys are valid.

    Raises:
        ValueError: If k < 1, the scores are not float32 or `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, section 2.1; the tie rule is this project's.
    """
    dispatch.check_keyword("topk_select", "k", k, 1)
    if scores_TS.dtype != jnp.float32:
        raise ValueError(f"topk_select: scores must be float32, got {scores_TS.dtype}")
    rows = (math.prod(scores_TS.shape[:-1]), scores_TS.shape[-1])
    check = functools.partial(_check_select, rows, k)
    choices = {name: functools.partial(check, name) for name in KERNELS}
    name = dispatch.choose("topk_select", implementation, {**choices, "reference": None})
    if name != "reference":
        kernel = dispatch.load(FOLDER + name)
        first, last = (x.astype(jnp.int32).reshape(-1) for x in (start, end))
        index = kernel.topk_select(scores_TS.reshape(rows), k=k, start=first, end=last)
        return index.reshape(*scores_TS.shape[:-1], k)

    def one(scores: Array, first: Array, last: Array) -> Array:
        return reference.mask_to_indices(reference.topk_mask(scores, k, first, last), k)

    return dispatch.over_batch(one, scores_TS.ndim - 2)(scores_TS, start, end)


def indexer_topk(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    *,
    k: int,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    causal: bool = False,
    implementation: str | None = None,
) -> Int[Array, "*B T K"]:
    """Select the k best keys of each query by indexer score, without the [T, S] array of scores.

    Equal to `topk_select(indexer_scores(...))`, computed a block of queries at a time.

    Args:
        q_TJX: Index queries.
        k_SX: Index keys.
        w_TJ: Head weights with the scales folded in.
        k: Slots per row, at least 1.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        causal: Promise that `end[t] <= t + 1` and T == S.
        implementation: None picks the best.

    Returns:
        int32 key indices in ascending order, then -1.

    Raises:
        ValueError: If k < 1, `implementation` is unknown, or `causal` is given with T != S.
        NotImplementedError: If the named implementation cannot take the input.
    """
    dispatch.check_keyword("indexer_topk", "k", k, 1)
    dispatch.check_causal("indexer_topk", causal, q_TJX.shape[-3], k_SX.shape[-2])
    name = _choose_fused("indexer_topk", q_TJX, k_SX, k, implementation)
    if name != "reference":
        arrays = (q_TJX, k_SX, w_TJ, start, end)
        return _fused("indexer_topk", arrays, k, q_TJX.ndim - 3, name)

    def finish(mask_TS: Array) -> Array:
        return reference.mask_to_indices(mask_TS, k)

    return _selected(q_TJX, k_SX, w_TJ, k, (start, end), causal, finish)


def indexer_topk_mask(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    *,
    k: int,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    causal: bool = False,
    implementation: str | None = None,
) -> Bool[Array, "*B T S"]:
    """Select as `indexer_topk` does and return the set as a mask, for masked dense attention.

    Args:
        q_TJX: Index queries.
        k_SX: Index keys.
        w_TJ: Head weights with the scales folded in.
        k: Largest number of keys per row, at least 1.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key.
        causal: Promise that `end[t] <= t + 1` and T == S.
        implementation: None picks the best.

    Returns:
        bool, true at the selected keys: one byte for each pair, so meant for short sequences.

    Raises:
        ValueError: If k < 1, `implementation` is unknown, or `causal` is given with T != S.
        NotImplementedError: If the named implementation cannot take the input.
    """
    dispatch.check_keyword("indexer_topk_mask", "k", k, 1)
    dispatch.check_causal("indexer_topk_mask", causal, q_TJX.shape[-3], k_SX.shape[-2])
    n_keys = k_SX.shape[-2]
    name = _choose_fused("indexer_topk_mask", q_TJX, k_SX, k, implementation)
    if name != "reference":
        arrays = (q_TJX, k_SX, w_TJ, start, end)
        return _fused("indexer_topk_mask", arrays, k, q_TJX.ndim - 3, name)

    def finish(mask_TS: Array) -> Array:
        return jnp.pad(mask_TS, ((0, 0), (0, n_keys - mask_TS.shape[1])))

    return _selected(q_TJX, k_SX, w_TJ, k, (start, end), causal, finish)


def _selected(
    q_TJX: Array,
    k_SX: Array,
    w_TJ: Array,
    k: int,
    bounds: tuple[Array, Array],
    causal: bool,
    finish: Callable[[Array], Array],
) -> Array:
    """Score, select and finish one block of queries at a time."""
    block = query_blocks.rows_per_block(k_SX.shape[-2])

    def select_block(rows: tuple[Array, ...], keys_SX: Array) -> Array:
        q, w, first, last = rows
        scores_TS = scores_reference.raw_scores(q, keys_SX, w)
        return finish(reference.topk_mask(scores_TS, k, first, last))

    def one(q: Array, keys: Array, w: Array, first: Array, last: Array) -> Array:
        return query_blocks.map_query_blocks(
            select_block, (q, w, first, last), keys, block=block, causal=causal
        )

    return dispatch.over_batch(one, q_TJX.ndim - 3)(q_TJX, k_SX, w_TJ, *bounds)


def _check_select(shape: tuple[int, ...], k: int, name: str) -> None:
    """Raise NotImplementedError if a kernel cannot select from scores of this shape."""
    if name in (scores_op.TPU, scores_op.TPU_FP8):
        dispatch.require_tpu()
        dispatch.load(FOLDER + scores_op.TPU).check(shape[1], k)
        return
    dispatch.require_hopper()
    kernel = dispatch.load(FOLDER + "pallas_gpu")
    kernel.check(jax.ShapeDtypeStruct(shape, jnp.float32), k)


def _choose_fused(op: str, q_TJX: Array, k_SX: Array, k: int, implementation: str | None) -> str:
    """Choose for scores and selection together: a kernel must take both."""
    choices = scores_op.backends(q_TJX, k_SX, implementation)

    def both(check_scores: Callable[[], None], name: str) -> None:
        check_scores()
        _check_select((q_TJX.shape[-3], k_SX.shape[-2]), k, name)

    fused = {
        name: check and functools.partial(both, check, name) for name, check in choices.items()
    }
    return dispatch.choose(op, implementation, fused)


def _fused(form: str, arrays: tuple[Array, ...], k: int, n_batch_axes: int, name: str) -> Array:
    """Run a fused form, "indexer_topk" or "indexer_topk_mask", on one sequence after the other."""
    if name in (scores_op.TPU, scores_op.TPU_FP8):
        select = getattr(dispatch.load(FOLDER + scores_op.TPU), form)
        select = functools.partial(select, fp8=name == scores_op.TPU_FP8)
    else:
        fused = dispatch.load(FOLDER + "fused_gpu")
        select = functools.partial(getattr(fused, form), scores=scores_op.kernel_of(name))

    def one(sequence: tuple[Array, ...]) -> Array:
        q, keys, w, first, last = sequence
        return select(q, keys, w, k=k, start=first, end=last)

    return dispatch.each_sequence(one, arrays, n_batch_axes)
