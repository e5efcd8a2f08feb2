from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from dsv32_jax import parameters
from train import stage


def test_every_stage_has_an_attention_and_trains_something():
    assert set(stage.ATTENTION) == set(get_args(stage.Stage))
    assert set(get_args(stage.Stage)) == stage.INDEXER_TRAINS | stage.MAIN_TRAINS


def test_only_the_stages_with_a_kl_train_the_indexer_and_all_but_the_warmup_the_rest():
    assert {"warmup", "sparse"} == stage.INDEXER_TRAINS
    assert {"dense", "sparse", "window"} == stage.MAIN_TRAINS


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
