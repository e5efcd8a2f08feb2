"""Public op: lightning indexer scores."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.indexer_scores import reference

FP8 = "pallas_gpu_fp8"
TPU = "pallas_tpu"
TPU_FP8 = "pallas_tpu_fp8"
FOLDER = "pallas_kernels.indexer_scores."


def backends(
    q_TJX: Array, k_SX: Array, implementation: str | None
) -> dict[str, Callable[[], None] | None]:
    """Return the implementations and their checks, best first.

    FP8 products run only where they are named: Hopper's tensor cores add them with fewer bits than selection needs, and
    nobody has seen what a TPU's do.
    """

    def check(fp8: bool) -> None:
        dispatch.require_hopper()
        dispatch.load(FOLDER + "pallas_gpu").check(q_TJX, k_SX, fp8=fp8)

    def check_tpu() -> None:
        dispatch.require_tpu()
        dispatch.load(FOLDER + TPU).check(q_TJX, k_SX)

    named: dict[str, Callable[[], None]] = {
        FP8: functools.partial(check, True),
        TPU_FP8: check_tpu,
    }
    asked = {name: named[name] for name in named if name == implementation}
    gpu = functools.partial(check, False)
    return {**asked, "pallas_gpu": gpu, TPU: check_tpu, "reference": None}


def kernel_of(name: str) -> Callable[..., Array]:
    """Return the scoring function of an implementation that is not the reference."""
    if name in (TPU, TPU_FP8):
        return functools.partial(dispatch.load(FOLDER + TPU).scores, fp8=name == TPU_FP8)
    return functools.partial(dispatch.load(FOLDER + "pallas_gpu").scores, fp8=name == FP8)


def indexer_scores(
    q_TJX: Float[Array, "*B T J X"],
    k_SX: Float[Array, "*B S X"],
    w_TJ: Float[Array, "*B T J"],
    *,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    causal: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*B T S"]:
    """Score each key for each query with the lightning indexer.

    `I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s])` for start[t] <= s < end[t], `-inf` elsewhere. Products
    accumulate in float32. The head and dimension scales (J^-0.5, X^-0.5) belong in `w`.

    Args:
        q_TJX: Index queries, float, any leading batch axes.
        k_SX: Index keys, one per position, shared by the J heads.
        w_TJ: Head weights, any sign.
        start: int32, first valid key of each query, in [0, S].
        end: int32, one past the last valid key, in [0, S]; `end <= start` is an empty row.
        causal: Promise that `end[t] <= t + 1` and T == S; later keys are then never computed.
        implementation: None picks the best; "pallas_gpu_fp8" and "pallas_tpu_fp8", never picked, multiply e4m3
            operands, one scale a row: on a GPU scores then differ in their fourth digit.

    Returns:
        float32 scores. A NaN input gives NaN where it is used.

    Raises:
        ValueError: If `implementation` is unknown, or `causal` is given with T != S.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, eq. 1.
    """
    dispatch.check_causal("indexer_scores", causal, q_TJX.shape[-3], k_SX.shape[-2])
    choices = backends(q_TJX, k_SX, implementation)
    name = dispatch.choose("indexer_scores", implementation, choices)
    if name != "reference":
        return _on_kernels(q_TJX, k_SX, w_TJ, start, end, name)
    n_keys = k_SX.shape[-2]
    block = query_blocks.rows_per_block(n_keys)

    def block_scores(rows: tuple[Array, ...], k_SX: Array) -> Array:
        q, w, first, last = rows
        scores_TS = reference.indexer_scores(q, k_SX, w, first, last)
        return jnp.pad(scores_TS, ((0, 0), (0, n_keys - k_SX.shape[0])), constant_values=-jnp.inf)

    def one(q: Array, k: Array, w: Array, first: Array, last: Array) -> Array:
        return query_blocks.map_query_blocks(
            block_scores, (q, w, first, last), k, block=block, causal=causal
        )

    return dispatch.over_batch(one, q_TJX.ndim - 3)(q_TJX, k_SX, w_TJ, start, end)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _on_kernels(q: Array, k: Array, w: Array, start: Array, end: Array, name: str) -> Array:
    """Score by a kernel; the derivative is another kernel's."""
    return kernel_of(name)(q, k, w, start, end)


def _on_kernels_forward(
    q: Array, k: Array, w: Array, start: Array, end: Array, name: str
) -> tuple[Array, tuple]:
    return _on_kernels(q, k, w, start, end, name), (q, k, w, start, end)


def _on_kernels_backward(name: str, residuals: tuple, d_scores: Array) -> tuple:
    q, k, w, start, end = residuals
    place_S = jnp.arange(k.shape[-2], dtype=jnp.int32)
    inside = (start[..., None] <= place_S) & (place_S < end[..., None])
    # The products of a gradient are never in FP8.
    backend = TPU if name in (TPU, TPU_FP8) else "pallas_gpu"
    kernel = dispatch.load(f"pallas_kernels.indexer_kl.{backend}_score_gradients")
    dq, dk, dw = kernel.score_gradients(q, k, w, jnp.where(inside, d_scores, 0.0), start, end)
    return dq.astype(q.dtype), dk.astype(k.dtype), dw.astype(w.dtype), None, None


_on_kernels.defvjp(_on_kernels_forward, _on_kernels_backward)
