"""The indexer's KL over a range of keys on TPU."""

from jaxtyping import Array

from pallas_kernels.indexer_kl import pallas_tpu_score_gradients, pallas_tpu_target
from pallas_kernels.indexer_kl.range_blocks import Kernels
from pallas_kernels.indexer_scores import pallas_tpu as scores_tpu


def check(q_TJX: Array, k_SX: Array, attn_q_THD: Array, attn_k_SHD: Array, scale: float) -> None:
    """Raise NotImplementedError, saying why, if a kernel of a part cannot take the input."""
    del scale  # any is taken
    scores_tpu.check(q_TJX, k_SX)
    pallas_tpu_target.check(attn_q_THD, attn_k_SHD)


def kernels() -> Kernels:
    """Return the kernels that `range_blocks` joins."""
    return Kernels(
        pallas_tpu_target.attention_target,
        scores_tpu.scores,
        pallas_tpu_score_gradients.score_gradients,
        pallas_tpu_score_gradients.BLOCK_Q,
    )
