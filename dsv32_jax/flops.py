"""Model FLOPs per token, for MFU: what the mathematics asks for, not what an implementation spends."""

from typing import NamedTuple

from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import AttentionMode

BACKWARD_FACTOR = 3  # a training step costs three forward passes


class Flops(NamedTuple):
    """Forward FLOPs per token, a multiply and an add counted as two.

    Attributes:
        weights: Products with weights, active experts only, without the head's and the indexer's.
        head: The head's product, the MTP module's too.
        attention: Scores and weighted sums of the main attention in MHA form, over the keys that are read.
        indexer: Products of the indexer with its weights, and its scores of every earlier key.
    """

    weights: float
    head: float
    attention: float
    indexer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.head + self.attention + self.indexer


def forward(
    cfg: ModelConfig, seq_len: int, mode: AttentionMode, *, indexer_runs: bool | None = None
) -> Flops:
    """Count a forward pass over one document of seq_len tokens, MTP included where the model has it.

    Args:
        cfg: The model.
        seq_len: Tokens.
        mode: Which keys are attended to. Causality halves the dense square.
        indexer_runs: Whether the indexer scores the keys; None: where it selects, in mode "sparse".

    Returns:
        FLOPs per token, a mean over the sequence.
    """
    mla, indexer, moe = cfg.mla, cfg.indexer, cfg.moe
    attention_weights = (
        cfg.dim * mla.q_lora_rank
        + mla.q_lora_rank * mla.n_heads * mla.qk_dim
        + cfg.dim * (mla.kv_lora_rank + mla.rope_dim)
        + mla.kv_lora_rank * mla.n_heads * (mla.nope_dim + mla.v_dim)
        + mla.n_heads * mla.v_dim * cfg.dim
    )
    index_weights = (
        mla.q_lora_rank * indexer.n_heads * indexer.head_dim
        + cfg.dim * indexer.head_dim
        + cfg.dim * indexer.n_heads
    )
    plain = 3 * cfg.dim * cfg.ffn_dim
    experts = 3 * cfg.dim * moe.expert_dim * (moe.n_active + moe.n_shared) + cfg.dim * moe.n_experts
    n_moe = cfg.n_moe_layers + cfg.mtp
    n_layers = cfg.n_layers + cfg.mtp
    weights = n_layers * attention_weights + cfg.n_dense_layers * plain + n_moe * experts
    weights += 2 * cfg.dim * cfg.dim * cfg.mtp
    causal_keys = (seq_len + 1) / 2
    keys = causal_keys if mode == "dense" else mean_keys(seq_len, indexer.topk)
    scores = causal_keys * indexer.n_heads * indexer.head_dim
    runs = mode == "sparse" if indexer_runs is None else indexer_runs
    return Flops(
        weights=2.0 * weights,
        head=2.0 * cfg.vocab_size * cfg.dim * (1 + cfg.mtp),
        attention=2.0 * n_layers * keys * mla.n_heads * (mla.qk_dim + mla.v_dim),
        indexer=2.0 * n_layers * (index_weights + scores) * runs,
    )


def mean_keys(seq_len: int, topk: int) -> float:
    """Return the mean over t of min(t + 1, topk): keys a token reads under a budget.

    Args:
        seq_len: Tokens.
        topk: The budget.

    Returns:
        The mean.
    """
    short = min(seq_len, topk)
    return (short * (short + 1) / 2 + (seq_len - short) * topk) / seq_len
