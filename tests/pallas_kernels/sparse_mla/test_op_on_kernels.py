"""What the op does around a kernel: batches, the derivative, options; a kernel stands in that is the definition."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, sparse_mla
from pallas_kernels.sparse_mla import reference

TOL = 1e-5
OPTIONS = {"scale": 0.3, "value_dim": 6}


@pytest.fixture
def calls(monkeypatch):
    """Let every kernel of the op be the definition; return what it was called with."""
    seen = []

    def forward(q, kv, topk_idx, *, scale, value_dim):
        seen.append(("forward", q.shape, kv.shape, topk_idx))
        return reference.sparse_mla(q, kv, topk_idx, scale, value_dim)

    def backward(q, kv, topk_idx, out, lse, d_out, d_lse, **options):
        seen.append(("backward", options))
        attend = lambda q, kv: reference.sparse_mla(  # noqa: E731
            q, kv, topk_idx, options["scale"], options["value_dim"]
        )
        return jax.vjp(attend, q, kv)[1]((d_out, d_lse))

    def check(q, kv, topk_idx, *, scale, value_dim):
        if value_dim == 5:
            raise NotImplementedError("takes even value_dim")

    def check_backward(q, kv, topk_idx, *, scale, value_dim):
        if value_dim == 4:
            raise NotImplementedError("takes value_dim 6")

    def load(module):
        if module.endswith("backward"):
            return types.SimpleNamespace(check=check_backward, backward=backward)
        return types.SimpleNamespace(check=check, forward=forward)

    monkeypatch.setattr(dispatch, "load", load)
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    return seen


def draw(rng, batch=(), n_queries=5, n_keys=9, k=4):
    q = jnp.asarray(rng.normal(size=(*batch, n_queries, 3, 10)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(*batch, n_keys, 10)), jnp.float32)
    return q, kv, jnp.asarray(rng.integers(-1, n_keys + 1, size=(*batch, n_queries, k)), jnp.int32)


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=TOL)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_batch_goes_through_the_kernel_as_one_sequence(rng, calls, batch):
    arrays = draw(rng, batch)

    got = sparse_mla(*arrays, **OPTIONS)

    assert_close(got, sparse_mla(*arrays, **OPTIONS, implementation="reference"))
    n = int(np.prod(batch))
    assert [c[:3] for c in calls] == [("forward", (5 * n, 3, 10), (9 * n, 10))]


def test_indices_past_a_sequence_do_not_reach_the_next_one(rng, calls):
    q, kv, _ = draw(rng, (2,))
    idx = jnp.asarray([[[9, 3, -1, 0]] * 5, [[0, 8, 9, 10]] * 5], jnp.int32)

    sparse_mla(q, kv, idx, **OPTIONS)

    np.testing.assert_array_equal(calls[0][3][0], [-1, 3, -1, 0])
    np.testing.assert_array_equal(calls[0][3][5], [9, 17, -1, -1])


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_of_both_outputs_go_through_the_backward_kernel(rng, calls, batch):
    q, kv, idx = draw(rng, batch)
    idx = idx.at[..., 1, :].set(-1)

    def loss(q, kv, implementation):
        out, lse = sparse_mla(q, kv, idx, **OPTIONS, implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0))

    got = jax.grad(loss, (0, 1))(q, kv, None)

    assert_close(got, jax.grad(loss, (0, 1))(q, kv, "reference"))
    assert [c for c in calls if c[0] == "backward"] == [("backward", OPTIONS)]


def test_a_repeatable_gradient_is_asked_of_the_kernel_that_has_one(rng, calls):
    q, kv, idx = draw(rng)

    def loss(q, implementation):
        out, _ = sparse_mla(
            q, kv, idx, **OPTIONS, deterministic=True, implementation=implementation
        )
        return jnp.sum(out)

    jax.grad(loss)(q, None)

    assert calls[-1] == ("backward", OPTIONS | {"deterministic": True})
    with pytest.raises(NotImplementedError, match="backward: pallas_gpu: is not deterministic"):
        jax.grad(loss)(q, "pallas_gpu")


def test_a_backward_that_no_kernel_takes_runs_as_the_definition(rng, calls):
    q, kv, idx = draw(rng)

    def loss(q, kv, implementation):
        options = {"scale": 0.3, "value_dim": 4, "implementation": implementation}
        out, lse = sparse_mla(q, kv, idx, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0))

    got = jax.grad(loss, (0, 1))(q, kv, None)

    assert_close(got, jax.grad(loss, (0, 1))(q, kv, "reference"))
    assert [c[0] for c in calls] == ["forward"]
    with pytest.raises(NotImplementedError, match="backward: gluon_gpu: takes value_dim 6"):
        jax.grad(loss)(q, kv, "gluon_gpu")


def test_an_input_that_no_kernel_takes_runs_as_the_definition(rng, calls):
    q, kv, idx = draw(rng)
    sparse_mla(q, kv, idx, scale=0.3, value_dim=5)
    assert calls == []
    with pytest.raises(NotImplementedError, match="gluon_gpu: an axis of length 0"):
        sparse_mla(q[:0], kv, idx[:0], **OPTIONS, implementation="gluon_gpu")
