"""Properties of the forward pass; tests/dsv32_jax/test_gradients.py has those of the backward pass."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from dsv32_jax import config
from dsv32_jax.model import abstract_model

FLOAT32_TOL = 2e-5  # three layers of float32 on logits of size ~1
MODES = ("dense", "sparse", "gathered", "window")
B, T, K = 2, 24, 8


def selection(tensors):
    return pallas_kernels.indexer_topk(*tensors.index, k=K, start=tensors.start, end=tensors.end)


@functools.partial(jax.jit, static_argnames="mode")
def forward(model, tokens, ids, mode):
    indexer_loss = mode != "window"
    out = model(tokens, ids, mode=mode, run_mtp=True, indexer_loss=indexer_loss, probe=selection)
    stats = (out.dense, out.moe, out.mtp)
    return {
        "logits": model.logits(out.hidden),
        "mtp_logits": model.logits(out.mtp_hidden),
        "selection": jnp.concatenate([out.dense.probe, out.moe.probe]),
        "mtp_selection": out.mtp.probe,
        "kl": [jnp.sum(s.kl) for s in stats] if indexer_loss else [],
        "balance": [out.moe.balance, out.mtp.balance],
        "load": [out.moe.load, out.mtp.load],
    }


@pytest.fixture(scope="module")
def run(cfg, new_model, attention):
    """Return a function that runs the model in one of MODES."""
    models = {}

    def call(tokens, ids, mode):
        if mode not in models:
            shaped, name = attention(cfg, mode)
            models[mode] = (new_model(shaped), name)
        model, name = models[mode]
        tokens, ids = jnp.asarray(tokens, jnp.int32), jnp.asarray(ids, jnp.int32)
        return jax.tree.map(np.asarray, forward(model, tokens, ids, name))

    return call


@pytest.fixture
def tokens(cfg, rng):
    return rng.integers(0, cfg.vocab_size, size=(B, T))


def close(a, b):
    np.testing.assert_allclose(a, b, atol=FLOAT32_TOL * max(1.0, np.abs(b).max()))


def sums(out):
    return jax.tree.leaves([out["kl"], out["balance"], out["load"]])


@pytest.mark.parametrize("mode", MODES)
def test_a_future_token_changes_no_earlier_output(run, cfg, tokens, mode):
    cut = 13
    ids = np.ones((B, T))
    changed = tokens.copy()
    changed[:, cut:] = (changed[:, cut:] + 1) % cfg.vocab_size

    base, out = run(tokens, ids, mode), run(changed, ids, mode)

    close(out["logits"][:, :cut], base["logits"][:, :cut])
    close(out["mtp_logits"][:, : cut - 1], base["mtp_logits"][:, : cut - 1])  # reads one ahead
    np.testing.assert_array_equal(out["selection"][:, :, :cut], base["selection"][:, :, :cut])
    before = (slice(None), slice(None, cut - 1))
    np.testing.assert_array_equal(out["mtp_selection"][before], base["mtp_selection"][before])
    assert np.all(np.any(out["logits"][:, cut:] != base["logits"][:, cut:], axis=-1))
    assert np.all(np.any(out["mtp_logits"][:, cut - 1] != base["mtp_logits"][:, cut - 1], axis=-1))


@pytest.mark.parametrize("mode", ["sparse", "gathered", "window"])
def test_up_to_k_keys_every_mode_is_dense(run, tokens, mode):
    ids = np.ones((B, T))
    base, out = run(tokens, ids, "dense"), run(tokens, ids, mode)
    close(out["logits"][:, :K], base["logits"][:, :K])
    close(out["mtp_logits"][:, :K], base["mtp_logits"][:, :K])
    assert np.abs(out["logits"][:, K:] - base["logits"][:, K:]).max() > 100 * FLOAT32_TOL


def test_gathered_rows_in_absorbed_form_equal_masked_heads(run, tokens):
    ids = np.ones((B, T))
    ids[0, 10:], ids[1, 20:] = 2, 0
    masked, gathered = run(tokens, ids, "sparse"), run(tokens, ids, "gathered")
    valid = ids != 0
    for name in ("logits", "mtp_logits"):
        close(gathered[name][valid], masked[name][valid])
    np.testing.assert_array_equal(gathered["selection"], masked["selection"])
    for a, b in zip(sums(gathered), sums(masked), strict=True):
        close(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_packed_documents_equal_separate_ones(run, tokens, mode):
    first, second = tokens[0, :9], tokens[0, 9:20]
    packed_ids = np.zeros((B, T))
    packed_ids[0, :9], packed_ids[0, 9:20] = 5, 2
    apart, apart_ids = np.zeros((B, T)), np.zeros((B, T))
    apart[0, :9], apart[1, :11] = first, second
    apart_ids[0, :9], apart_ids[1, :11] = 1, 1

    packed, separate = run(tokens, packed_ids, mode), run(apart, apart_ids, mode)

    close(packed["logits"][0, :9], separate["logits"][0, :9])
    close(packed["logits"][0, 9:20], separate["logits"][1, :11])
    close(packed["mtp_logits"][0, :8], separate["mtp_logits"][0, :8])
    close(packed["mtp_logits"][0, 9:19], separate["mtp_logits"][1, :10])
    for a, b in zip(sums(packed), sums(separate), strict=True):
        close(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_padding_anywhere_changes_nothing(run, cfg, tokens, mode):
    ids = np.zeros((B, T))
    ids[0, :9], ids[1, :12] = 1, 2
    moved_ids, moved = np.zeros((B, T)), (tokens + 7) % cfg.vocab_size
    moved_ids[0, 4:13], moved_ids[1, 12:] = 1, 2  # padding first, and on both sides
    moved[0, 4:13], moved[1, 12:] = tokens[0, :9], tokens[1, :12]

    base, out = run(tokens, ids, mode), run(moved, moved_ids, mode)

    for name in ("logits", "mtp_logits"):
        assert np.all(np.isfinite(out[name]))  # padded rows too
        ahead = name == "mtp_logits"
        close(out[name][0, 4 : 13 - ahead], base[name][0, : 9 - ahead])
        close(out[name][1, 12 : 24 - ahead], base[name][1, : 12 - ahead])
    for a, b in zip(sums(out), sums(base), strict=True):
        close(a, b)


def test_no_ids_means_one_document_a_row(model, tokens):
    tokens = jnp.asarray(tokens[:, :6], jnp.int32)
    call = jax.jit(lambda ids: model(tokens, ids, mode="dense").hidden)
    np.testing.assert_array_equal(call(None), call(jnp.ones_like(tokens)))


def test_runs_are_repeatable(run, tokens):
    first, second = (run(tokens, np.ones((B, T)), "sparse") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_hidden_states_are_kept_on_demand_and_end_in_the_final_norm(cfg, model, tokens):
    tokens = jnp.asarray(tokens[:, :6], jnp.int32)
    out = jax.jit(lambda: model(tokens, mode="dense", keep_hidden=True))()
    assert out.dense.hidden.shape == (1, B, 6, cfg.dim)
    assert out.moe.hidden.shape == (1, B, 6, cfg.dim)
    last = np.asarray(out.moe.hidden[-1], np.float64)
    normed = last / np.sqrt(np.mean(last**2, -1, keepdims=True) + cfg.norm_eps)
    close(np.asarray(out.hidden), normed * np.asarray(model.norm.weight[...]))


def test_logits_are_a_float32_product(model, rng, cfg):
    hidden = jnp.asarray(rng.normal(size=(1, 3, cfg.dim)), jnp.bfloat16)
    out = model.logits(hidden)
    assert out.dtype == jnp.float32
    expected = np.asarray(hidden, np.float64) @ np.asarray(model.head[...], np.float64)
    close(np.asarray(out), expected)


def test_bf16_activations_come_out_as_bf16(cfg, new_model, tokens):
    tokens = jnp.asarray(tokens[:, :6], jnp.int32)
    call = jax.jit(lambda model: model(tokens, mode="dense", run_mtp=True))
    low = call(new_model(dataclasses.replace(cfg, dtype="bfloat16")))
    assert low.hidden.dtype == low.mtp_hidden.dtype == jnp.bfloat16
    wide = call(new_model(cfg))
    # Normed states of size ~1 after three layers of 8-bit mantissas.
    np.testing.assert_allclose(np.asarray(low.hidden, np.float32), wide.hidden, atol=0.25)


def test_mtp_of_a_model_without_it_is_refused(cfg, new_model):
    plain = new_model(dataclasses.replace(cfg, mtp=False, n_layers=1))
    assert plain.mtp is None
    assert plain.moe_layers is None
    with pytest.raises(ValueError, match="run_mtp=True needs a model with mtp=True"):
        plain(jnp.zeros((1, 2), jnp.int32), run_mtp=True)


@pytest.mark.parametrize("n_moe_layers", [1, 2])
def test_given_experts_are_those_of_the_expert_layers_in_order(
    cfg, new_model, tokens, rng, n_moe_layers
):
    deeper = dataclasses.replace(cfg, n_layers=1 + n_moe_layers)
    model, n_active = new_model(deeper), deeper.moe.n_active
    tokens = jnp.asarray(tokens, jnp.int32)
    given = np.full((n_moe_layers, B, T, n_active), -1)
    given[-1] = np.arange(n_active)  # the last layer's; the others choose for themselves

    @jax.jit
    def call(experts):
        out = model(tokens, experts=experts, run_mtp=True)
        return out.moe.load, out.moe.rerouted, out.mtp.load, out.mtp.rerouted

    load, rerouted, mtp_load, mtp_rerouted = call(jnp.asarray(given, jnp.int32))
    own = jax.jit(lambda: model(tokens).moe.load)()

    np.testing.assert_array_equal(load[-1], B * T * (np.arange(deeper.moe.n_experts) < n_active))
    np.testing.assert_array_equal(load[:-1], own[:-1])
    assert rerouted[-1] > 0
    assert (rerouted[:-1] == 0).all()
    assert mtp_rerouted is None
    assert jnp.count_nonzero(mtp_load) > n_active


def test_experts_of_another_number_of_layers_are_refused(cfg, model):
    given = jnp.zeros((2, 1, 2, cfg.moe.n_active), jnp.int32)
    with pytest.raises(ValueError, match="experts are of 2 layers, the model has 1"):
        model(jnp.zeros((1, 2), jnp.int32), experts=given)


def test_the_released_size_traces_in_seconds():
    cfg = config.v32_671b()
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def call(model, tokens):
        out = model(tokens, mode="sparse", run_mtp=True, indexer_loss=True)
        return model.logits(out.hidden), out

    start = time.monotonic()
    logits, out = jax.eval_shape(call, abstract_model(cfg), tokens)
    seconds = time.monotonic() - start

    assert logits.shape == (1, 4096, 129280)
    assert out.hidden.dtype == jnp.bfloat16
    assert out.moe.load.shape == (58, 256)
    assert seconds < 60  # a few on two idle cores


def test_products_of_float32_arrays_are_float32_on_every_backend(cfg, model):
    tokens = jax.numpy.zeros((1, 12), "int32")
    jaxpr = str(jax.make_jaxpr(lambda m, t: m.logits(m(t, run_mtp=True).hidden))(model, tokens))
    assert jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 20
    assert jaxpr.count("precision=(") == jaxpr.count("dot_general[")
