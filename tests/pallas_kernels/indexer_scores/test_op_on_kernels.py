"""The derivative that the op puts around the score kernels; plain jnp stands in for both."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, indexer_scores
from pallas_kernels.indexer_scores import reference

TOL = 1e-5


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_go_through_the_other_kernel_and_stay_inside_the_range(
    rng, draw_ranges, monkeypatch, batch
):
    outside = []

    def scores(q, k, w, start, end, *, fp8):
        assert not fp8
        run = reference.indexer_scores
        return dispatch.over_batch(run, q.ndim - 3)(q, k, w, start, end)

    def score_gradients(q, k, w, d_scores, start, end):
        place = jnp.arange(k.shape[-2])
        inside = (start[..., None] <= place) & (place < end[..., None])
        outside.append(jnp.where(inside, 0.0, d_scores))
        raw = dispatch.over_batch(reference.raw_scores, q.ndim - 3)
        return jax.vjp(raw, q, k, w)[1](d_scores)

    kernel = types.SimpleNamespace(
        scores=scores, score_gradients=score_gradients, check=lambda *a, **b: None
    )
    monkeypatch.setattr(dispatch, "load", lambda module: kernel)
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    q, k, w = (
        jnp.asarray(rng.normal(size=(*batch, *shape)), jnp.float32)
        for shape in ((7, 4, 6), (9, 6), (7, 4))
    )
    start, end = map(jnp.asarray, draw_ranges(rng, (*batch, 7), 9))
    weight = jnp.asarray(rng.normal(size=(*batch, 7, 9)), jnp.float32)

    def loss(q, k, w, implementation):
        found = indexer_scores(q, k, w, start=start, end=end, implementation=implementation)
        return jnp.sum(jnp.where(jnp.isfinite(found), weight * found, 0.0))

    got = jax.grad(loss, (0, 1, 2))(q, k, w, None)

    for a, b in zip(got, jax.grad(loss, (0, 1, 2))(q, k, w, "reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=TOL)
    assert len(outside) == 1
    assert not np.any(np.asarray(outside[0]))


def test_a_cotangent_outside_the_range_reaches_no_kernel(rng, monkeypatch):
    seen = []

    def score_gradients(q, k, w, d_scores, start, end):
        seen.append(np.asarray(d_scores))
        return q, k, w

    kernel = types.SimpleNamespace(
        scores=lambda q, k, w, *_, fp8: jnp.zeros((q.shape[0], k.shape[0])),
        score_gradients=score_gradients,
        check=lambda *a, **b: None,
    )
    monkeypatch.setattr(dispatch, "load", lambda module: kernel)
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    q, k, w = jnp.ones((2, 1, 3)), jnp.ones((4, 3)), jnp.ones((2, 1))
    start, end = jnp.asarray([1, 0]), jnp.asarray([3, 0])

    jax.grad(lambda q: jnp.sum(indexer_scores(q, k, w, start=start, end=end)))(q)

    np.testing.assert_array_equal(seen[0], [[0, 1, 1, 0], [0, 0, 0, 0]])
