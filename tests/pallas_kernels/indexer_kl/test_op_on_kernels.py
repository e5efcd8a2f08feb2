"""What stands around the kernels of the loss: blocks, masks, the derivative; plain jnp stands in for each kernel."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, indexer_kl, sparse_indexer_kl
from pallas_kernels.indexer_kl import pallas_gpu, range_blocks
from pallas_kernels.indexer_kl import reference as kl_reference
from pallas_kernels.indexer_scores import reference as scores_reference

TOL = 2e-6
SCALE = 0.3


def plain_scores(q, k, w, start, end):
    return scores_reference.indexer_scores(q, k, w, start, end)


def plain_target(q, k, lse, start, end, *, scale):
    logits = scale * jnp.einsum("thd,shd->hts", q, k)
    weights = jnp.exp(logits - lse.T[..., None]).sum(0)
    inside = scores_reference.key_mask(start, end, k.shape[0])
    return jnp.where(inside, weights, 0.0)


def plain_score_gradients(q, k, w, d_scores, start, end):
    inside = scores_reference.key_mask(start, end, k.shape[0])
    pull = jax.vjp(scores_reference.raw_scores, q, k, w)[1]
    return pull(jnp.where(inside, d_scores, 0.0))


@pytest.fixture
def on_kernels(monkeypatch):
    """Take every device for Hopper and plain jnp for the kernels of the range form."""
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    monkeypatch.setattr(pallas_gpu, "check", lambda *a: None)
    monkeypatch.setattr(pallas_gpu.pallas_gpu_target, "attention_target", plain_target)
    monkeypatch.setattr(pallas_gpu.scores_gpu, "scores", plain_scores)
    monkeypatch.setattr(
        pallas_gpu.pallas_gpu_score_gradients, "score_gradients", plain_score_gradients
    )
    monkeypatch.setattr(pallas_gpu, "ROW_MULTIPLE", 2)


def draw(rng, batch, n_queries, n_keys):
    shapes = {
        "q": (n_queries, 4, 6),
        "k": (n_keys, 6),
        "w": (n_queries, 4),
        "attn_q": (n_queries, 3, 5),
        "attn_k": (n_keys, 3, 5),
    }
    return {n: jnp.asarray(rng.normal(size=(*batch, *s)), jnp.float32) for n, s in shapes.items()}


def log_sum_exp(x, start, end, selected):
    """Return each head's log-sum-exp over the keys attended to."""
    logits = SCALE * np.einsum("...thd,...shd->...ths", x["attn_q"], x["attn_k"])
    place = np.arange(logits.shape[-1])
    allowed = (start[..., None] <= place) & (place < end[..., None])
    allowed = allowed if selected is None else allowed & np.asarray(selected)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(logits) * allowed[..., None, :], -1))


def value_and_gradients(x, lse, start, end, selected, implementation):
    weight = jnp.linspace(0.5, 2.0, start.size).reshape(start.shape)

    def loss(q, k, w):
        kl = indexer_kl(
            *(q, k, w, x["attn_q"], x["attn_k"], lse),
            scale=SCALE,
            start=start,
            end=end,
            selected=selected,
            implementation=implementation,
        )
        return jnp.sum(weight * kl), kl

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x["q"], x["k"], x["w"])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_rows", [100, 4])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_range_form_equals_its_definition(
    rng, draw_ranges, on_kernels, monkeypatch, batch, block_rows, masked
):
    n_queries, n_keys = 9, 13
    monkeypatch.setattr(range_blocks, "MAX_BLOCK_ROWS", block_rows)
    x = draw(rng, batch, n_queries, n_keys)
    start, end = draw_ranges(rng, (*batch, n_queries), n_keys)
    shape = (*batch, n_queries, n_keys)
    selected = jnp.asarray(rng.random(shape) < 0.5) if masked else None
    lse = jnp.asarray(log_sum_exp(x, start, end, selected), jnp.float32)
    ranges = (jnp.asarray(start), jnp.asarray(end), selected)

    grads, kl = value_and_gradients(x, lse, *ranges, None)

    expected_grads, expected = value_and_gradients(x, lse, *ranges, "reference")
    np.testing.assert_allclose(kl, expected, atol=TOL)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * TOL)


def test_the_attention_gets_no_gradient(rng, on_kernels):
    x = draw(rng, (), 3, 5)
    start, end = np.zeros(3, np.int32), np.full(3, 5, np.int32)
    lse = jnp.asarray(log_sum_exp(x, start, end, None), jnp.float32)

    def loss(attn_q, attn_k, lse):
        ranges = {"start": jnp.asarray(start), "end": jnp.asarray(end)}
        kl = indexer_kl(x["q"], x["k"], x["w"], attn_q, attn_k, lse, scale=SCALE, **ranges)
        return jnp.sum(kl)

    for grad in jax.grad(loss, (0, 1, 2))(x["attn_q"], x["attn_k"], lse):
        assert np.all(np.asarray(grad) == 0)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_listed_form_hands_its_residuals_to_the_kernels_gradients(
    rng, monkeypatch, batch, deterministic
):
    seen = []

    def kl_rows(q, k, w, attn_q, kv, lse, idx, *, scale):
        assert scale == SCALE
        kl = jnp.sum(w, axis=1) + jnp.sum(k) + jnp.sum(q, axis=(1, 2)) + idx[:, 0]
        return kl, (q, k, w, idx)

    def gradients(residuals, d_kl, *, deterministic=False):
        q, k, w, _ = residuals
        seen.append(deterministic)
        d_q = jnp.broadcast_to(d_kl[:, None, None], q.shape)
        return d_q, jnp.full_like(k, jnp.sum(d_kl)), jnp.broadcast_to(d_kl[:, None], w.shape)

    kernel = types.SimpleNamespace(kl_rows=kl_rows, gradients=gradients, check=lambda *a: None)
    monkeypatch.setattr(dispatch, "load", lambda module: kernel)
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    x = draw(rng, batch, 3, 5)
    kv = x["attn_k"][..., 0, :]
    idx = jnp.zeros((*batch, 3, 2), jnp.int32)
    lse = jnp.zeros((*batch, 3, 3))

    def loss(q, k, w):
        kl = sparse_indexer_kl(
            *(q, k, w, x["attn_q"], kv, lse, idx), scale=SCALE, deterministic=deterministic
        )
        return 2.0 * jnp.sum(kl)

    d_q, d_k, d_w = jax.grad(loss, (0, 1, 2))(x["q"], x["k"], x["w"])

    assert seen == [deterministic]
    np.testing.assert_array_equal(d_q, np.full(x["q"].shape, 2.0))
    np.testing.assert_array_equal(d_k, np.full(x["k"].shape, 6.0))
    np.testing.assert_array_equal(d_w, np.full(x["w"].shape, 2.0))


def test_the_stand_in_for_the_target_is_the_definitions(rng):
    x = draw(rng, (), 4, 6)
    start, end = jnp.zeros(4, jnp.int32), jnp.asarray([6, 3, 1, 0], jnp.int32)
    lse = jnp.asarray(log_sum_exp(x, *map(np.asarray, (start, end)), None), jnp.float32)
    logits = SCALE * jnp.einsum("thd,shd->hts", x["attn_q"], x["attn_k"])
    inside = scores_reference.key_mask(start, end, 6)

    expected = kl_reference.target_from_logits(logits, lse, inside)

    got = plain_target(x["attn_q"], x["attn_k"], lse, start, end, scale=SCALE)
    np.testing.assert_allclose(got[:3] / got[:3].sum(1, keepdims=True), expected[:3], atol=TOL)
