"""Public op: attention to listed rows of a paged cache, in absorbed MQA form."""

import math

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.paged_mla import layout, reference

FOLDER = "pallas_kernels.paged_mla."


def paged_mla(
    q_THD: Float[Array, "*B T H D"],
    cache: layout.Parts | layout.Records,
    rows_TK: Int[Array, "*B T K"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B T H C"], Float[Array, "*B T H"]]:
    """Attend to the listed rows of a cache that all sequences share; only those rows are read.

    As `sparse_mla` with `kv = [latent, rope]` and `value_dim = C`, but the rows are the cache's own, wherever a
    sequence's pages are. Forward only.

    Args:
        q_THD: Absorbed queries, C latent dims and R rope dims.
        cache: Latents and rope keys of every row, as `layout` keeps them: the kernels for GPUs take parts, those for
            TPUs records, the definition both.
        rows_TK: int32 cache rows, any order; slots outside [0, N) are ignored.
        scale: Factor on the logits.
        implementation: None picks the best.

    Returns:
        (attended latents in the dtype of the rope keys, lse float32, natural log). A row without a valid slot gives
        out 0 and lse -inf.

    Raises:
        ValueError: If the widths do not add up, a quantised latent lacks its scales or `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, appendix A (MQA mode, decoding).
    """
    row = cache.format
    dim, width = q_THD.shape[-1], row.latent_dim + row.rope_dim
    if dim != width:
        raise ValueError(f"paged_mla: queries have {dim} dims, latent and rope key {width}")
    scale = dispatch.number("paged_mla", "scale", scale)
    if isinstance(cache, layout.Parts) and row.quantised != (cache.scale is not None):
        has = "needs" if row.quantised else "has no"
        raise ValueError(f"paged_mla: a {cache.latent.dtype} latent {has} scales")

    def check() -> None:
        dispatch.require_hopper()
        if not isinstance(cache, layout.Parts):
            raise NotImplementedError("takes a cache in parts")
        kernel = dispatch.load(FOLDER + "gluon_gpu")
        latent, rope, scales = cache
        kernel.check(q_THD, latent, rope, scale=scale, latent_scale_NG=scales)

    def check_tpu() -> None:
        dispatch.require_tpu()
        dispatch.load(FOLDER + "pallas_tpu").check(q_THD, cache, rows_TK)

    choices = {"gluon_gpu": check, "pallas_tpu": check_tpu, "reference": None}
    name = dispatch.choose("paged_mla", implementation, choices)
    batch, n_slots = rows_TK.shape[:-1], rows_TK.shape[-1]
    n_queries = math.prod(batch)
    q, rows = q_THD.reshape(n_queries, *q_THD.shape[-2:]), rows_TK.reshape(n_queries, n_slots)
    if name == "reference":
        out = _reference(q, rows, cache, scale)
    elif isinstance(cache, layout.Parts):
        latent, rope, scales = cache
        out = dispatch.load(FOLDER + name).paged_mla(q, latent, rope, scales, rows, scale)
    else:
        out = dispatch.load(FOLDER + name).paged_mla(q, cache, rows, scale)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def _reference(
    q_THD: Array, rows_TK: Array, cache: layout.Parts | layout.Records, scale: float
) -> tuple[Array, Array]:
    """Run the definition a block of queries at a time."""
    widest = max(q_THD.shape[-1], q_THD.shape[-2])
    block = query_blocks.rows_per_block(rows_TK.shape[-1] * widest)

    def attend_block(rows: tuple[Array, Array], cache: layout.Parts | layout.Records) -> tuple:
        q, listed = rows
        return reference.paged_mla(q, cache, listed, scale)

    return query_blocks.map_query_blocks(
        attend_block, (q_THD, rows_TK), cache, block=block, causal=False
    )
