import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv32_jax import block, segments


class Says:
    """Stand in for a layer: remember the input and answer with a fixed array."""

    def __init__(self, *answer):
        self.answer = answer if len(answer) > 1 else answer[0]
        self.heard = None

    def __call__(self, x, *args, **kwargs):
        self.heard = x
        return self.answer


@pytest.fixture
def documents():
    return segments.from_ids(jnp.asarray([[1, 1, 1, 0]]))


@pytest.fixture
def stubbed(cfg, rng):
    """Return a bf16 block whose attention, norm and feed-forward are stand-ins, and its input."""
    wide = dataclasses.replace(cfg, dtype="bfloat16")
    layer = block.Block(wide, moe=False, rngs=nnx.Rngs(0))
    stream, attn, ffn = (jnp.asarray(rng.normal(size=(1, 4, cfg.dim)), jnp.float32) for _ in "abc")
    layer = nnx.clone(layer)
    attn, ffn = attn.astype(jnp.bfloat16), ffn.astype(jnp.bfloat16)
    stand_ins = {"attn": Says(attn, None, None), "ffn_norm": Says(stream), "ffn": Says(ffn)}
    for name, stand_in in stand_ins.items():
        object.__setattr__(layer, name, stand_in)
    return layer, stream, attn, ffn


def test_the_norm_sees_the_unrounded_sum_and_the_stream_keeps_the_rounded_one(stubbed, documents):
    layer, stream, attn, ffn = stubbed

    out, _ = layer(stream, documents, mode="dense")

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    total = rounded(stream) + attn.astype(jnp.float32)
    assert np.any(np.asarray(rounded(total)) != np.asarray(total))
    np.testing.assert_array_equal(layer.ffn_norm.heard, total)
    np.testing.assert_array_equal(out, rounded(total) + ffn.astype(jnp.float32))
    assert out.dtype == jnp.float32


def test_hidden_is_the_rounded_stream(stubbed, documents):
    layer, stream, *_ = stubbed
    out, stats = layer(stream, documents, mode="dense", keep_hidden=True)
    assert stats.hidden.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stats.hidden, out.astype(jnp.bfloat16))


def test_kl_is_summed_over_tokens_of_documents(stubbed, documents):
    layer, stream, attn, _ = stubbed
    object.__setattr__(layer, "attn", Says(attn, jnp.asarray([[1.0, 2.0, 4.0, np.nan]]), "seen"))
    _, stats = layer(stream, documents, mode="dense", indexer_loss=True)
    assert stats.kl == 7
    assert stats.probe == "seen"


def test_a_plain_layer_has_no_expert_statistics(stubbed, documents):
    layer, stream, *_ = stubbed
    _, stats = layer(stream, documents, mode="dense")
    assert (stats.kl, stats.balance, stats.load, stats.hidden) == (None,) * 4


def test_an_expert_layer_reports_balance_and_load(cfg, rng, documents):
    layer = block.Block(cfg, moe=True, rngs=nnx.Rngs(0))
    stream = jnp.asarray(rng.normal(size=(1, 4, cfg.dim)), jnp.float32)
    _, stats = layer(stream, documents, mode="dense")
    assert jnp.sum(stats.load) == 3 * cfg.moe.n_active
    assert stats.balance > 0
    assert stats.kl is None
