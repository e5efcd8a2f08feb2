"""Public op: attention to listed rows of a paged cache, in absorbed MQA form."""

import math

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, query_blocks
from pallas_kernels.paged_mla import reference

FOLDER = "pallas_kernels.paged_mla."


def paged_mla(
    q_THD: Float[Array, "*B T H D"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    rows_TK: Int[Array, "*B T K"],
    *,
    scale: float,
    latent_scale_NG: Float[Array, "N G"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B T H C"], Float[Array, "*B T H"]]:
    """Attend to the listed rows of a cache that all sequences share; only those rows are read.

    As `sparse_mla` with `kv = [latent, rope]` and `value_dim = C`, but the two parts lie apart and the rows are the
    cache's own, wherever a sequence's pages are. Forward only.

    Args:
        q_THD: Absorbed queries, C latent dims and R rope dims.
        latent_NC: Latents of every cache row, float, or float8_e4m3fn with `latent_scale_NG`.
        rope_NR: Rope keys of every cache row.
        rows_TK: int32 cache rows, any order; slots outside [0, N) are ignored.
        scale: Factor on the logits.
        latent_scale_NG: float32, one power of two per block of C / G latent dims; None for an unquantised cache.
        implementation: None picks the best.

    Returns:
        (attended latents in the dtype of `rope_NR`, lse float32, natural log). A row without a valid slot gives out 0
        and lse -inf.

    Raises:
        ValueError: If the widths do not add up, a quantised latent lacks its scales or `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.

    Source: DeepSeek-V3.2 report, appendix A (MQA mode, decoding).
    """
    dim, width = q_THD.shape[-1], latent_NC.shape[-1] + rope_NR.shape[-1]
    if dim != width:
        raise ValueError(f"paged_mla: queries have {dim} dims, latent and rope key {width}")
    scale = dispatch.number("paged_mla", "scale", scale)
    if (latent_NC.dtype.itemsize == 1) != (latent_scale_NG is not None):
        raise ValueError(
            f"paged_mla: a {latent_NC.dtype} latent {'needs' if latent_scale_NG is None else 'has no'} scales"
        )

    def check() -> None:
        dispatch.require_hopper()
        dispatch.load(FOLDER + "gluon_gpu").check(
            q_THD, latent_NC, rope_NR, scale=scale, latent_scale_NG=latent_scale_NG
        )

    def check_tpu() -> None:
        dispatch.require_tpu()
        kernel = dispatch.load(FOLDER + "pallas_tpu")
        arrays = (q_THD, latent_NC, rope_NR, rows_TK)
        kernel.check(*arrays, scale=scale, latent_scale_NG=latent_scale_NG)

    choices = {"gluon_gpu": check, "pallas_tpu": check_tpu, "reference": None}
    name = dispatch.choose("paged_mla", implementation, choices)
    batch, n_slots = rows_TK.shape[:-1], rows_TK.shape[-1]
    n_queries = math.prod(batch)
    q, rows = q_THD.reshape(n_queries, *q_THD.shape[-2:]), rows_TK.reshape(n_queries, n_slots)
    if name == "reference":
        out = _reference(q, rows, (latent_NC, rope_NR, latent_scale_NG), scale)
    else:
        kernel = dispatch.load(FOLDER + name)
        out = kernel.paged_mla(q, latent_NC, rope_NR, latent_scale_NG, rows, scale)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def _reference(
    q_THD: Array, rows_TK: Array, cache: tuple[Array, Array, Array | None], scale: float
) -> tuple[Array, Array]:
    """Run the definition a block of queries at a time."""
    widest = max(q_THD.shape[-1], q_THD.shape[-2])
    block = query_blocks.rows_per_block(rows_TK.shape[-1] * widest)

    def attend_block(rows: tuple[Array, Array], cache: tuple) -> tuple[Array, Array]:
        q, listed = rows
        latent, rope, latent_scale = cache
        return reference.paged_mla(q, latent, rope, latent_scale, listed, scale)

    return query_blocks.map_query_blocks(
        attend_block, (q_THD, rows_TK), cache, block=block, causal=False
    )
