"""How much of the main attention's mass the indexer's choice keeps, beside a random, a window and a perfect choice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dsv32_jax.mla import AttentionTensors, Probe
from pallas_kernels import query_blocks
from pallas_kernels.dense_mla import reference as dense
from pallas_kernels.indexer_kl import reference as kl
from pallas_kernels.indexer_scores import reference as scores
from pallas_kernels.topk_select import reference as topk_select

CHOICES = ("indexer", "random", "window", "oracle")


class RecallSums(NamedTuple):
    """Sums over tokens, float32; stacked layers add a leading axis.

    Attributes:
        indexer: Mass of the keys the indexer selects, over the rows with more than k keys.
        random: Expected mass of k random keys: k / n.
        window: Mass of the last k keys.
        oracle: Mass of the k heaviest keys.
        rows: Rows with more than k keys.
        kl: KL(attention || softmax of the indexer's scores), over all rows.
        uniform: KL(attention || uniform over the visible keys), over all rows.
        tokens: All rows.
    """

    indexer: Float[Array | np.ndarray, "*L"]
    random: Float[Array | np.ndarray, "*L"]
    window: Float[Array | np.ndarray, "*L"]
    oracle: Float[Array | np.ndarray, "*L"]
    rows: Float[Array | np.ndarray, "*L"]
    kl: Float[Array | np.ndarray, "*L"]
    uniform: Float[Array | np.ndarray, "*L"]
    tokens: Float[Array | np.ndarray, "*L"]


def recall_probe(topk: int) -> Probe:
    """Build the probe that sums attention-mass recall over a batch, for a model run in dense mode.

    With `p[t]` the head-summed attention weights normalised to 1, the recall of a set S is `sum_{s in S} p[t, s]`.

    Args:
        topk: k, keys each choice may keep.

    Returns:
        A probe for `DeepSeekV32.__call__`, returning RecallSums.
    """

    def probe(tensors: AttentionTensors) -> RecallSums:
        rows = jax.vmap(lambda *row: _measure(row, tensors.scale, topk))(
            tensors.q, tensors.k, tensors.lse, *tensors.index, tensors.start, tensors.end
        )
        return jax.tree.map(lambda x: jnp.sum(x, dtype=jnp.float32), rows)

    return probe


def _measure(sequence: tuple[Array, ...], scale: float, topk: int) -> RecallSums:
    """Return every row's figures of one sequence, a block of queries at a time."""
    q_THD, k_SHD, lse_TH, index_q_TJX, index_k_SX, index_w_TJ, start_T, end_T = sequence
    n_keys, n_heads = k_SHD.shape[:2]

    def measure_block(rows: tuple[Array, ...], keys: tuple[Array, Array]) -> RecallSums:
        q, lse, index_q, index_w, start, end = rows
        allowed_TS = dense.allowed_keys(start, end, None, keys[0].shape[0])
        p_TS = kl.target_from_logits(dense.head_logits(q, keys[0], scale), lse, allowed_TS)
        scores_TS = scores.raw_scores(index_q, keys[1], index_w)
        n_T = (end - start).astype(jnp.float32)
        long_T = n_T > topk

        def mass(chosen_TS: Array) -> Array:
            return jnp.where(long_T, jnp.sum(jnp.where(chosen_TS, p_TS, 0.0), axis=1), 0.0)

        uniform_TS = jnp.zeros_like(scores_TS)
        return RecallSums(
            indexer=mass(topk_select.topk_mask(scores_TS, topk, start, end)),
            random=jnp.where(long_T, topk / jnp.maximum(n_T, 1.0), 0.0),
            window=mass(scores.key_mask(jnp.maximum(start, end - topk), end, p_TS.shape[1])),
            oracle=mass(topk_select.topk_mask(p_TS, topk, start, end)),
            rows=long_T.astype(jnp.float32),
            kl=kl.kl_rows(p_TS, scores_TS, allowed_TS),
            uniform=kl.kl_rows(p_TS, uniform_TS, allowed_TS),
            tokens=(n_T > 0).astype(jnp.float32),
        )

    return query_blocks.map_query_blocks(
        measure_block,
        (q_THD, lse_TH, index_q_TJX, index_w_TJ, start_T, end_T),
        (k_SHD, index_k_SX),
        block=query_blocks.rows_per_block(n_keys * n_heads),
        causal=False,
    )
