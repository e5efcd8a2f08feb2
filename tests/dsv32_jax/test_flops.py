import pytest

from dsv32_jax import flops
from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig

CFG = ModelConfig(
    vocab_size=10,
    dim=4,
    n_layers=3,
    n_dense_layers=1,
    ffn_dim=6,
    mla=MLAConfig(n_heads=2, q_lora_rank=3, kv_lora_rank=5, nope_dim=2, rope_dim=2, v_dim=7),
    indexer=IndexerConfig(n_heads=2, head_dim=4, topk=2),
    moe=MoEConfig(n_experts=8, n_active=2, n_groups=2, n_active_groups=1, expert_dim=5),
    mtp=True,
)
# Multiply-adds of one token with the weights of one layer:
# wq_a 4*3, wq_b 3*2*4, wkv_a 4*(5+2), wkv_b 5*2*(2+7), wo 2*7*4
ATTENTION = 12 + 24 + 28 + 90 + 56
# wq_b 3*2*4, wk 4*4, weights_proj 4*2
INDEXER = 24 + 16 + 8
PLAIN = 3 * 4 * 6
EXPERTS = 3 * 4 * 5 * (2 + 1) + 4 * 8  # two chosen and the shared one, and the gate
HEADS = 2 * 10 * 4  # the main model's and MTP's
MTP_PROJECTION = 8 * 4
# 4 layers with MTP's; three of them have experts
WEIGHTS = 4 * ATTENTION + PLAIN + 3 * EXPERTS + MTP_PROJECTION


def test_a_dense_pass_reads_half_the_square_and_no_indexer():
    found = flops.forward(CFG, 4, "dense")

    # 1, 2, 3, 4 keys, 2.5 on average; each costs 4 for the score and 7 for the value in each of 2 heads.
    assert found == (2 * WEIGHTS, 2 * HEADS, 2 * 4 * 2.5 * 2 * (4 + 7), 0)
    assert found.total == sum(found)


def test_a_sparse_pass_reads_k_keys_and_scores_all_earlier_ones():
    found = flops.forward(CFG, 4, "sparse")

    # 1, 2, 2, 2 keys are read and 1, 2, 3, 4 scored, with 2 index heads of 4 dims.
    attention = 2 * 4 * 1.75 * 2 * (4 + 7)
    assert found == (2 * WEIGHTS, 2 * HEADS, attention, 2 * 4 * (INDEXER + 2.5 * 2 * 4))


def test_a_window_costs_the_keys_it_reads():
    found = flops.forward(CFG, 4, "window")
    assert found == (2 * WEIGHTS, 2 * HEADS, 2 * 4 * 1.75 * 2 * (4 + 7), 0)


@pytest.mark.parametrize(("seq_len", "topk", "keys"), [(4, 2, 1.75), (4, 9, 2.5), (1, 1, 1.0)])
def test_the_mean_number_of_keys_is_that_of_a_count(seq_len, topk, keys):
    assert flops.mean_keys(seq_len, topk) == keys
    assert keys == sum(min(t + 1, topk) for t in range(seq_len)) / seq_len
