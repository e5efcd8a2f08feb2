from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from train import stage


def test_every_stage_has_an_attention_and_trains_something():
    assert set(stage.ATTENTION) == set(get_args(stage.Stage))
    assert set(get_args(stage.Stage)) == stage.INDEXER_TRAINS | stage.MAIN_TRAINS


def test_only_the_stages_with_a_kl_train_the_indexer_and_all_but_the_warmup_the_rest():
    assert {"warmup", "sparse", "rl_indexer"} == stage.INDEXER_TRAINS
    assert {"dense", "sparse", "window", "rl", "rl_indexer"} == stage.MAIN_TRAINS


def test_the_warmups_attention_is_dense_bit_for_bit(one_layer, one_layer_parameters):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, one_layer.vocab_size, size=(2, 16)), jnp.int32)
    ids = jnp.asarray(np.repeat([[1, 1, 2, 2], [1, 1, 1, 0]], 4, axis=1), jnp.int32)

    def hidden(mode, indexer_loss):
        model = parameters.assemble(one_layer, jax.tree.map(jnp.asarray, one_layer_parameters))
        run = jax.jit(lambda t, i: model(t, i, mode=mode, indexer_loss=indexer_loss))
        return run(tokens, ids)

    warmup, dense = hidden(stage.ATTENTION["warmup"], True), hidden("dense", False)
    sparse = hidden(stage.ATTENTION["sparse"], False)

    np.testing.assert_array_equal(warmup.hidden, dense.hidden)
    assert warmup.moe.kl.item() > 0
    assert np.abs(np.asarray(sparse.hidden - dense.hidden)).max() > 1e-3


# One layer, no MTP: main weights wq_a 4*3, wq_b 3*2*4, wkv_a 4*7, wkv_b 5*2*9, wo 14*4, experts 3*4*5*(2+1), gate 4*8
MAIN = 12 + 24 + 28 + 90 + 56 + 180 + 32
HEAD = 10 * 4
INDEXER = 24 + 16 + 8 + 2.5 * 2 * 4  # weights, and scores of 2.5 keys on average
DENSE_ATTENTION, SPARSE_ATTENTION = 2.5 * 2 * 11, 1.75 * 2 * 11


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [
        ("dense", 3 * (MAIN + HEAD + DENSE_ATTENTION)),
        ("warmup", MAIN + DENSE_ATTENTION + 3 * INDEXER),
        ("sparse", 3 * (MAIN + HEAD + SPARSE_ATTENTION + INDEXER)),
        ("window", 3 * (MAIN + HEAD + SPARSE_ATTENTION)),
        ("rl", 3 * (MAIN + HEAD + SPARSE_ATTENTION) + INDEXER),
    ],
)
def test_what_is_frozen_goes_forward_only_and_what_is_not_run_costs_nothing(name, multiply_adds):
    cfg = ModelConfig(
        vocab_size=10,
        dim=4,
        n_layers=1,
        n_dense_layers=0,
        ffn_dim=6,
        mla=MLAConfig(n_heads=2, q_lora_rank=3, kv_lora_rank=5, nope_dim=2, rope_dim=2, v_dim=7),
        indexer=IndexerConfig(n_heads=2, head_dim=4, topk=2),
        moe=MoEConfig(n_experts=8, n_active=2, n_groups=2, n_active_groups=1, expert_dim=5),
        mtp=False,
    )
    assert stage.train_flops(cfg, 4, name) == 2 * multiply_adds
