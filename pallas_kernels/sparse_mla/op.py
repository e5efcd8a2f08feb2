"""Public op: attention to listed keys, in absorbed MQA form."""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.sparse_mla import reference

BACKENDS = {"reference": None}


def sparse_mla(
    q_THD: Float[Array, "*B T H D"],
    kv_SD: Float[Array, "*B S D"],
    topk_idx_TK: Int[Array, "*B T K"],
    *,
    scale: float,
    value_dim: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B T H U"], Float[Array, "*B T H"]]:
    """Attend to the listed keys of one key-value head that all query heads share.

    `out[t, h] = sum_i softmax_i(scale * q[t, h] . kv[idx[t, i]]) kv[idx[t, i], :value_dim]` over the valid slots i.
    Slots with -1 or an index outside [0, S) are ignored; a duplicate counts once a slot.

    Args:
        q_THD: Absorbed queries (latent part first, then rope part).
        kv_SD: Latent and rope key of each position.
        topk_idx_TK: int32 key indices, any order; the caller has made them causal.
        scale: Factor on the logits.
        value_dim: The values are the first `value_dim` columns of `kv_SD`, in [1, D].
        implementation: None picks the best.

    Returns:
        (out [T, H, value_dim] in the dtype of `kv_SD`, lse float32, natural log). A row without a valid slot gives
        out 0, lse -inf and zero gradients.

    Raises:
        ValueError: If `value_dim` is outside [1, D] or `implementation` is unknown.

    Source: DeepSeek-V3.2 report, eq. 2 and appendix A (MQA mode).
    """
    dispatch.choose("sparse_mla", implementation, BACKENDS)
    dim = kv_SD.shape[-1]
    if not 1 <= value_dim <= dim:
        raise ValueError(f"sparse_mla: value_dim={value_dim} must be in [1, {dim}]")
    n_slots = topk_idx_TK.shape[-1]
    block = query_blocks.rows_per_block(n_slots * max(dim, q_THD.shape[-2]))

    def attend_block(rows: tuple[Array, Array], kv: Array) -> tuple[Array, Array]:
        q, topk_idx = rows
        return reference.sparse_mla(q, kv, topk_idx, scale, value_dim)

    def one(q: Array, kv: Array, topk_idx: Array) -> tuple[Array, Array]:
        return query_blocks.map_query_blocks(
            attend_block, (q, topk_idx), kv, block=block, causal=False
        )

    return dispatch.over_batch(one, q_THD.ndim - 3)(q_THD, kv_SD, topk_idx_TK)
