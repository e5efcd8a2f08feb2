"""Public op: attention over a range of keys, in MHA form."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.dense_mla import reference

FOLDER = "pallas_kernels.dense_mla."


def dense_mla(
    q_THD: Float[Array, "*B T H D"],
    k_SHD: Float[Array, "*B S H D"],
    v_SHU: Float[Array, "*B S H U"],
    *,
    scale: float,
    start: Int[Array, "*B T"],
    end: Int[Array, "*B T"],
    selected: Bool[Array, "*B T S"] | None = None,
    causal: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B T H U"], Float[Array, "*B T H"]]:
    """Attend to the keys in [start, end), all of them or the selected ones.

    `out[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, h]) v[s, h]`. Logits, softmax and both sums are float32;
    the weights are cast to the dtype of `v` for the product, as flash kernels do.

    Args:
        q_THD: Queries.
        k_SHD: Keys, one per head.
        v_SHU: Values, one per head.
        scale: Factor on the logits.
        start: int32, first valid key of each query.
        end: int32, one past the last valid key; `end <= start` is an empty row.
        selected: Optional mask shared by all heads; a key must be in range and selected.
        causal: Promise that `end[t] <= t + 1` and T == S; later keys are then never computed.
        implementation: None picks the best.

    Returns:
        (out in the dtype of `v`, lse float32, natural log). An empty row gives out 0, lse -inf and zero gradients.

    Raises:
        ValueError: If `implementation` is unknown, `causal` is given with T != S, queries and keys differ in width, or
            `scale` is traced.
        NotImplementedError: If the named implementation cannot take the input.
    """
    dispatch.check_causal("dense_mla", causal, q_THD.shape[-3], k_SHD.shape[-3])
    dispatch.check_width("dense_mla", q_THD.shape[-1], k_SHD.shape[-1])
    scale = dispatch.number("dense_mla", "scale", scale)

    def check_gpu() -> None:
        dispatch.require_hopper()
        dispatch.load(FOLDER + "pallas_gpu").check(q_THD, k_SHD, v_SHU, scale)

    def check_tpu() -> None:
        dispatch.require_tpu()
        dispatch.load(FOLDER + "pallas_tpu").check(q_THD, k_SHD, v_SHU)

    choices = {"pallas_gpu": check_gpu, "pallas_tpu": check_tpu, "reference": None}
    name = dispatch.choose("dense_mla", implementation, choices)
    if name != "reference":
        ranges = {"start": start, "end": end, "selected": selected}
        return dispatch.load(FOLDER + name).dense_mla(q_THD, k_SHD, v_SHU, scale=scale, **ranges)
    if 0 in (*q_THD.shape, *k_SHD.shape):
        out = jnp.zeros((*q_THD.shape[:-1], v_SHU.shape[-1]), v_SHU.dtype)
        return out, jnp.full(q_THD.shape[:-1], -jnp.inf, jnp.float32)
    block = query_blocks.rows_per_block(k_SHD.shape[-3] * k_SHD.shape[-2])

    def attend_block(rows: tuple, keys: tuple[Array, Array]) -> tuple[Array, Array]:
        q, first, last, chosen = rows
        k, v = keys
        allowed_TS = reference.allowed_keys(first, last, chosen, k.shape[0])
        return reference.dense_mla(q, k, v, allowed_TS, scale)

    def one(q: Array, k: Array, v: Array, first: Array, last: Array, *chosen: Array) -> tuple:
        rows = (q, first, last, chosen[0] if chosen else None)
        return query_blocks.map_query_blocks(attend_block, rows, (k, v), block=block, causal=causal)

    arguments = (q_THD, k_SHD, v_SHU, start, end) + (() if selected is None else (selected,))
    return dispatch.over_batch(one, q_THD.ndim - 3)(*arguments)
