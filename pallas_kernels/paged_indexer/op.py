"""Public op: exact top-k selection by the indexer over keys that lie in pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_indexer import reference
from pallas_kernels.topk_select.op import indexer_topk

GLUON = "pallas_kernels.paged_indexer.gluon_gpu"
TPU = "pallas_kernels.paged_indexer.pallas_tpu"
MAX_SCORES = 2**29  # held at a time on a GPU: 2 GiB


def paged_indexer_topk(
    q_TJX: Float[Array, "B T J X"],
    k_NX: Float[Array, "N X"],
    w_TJ: Float[Array, "B T J"],
    table_BP: Int[Array, "B P"],
    *,
    k: int,
    page_size: int,
    end: Int[Array, "B T"],
    k_scale_NG: Float[Array, "N G"] | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K"]:
    """Select the k best keys of each query among the first `end` positions of its sequence.

    As `indexer_topk` over the keys `k_NX[table[b, s // page_size] * page_size + s % page_size]`; the result is
    positions in the sequence, so that ties go to the earlier token wherever its page lies. Forward only.

    Args:
        q_TJX: Index queries of each sequence.
        k_NX: Index keys of every cache row, float, or float8_e4m3fn with `k_scale_NG`.
        w_TJ: Head weights with the scales folded in.
        table_BP: int32, each sequence's pages in order; entries past its end may be anything in range.
        k: Slots per query, at least 1.
        page_size: Rows of a page.
        end: int32, one past the last visible position of each query; 0 selects nothing.
        k_scale_NG: float32, one power of two per block of X / G dims; None for unquantised keys.
        implementation: None picks the best; "pallas_tpu_gathered" joins a sequence's pages by XLA and selects as
            `indexer_topk` on TPU, for what "pallas_tpu" does not take.

    Returns:
        int32 positions in ascending order, then -1.

    Raises:
        ValueError: If k < 1, quantised keys lack their scales or `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.
    """
    dispatch.check_keyword("paged_indexer_topk", "k", k, 1)
    if (k_NX.dtype.itemsize == 1) != (k_scale_NG is not None):
        raise ValueError(
            f"paged_indexer_topk: {k_NX.dtype} keys {'need' if k_scale_NG is None else 'have no'} scales"
        )
    n_keys = table_BP.shape[1] * page_size

    def check() -> None:
        dispatch.require_hopper()
        dispatch.load(GLUON).check(q_TJX, k_NX, k_scale_NG=k_scale_NG)

    def check_tpu() -> None:
        dispatch.require_tpu()
        if k_scale_NG is not None:
            raise NotImplementedError("takes no quantised keys")
        dispatch.load(TPU).check(q_TJX, k_NX, n_keys, k=k, page_size=page_size)

    def check_tpu_gathered() -> None:
        dispatch.require_tpu()
        dtype = k_NX.dtype if k_scale_NG is None else q_TJX.dtype
        keys = jax.ShapeDtypeStruct((n_keys, k_NX.shape[1]), dtype)
        dispatch.load("pallas_kernels.indexer_scores.pallas_tpu").check(q_TJX, keys)
        dispatch.load("pallas_kernels.topk_select.pallas_tpu").check(n_keys, k)

    choices = {
        "gluon_gpu": check,
        "pallas_tpu": check_tpu,
        "pallas_tpu_gathered": check_tpu_gathered,
        "reference": None,
    }
    name = dispatch.choose("paged_indexer_topk", implementation, choices)
    if name == "gluon_gpu":
        kernel = dispatch.load(GLUON)
        step = max(1, MAX_SCORES // (n_keys * q_TJX.shape[0]))
        pages = {"page_size": page_size, "k_scale_NG": k_scale_NG}
        parts = [
            kernel.paged_indexer_topk(
                q_TJX[:, t : t + step],
                k_NX,
                w_TJ[:, t : t + step],
                table_BP,
                k=k,
                end=end[:, t : t + step],
                **pages,
            )
            for t in range(0, q_TJX.shape[1], step)
        ]
        return jnp.concatenate(parts, axis=1)
    if name == "pallas_tpu":
        kernel = dispatch.load(TPU)
        options = {"k": k, "page_size": page_size, "end": end}
        return kernel.paged_indexer_topk(q_TJX, k_NX, w_TJ, table_BP, **options)
    last_B = jnp.max(end, axis=1)
    keys_BSX = reference.read_pages(k_NX, table_BP, page_size, last_B)
    if k_scale_NG is not None:
        scale_BSG = reference.read_pages(k_scale_NG, table_BP, page_size, last_B)
        keys_BSX = fp8.dequantize(keys_BSX, scale_BSG).astype(q_TJX.dtype)
    start = jnp.zeros_like(end)
    selection = implementation if name == "reference" else "pallas_tpu"
    return indexer_topk(q_TJX, keys_BSX, w_TJ, k=k, start=start, end=end, implementation=selection)
