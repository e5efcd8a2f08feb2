import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dense_mla, dispatch, indexer_kl
from pallas_kernels.indexer_kl import (
    pallas_tpu,
    pallas_tpu_score_gradients,
    pallas_tpu_target,
    range_blocks,
)
from pallas_kernels.indexer_scores import reference as scores_reference

KL_TOL = 1e-5
FLOAT32_TOL = 2e-5  # relative Frobenius error: a few float32 roundings
BF16_TOL = 6e-3  # cotangents are rounded to bfloat16 before they are multiplied
SCALE = 0.3


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def draw(rng, n_queries, n_keys, dtype=jnp.float32, heads=3, dim=20):
    shapes = ((n_queries, 5, 12), (n_keys, 12), (n_queries, heads, dim), (n_keys, heads, dim))
    q, k, attn_q, attn_k = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return (q, k, jnp.asarray(rng.normal(size=(n_queries, 5)), jnp.float32)), (attn_q, attn_k)


def log_sum_exp(attention, bounds, selected):
    q, k = (x.astype(jnp.float32) for x in attention)
    options = {"scale": SCALE, "start": bounds[0], "end": bounds[1], "selected": selected}
    return dense_mla(q, k, k, **options, implementation="reference")[1]


@functools.partial(jax.jit, static_argnames=("name",))
def value_and_gradients(index, attention, lse, bounds, selected, weight, name):
    def loss(q, k, w):
        kl = indexer_kl(
            *(q, k, w, *attention, lse),
            scale=SCALE,
            start=bounds[0],
            end=bounds[1],
            selected=selected,
            implementation=name,
        )
        return jnp.sum(weight * kl), kl

    (_, kl), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*index)
    return kl, gradients


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(rng, draw_ranges, n_queries, n_keys, *, masked=False, dtype=jnp.float32):
    index, attention = draw(rng, n_queries, n_keys, dtype)
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (n_queries,), n_keys)))
    selected = jnp.asarray(rng.uniform(size=(n_queries, n_keys)) < 0.4) if masked else None
    lse = log_sum_exp(attention, bounds, selected)
    weight = jnp.asarray(rng.normal(size=n_queries), jnp.float32)

    got = value_and_gradients(index, attention, lse, bounds, selected, weight, "pallas_tpu")

    full = jax.tree.map(lambda x: x.astype(jnp.float32), (index, attention))
    want = value_and_gradients(*full, lse, bounds, selected, weight, "reference")
    np.testing.assert_allclose(got[0], want[0], atol=KL_TOL)
    tol = FLOAT32_TOL if dtype == jnp.float32 else BF16_TOL
    for name, a, b in zip(("dq", "dk", "dw"), got[1], want[1], strict=True):
        assert relative_error(a, b) < tol, name


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "masked"),
    [(128, 128, False), (9, 300, True), (200, 40, False), (1, 1, False)],
)
def test_loss_and_gradients_equal_the_definition(
    rng, draw_ranges, on_tpu, n_queries, n_keys, masked
):
    check(rng, draw_ranges, n_queries, n_keys, masked=masked)


def test_bfloat16(rng, draw_ranges, on_tpu):
    check(rng, draw_ranges, 70, 150, dtype=jnp.bfloat16)


def test_blocks_of_queries_add_up(rng, draw_ranges, on_tpu, monkeypatch):
    monkeypatch.setattr(range_blocks, "MAX_BLOCK_ROWS", 128)
    value_and_gradients.clear_cache()
    check(rng, draw_ranges, 200, 50)
    value_and_gradients.clear_cache()


def test_the_target_is_the_heads_weights_summed(rng, draw_ranges, interpret_tpu, monkeypatch):
    monkeypatch.setattr(pallas_tpu_target, "MAX_BLOCK", 128)  # several blocks, some of them skipped
    _, (q, k) = draw(rng, 200, 300)
    start, end = draw_ranges(rng, (200,), 300)
    lse = jnp.asarray(rng.normal(size=(200, 3)), jnp.float32)

    got = pallas_tpu_target.attention_target(
        q, k, lse, jnp.asarray(start), jnp.asarray(end), scale=SCALE
    )

    logits = SCALE * np.einsum("thd,shd->hts", *(np.asarray(x, np.float64) for x in (q, k)))
    want = np.exp(logits - np.asarray(lse).T[..., None]).sum(0)
    inside = np.asarray(scores_reference.key_mask(jnp.asarray(start), jnp.asarray(end), 300))
    np.testing.assert_allclose(np.asarray(got)[inside], want[inside], rtol=1e-4)


def test_score_gradients_over_several_blocks(rng, draw_ranges, interpret_tpu, monkeypatch):
    monkeypatch.setattr(pallas_tpu_score_gradients, "MAX_BLOCK_K", 128)
    (q, k, w), _ = draw(rng, 300, 300)
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (300,), 300)))
    inside = scores_reference.key_mask(*bounds, 300)
    d_scores = jnp.where(inside, jnp.asarray(rng.normal(size=(300, 300)), jnp.float32), 0.0)

    got = pallas_tpu_score_gradients.score_gradients(q, k, w, d_scores, *bounds)

    want = jax.jit(lambda *x: jax.vjp(scores_reference.raw_scores, *x)[1](d_scores))(q, k, w)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < FLOAT32_TOL


def test_what_it_does_not_take_is_said(rng):
    (q, k, _), attention = draw(rng, 3, 4, dim=264)
    with pytest.raises(NotImplementedError, match="takes up to 256 dims, got 264"):
        pallas_tpu.check(q, k, *attention, SCALE)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_queries", "n_keys"), [(4096, 4096), (2048, 32768), (512, 131072)])
def test_it_compiles_at_the_released_widths(compile_for_tpu, monkeypatch, n_queries, n_keys):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    wide = ((n_queries, 64, 128), (n_keys, 128), (n_queries, 128, 192), (n_keys, 128, 192))
    q, k, attn_q, attn_k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in wide)
    w, lse, weight = (
        jax.ShapeDtypeStruct((n_queries, *s), jnp.float32) for s in ((64,), (128,), ())
    )
    bound = jax.ShapeDtypeStruct((n_queries,), jnp.int32)

    def both(index, attention, lse, bounds, weight):
        return value_and_gradients(index, attention, lse, bounds, None, weight, "pallas_tpu")

    compiled = compile_for_tpu(both, (q, k, w), (attn_q, attn_k), lse, (bound, bound), weight)

    pairs = n_queries * n_keys
    assert compiled.cost_analysis()["flops"] >= 2 * pairs * (2 * 128 * 192 + 5 * 64 * 128)
