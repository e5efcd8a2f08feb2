"""A token's state does not depend on how the tokens before it came into the cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from dsv32_jax import cache, parameters
from dsv32_jax.config import v32_671b
from dsv32_jax.generate import decoder
from dsv32_jax.mla import MLA
from pallas_kernels import dispatch

FLOAT32_TOL = 2e-5  # float32 through two layers and the norm, states of size ~1
B, T, K = 3, 30, 8  # top-k 8: the edge is crossed at the ninth token
# Pieces of the tokens: one by one; two by two, as with drafts; by pieces that end nowhere in particular.
PIECES = {
    "ones": [1] * T,
    "twos": [2] * (T // 2),
    "chunks": [11, 12, 7],
    "prompt, then ones": [14] + [1] * (T - 14),
}


@pytest.fixture(scope="module")
def tokens(cfg):
    return np.random.default_rng(2).integers(0, cfg.vocab_size, size=(B, T))


@pytest.fixture(scope="module")
def whole(model, tokens):
    """The states of one pass over everything, by mode."""
    run = jax.jit(
        lambda model, mode: model(jnp.asarray(tokens), mode=mode).hidden, static_argnames="mode"
    )
    return {mode: np.asarray(run(model, mode)) for mode in ("sparse", "dense")}


def feed_in_pieces(feeder, tokens, pieces):
    states, first = [], 0
    for size in pieces:
        position = np.broadcast_to(np.arange(first, first + size), (len(tokens), size))
        states.append(feeder.feed(tokens[:, first : first + size], position))
        first += size
    return np.concatenate(states, axis=1)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_states_do_not_depend_on_the_pieces(feeder, parts, cfg, tokens, whole, pieces, mode):
    fed = feeder(parts, cfg, n_sequences=B, max_len=T, mode=mode)
    out = feed_in_pieces(fed, tokens, PIECES[pieces])
    np.testing.assert_allclose(out, whole[mode], atol=FLOAT32_TOL)


def test_long_pieces_read_rows_where_the_sequence_is_beyond_the_masked_form(
    feeder, model, cfg, tokens, whole
):
    never_masked = dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, masked_max_len=0))
    parts = decoder.from_model(parameters.assemble(never_masked, parameters.flatten(model)))
    fed = feeder(parts, never_masked, n_sequences=B, max_len=T)
    out = feed_in_pieces(fed, tokens, PIECES["chunks"])
    np.testing.assert_allclose(out, whole["sparse"], atol=FLOAT32_TOL)


def test_a_long_context_is_gone_on_with_as_in_one_pass(feeder, model, parts, cfg):
    length, last = 390, 4  # beyond several pages, pieces and blocks of queries
    tokens = np.random.default_rng(5).integers(0, cfg.vocab_size, size=(1, length))
    expected = jax.jit(lambda m: m(jnp.asarray(tokens)).hidden)(model)
    fed = feeder(parts, cfg, n_sequences=1, max_len=length, page_size=32)
    pieces = [193, 193] + [1] * last
    out = feed_in_pieces(fed, tokens, pieces)
    np.testing.assert_allclose(out, expected, atol=5 * FLOAT32_TOL)  # many more terms in each sum


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_field_kernels_reaches_the_ops_of_the_cache(
    feeder, model, cfg, tokens, kernels, monkeypatch
):
    asked = {}
    choose = dispatch.choose

    def record(op, implementation, backends):
        asked[op] = implementation
        return choose(op, implementation, backends)

    monkeypatch.setattr(dispatch, "choose", record)
    cfg = dataclasses.replace(cfg, kernels=kernels)
    parts = decoder.from_model(parameters.assemble(cfg, parameters.flatten(model)))
    fed = feeder(parts, cfg, n_sequences=B, max_len=T, page_size=7)  # a shape not compiled before
    feed_in_pieces(fed, tokens, [12, 1])
    ops = ("paged_mla", "paged_indexer_topk", "indexer_topk", "indexer_topk_mask", "dense_mla")
    assert {op: asked[op] for op in ops} == dict.fromkeys(ops, cfg.implementation)


def test_sequences_of_different_length_and_idle_slots_go_together(
    feeder, parts, cfg, tokens, whole
):
    fed = feeder(parts, cfg, n_sequences=B, max_len=T)
    lengths = [5, 0, 17]  # prompts; the second is idle until the others have gone on for a while
    position = np.stack([np.where(np.arange(17) < n, np.arange(17), -1) for n in lengths])
    fed.feed(tokens[:, :17], position)
    for step in range(10):
        at = np.asarray([lengths[0] + step, step - 4 if step >= 4 else -1, lengths[2] + step])
        out = fed.feed(np.take_along_axis(tokens, np.maximum(at, 0)[:, None], 1), at[:, None])
        for row in np.flatnonzero(at >= 0):
            np.testing.assert_allclose(out[row, 0], whole["sparse"][row, at[row]], atol=FLOAT32_TOL)


def test_a_rejected_token_is_overwritten(feeder, parts, cfg, tokens, whole):
    fed = feeder(parts, cfg, n_sequences=B, max_len=T)
    fed.feed(tokens[:, :12], np.broadcast_to(np.arange(12), (B, 12)))
    wrong = np.stack([tokens[:, 12], (tokens[:, 13] + 1) % cfg.vocab_size], 1)
    fed.feed(wrong, np.broadcast_to([12, 13], (B, 2)))
    out = feed_in_pieces_from(fed, tokens, 13)
    np.testing.assert_allclose(out, whole["sparse"][:, 13:], atol=FLOAT32_TOL)


def feed_in_pieces_from(fed, tokens, first):
    states = [fed.feed(tokens[:, [t]], np.full((B, 1), t)) for t in range(first, T)]
    return np.concatenate(states, axis=1)


def test_decoding_selects_what_one_pass_selects(feeder, model, parts, cfg, tokens, monkeypatch):
    def selected(tensors):
        return pallas_kernels.indexer_topk(
            *tensors.index, k=K, start=tensors.start, end=tensors.end
        )

    out = jax.jit(lambda model: model(jnp.asarray(tokens), probe=selected))(model)
    expected = np.concatenate([out.dense.probe, out.moe.probe])
    seen, choose = [], MLA.choose

    def record(*arguments):
        chosen = choose(*arguments)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), chosen, ordered=True)
        return chosen

    monkeypatch.setattr(MLA, "choose", record)
    fed = feeder(parts, cfg, n_sequences=B, max_len=T, page_size=5)  # a shape not compiled before
    feed_in_pieces(fed, tokens, PIECES["ones"])
    jax.effects_barrier()

    found = np.stack(seen).reshape(T, cfg.n_layers, B, K).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(found, expected)


def test_the_cache_keeps_each_tokens_experts(feeder, parts, cfg, tokens, routed):
    fed = feeder(parts, cfg, n_sequences=B, max_len=T)
    feed_in_pieces(fed, tokens, PIECES["prompt, then ones"])
    place = jnp.broadcast_to(jnp.arange(T), (B, T))
    found = np.asarray(fed.cache[1].experts)[np.asarray(fed.view(place).rows(place))]
    np.testing.assert_array_equal(found, routed(tokens))
    assert fed.cache[0].experts is None


@functools.partial(jax.jit, static_argnames=("cfg", "page_size"))
def extend_mtp(parts, cfg, layers, hidden, following, position, table, page_size):
    view = cache.View(position, table, page_size)
    return decoder.extend_mtp(parts, cfg, layers, hidden, following, view, "sparse")


def test_the_mtp_module_goes_on_from_its_cache(feeder, model, parts, cfg, tokens):
    out = jax.jit(lambda m: m(jnp.asarray(tokens), run_mtp=True))(model)
    fed = feeder(parts, cfg, n_sequences=B, max_len=T, mtp=True)
    found, first = [], 0
    for size in (13, 1, 2, 2, 1):
        at = np.broadcast_to(np.arange(first, first + size), (B, size))
        after, fed.cache = extend_mtp(
            parts, cfg, fed.cache, out.hidden[:, first : first + size],
            jnp.asarray(tokens[:, first + 1 : first + size + 1], jnp.int32),
            jnp.asarray(at), fed.table, fed.page_size,
        )  # fmt: skip
        found.append(np.asarray(after))
        first += size
    np.testing.assert_allclose(
        np.concatenate(found, 1), out.mtp_hidden[:, :first], atol=FLOAT32_TOL
    )


def test_an_fp8_cache_holds_what_the_models_own_rounding_leaves(feeder, model, cfg, tokens):
    rounding = dataclasses.replace(
        cfg,
        mla=dataclasses.replace(cfg.mla, fp8_latent=True),
        indexer=dataclasses.replace(cfg.indexer, fp8=True),
    )
    rounded = parameters.assemble(rounding, parameters.flatten(model))
    parts = decoder.from_model(rounded)
    run = {}
    for dtype in ("model", "fp8"):
        fed = feeder(parts, rounding, n_sequences=B, max_len=T, dtype=dtype)
        run[dtype] = feed_in_pieces(fed, tokens, PIECES["prompt, then ones"])
    # The rope key alone is rounded differently: bfloat16 in the record, float32 in this model.
    error = np.abs(run["fp8"] - run["model"])
    assert np.quantile(error, 0.95) < 0.02
    layer = fed.cache[0]
    assert layer.attended.latent.dtype == layer.index.dtype == jnp.float8_e4m3fn


def test_records_hold_what_parts_do(feeder, parts, cfg, tokens):
    run = []
    for layout in ("parts", "records"):
        fed = feeder(parts, cfg, n_sequences=B, max_len=T, dtype="fp8", layout=layout)
        run.append(feed_in_pieces(fed, tokens, [14, 1, 1]))
    np.testing.assert_array_equal(*run)


def test_the_fp8_records_of_the_official_model_have_656_and_132_bytes():
    layout = cache.CacheConfig(n_pages=1, page_size=1, dtype="fp8")
    layer = jax.eval_shape(lambda: cache.make_layer(v32_671b(), layout, moe=True))

    def size(*arrays):
        return sum(x.size * x.dtype.itemsize for x in arrays)

    assert size(*layer.attended) == 656
    assert size(layer.index, layer.index_scale) == 132


def test_weights_keep_float32_only_where_their_products_do(cfg, new_model):
    low = new_model(dataclasses.replace(cfg, dtype="bfloat16"))
    parts = decoder.from_model(low)
    assert parts.blocks[0].attn.wq_a[...].dtype == jnp.bfloat16
    assert parts.blocks[1].moe.gate.weight[...].dtype == jnp.float32
    assert parts.blocks[1].moe.gate.bias[...].dtype == jnp.float32
    assert parts.head.dtype == jnp.float32
