"""The indexer's KL over a range of keys on Hopper."""

from jaxtyping import Array

from pallas_kernels.indexer_kl import pallas_gpu_score_gradients, pallas_gpu_target
from pallas_kernels.indexer_kl.range_blocks import Kernels
from pallas_kernels.indexer_scores import pallas_gpu as scores_gpu

ROW_MULTIPLE = 128  # the kernels' tiles of queries


def check(q_TJX: Array, k_SX: Array, attn_q_THD: Array, attn_k_SHD: Array, scale: float) -> None:
    """Raise NotImplementedError, saying why, if a kernel of a part cannot take the input."""
    scores_gpu.check(q_TJX, k_SX)
    pallas_gpu_target.check(attn_q_THD, attn_k_SHD, scale)


def kernels() -> Kernels:
    """Return the kernels that `range_blocks` joins."""
    return Kernels(
        pallas_gpu_target.attention_target,
        scores_gpu.scores,
        pallas_gpu_score_gradients.score_gradients,
        ROW_MULTIPLE,
    )
