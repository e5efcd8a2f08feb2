import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, indexer_scores
from pallas_kernels.indexer_scores import pallas_tpu, reference

TOL = 1e-5  # relative Frobenius error in float32: sums of products of ~1 in another order
BF16_GRAD_TOL = 6e-3  # cotangents are rounded to bfloat16 before they are multiplied


def draw(rng, n_queries, n_keys, heads=5, dim=12, dtype=jnp.float32):
    q, k = (
        jnp.asarray(rng.normal(size=s), dtype) for s in ((n_queries, heads, dim), (n_keys, dim))
    )
    return q, k, jnp.asarray(rng.normal(size=(n_queries, heads)), jnp.float32)


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def scores_and_gradients(arrays, bounds, weight, implementation):
    start, end = bounds

    def loss(q, k, w):
        found = indexer_scores(q, k, w, start=start, end=end, implementation=implementation)
        inside = jnp.isfinite(found)
        return jnp.sum(jnp.where(inside, weight * found, 0.0)), found

    (_, found), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return found, gradients


run = jax.jit(scores_and_gradients, static_argnums=3)


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "dtype"),
    [
        (128, 256, jnp.float32),
        (5, 700, jnp.float32),
        (200, 9, jnp.float32),
        (1, 1, jnp.float32),
        (70, 300, jnp.bfloat16),
    ],
)
def test_scores_and_gradients_equal_the_definition(
    rng, draw_ranges, on_tpu, n_queries, n_keys, dtype
):
    arrays = draw(rng, n_queries, n_keys, dtype=dtype)
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (n_queries,), n_keys)))
    weight = jnp.asarray(rng.normal(size=(n_queries, n_keys)), jnp.float32)

    found, gradients = run(arrays, bounds, weight, "pallas_tpu")

    full = tuple(x.astype(jnp.float32) for x in arrays)
    expected, expected_gradients = run(full, bounds, weight, "reference")
    inside = np.asarray(reference.key_mask(*bounds, n_keys))
    assert np.all(np.isneginf(np.asarray(found)[~inside]))
    assert relative_error(np.where(inside, found, 0), np.where(inside, expected, 0)) < TOL
    tol = TOL if dtype == jnp.float32 else BF16_GRAD_TOL
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, want) < tol


def test_sequences_of_a_batch_are_apart(rng, draw_ranges, on_tpu):
    arrays = [jnp.stack([x, -x]) for x in draw(rng, 6, 20)]
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (2, 6), 20)))
    weight = jnp.ones((2, 6, 20), jnp.float32)

    got, want = (run(tuple(arrays), bounds, weight, name) for name in ("pallas_tpu", "reference"))

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_what_it_does_not_take_is_said(rng):
    q, k, _ = draw(rng, 3, 4, dim=136)
    with pytest.raises(NotImplementedError, match="takes up to 128 index dims, got 136"):
        pallas_tpu.check(q, k)
    with pytest.raises(NotImplementedError, match="all alike, got float32, bfloat16"):
        pallas_tpu.check(q, k.astype(jnp.bfloat16))


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_queries", "n_keys"), [(4096, 4096), (4096, 32768), (1024, 131072)])
def test_it_compiles_at_the_released_widths(compile_for_tpu, monkeypatch, n_queries, n_keys):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    shapes = [(n_queries, 64, 128), (n_keys, 128)]
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    w = jax.ShapeDtypeStruct((n_queries, 64), jnp.float32)
    bound = jax.ShapeDtypeStruct((n_queries,), jnp.int32)
    weight = jax.ShapeDtypeStruct((n_queries, n_keys), jnp.float32)

    def both(q, k, w, start, end, weight):
        return scores_and_gradients((q, k, w), (start, end), weight, "pallas_tpu")

    compiled = compile_for_tpu(both, q, k, w, bound, bound, weight)

    assert compiled.cost_analysis()["flops"] >= 10 * n_queries * n_keys * 64 * 128
