"""What the op does around a kernel: batches, the derivative, options; a kernel stands in that is the definition."""

import functools
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
        if scale > 1 or (value_dim < 128 and value_dim % 2):
            raise NotImplementedError("takes even value_dim and small scales")

    def check_backward(q, kv, topk_idx, *, scale, value_dim):
        if scale == 1 or value_dim not in (6, 512):
            raise NotImplementedError("takes value_dim 6 or 512 and no scale of 1")

    def load(module):
        if module.endswith("backward"):
            return types.SimpleNamespace(check=check_backward, backward=backward)
        return types.SimpleNamespace(check=check, forward=forward)

    monkeypatch.setattr(dispatch, "load", load)
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)
    return seen


def draw(rng, batch=(), n_queries=5, n_keys=9, k=4, dim=10):
    q = jnp.asarray(rng.normal(size=(*batch, n_queries, 3, dim)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(*batch, n_keys, dim)), jnp.float32)
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
        options = {"scale": 1.0, "value_dim": 4, "implementation": implementation}
        out, lse = sparse_mla(q, kv, idx, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0))

    got = jax.grad(loss, (0, 1))(q, kv, None)

    assert_close(got, jax.grad(loss, (0, 1))(q, kv, "reference"))
    assert [c[0] for c in calls] == ["forward"]
    with pytest.raises(NotImplementedError, match="backward: gluon_gpu: takes value_dim 6 or 512"):
        jax.grad(loss)(q, kv, "gluon_gpu")


@pytest.mark.parametrize(
    ("value_dim", "forward_dim", "backward_dim"),
    [(6, 10, 10), (4, 10, 576), (5, 192, 576), (10, 10, 576), (1, 192, 576)],
)
def test_rows_of_other_widths_are_padded_for_the_kernels(
    rng, calls, value_dim, forward_dim, backward_dim
):
    q, kv, idx = draw(rng)

    def loss(q, kv, implementation):
        options = {"scale": 0.3, "value_dim": value_dim, "implementation": implementation}
        out, lse = sparse_mla(q, kv, idx, **options)
        assert out.shape == (5, 3, value_dim)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0))

    got = jax.value_and_grad(loss, (0, 1))(q, kv, None)

    assert_close(got, jax.value_and_grad(loss, (0, 1))(q, kv, "reference"))
    assert calls[0][1][-1] == forward_dim
    assert calls[1][1]["value_dim"] == (value_dim if backward_dim == 10 else backward_dim - 64)


def test_columns_beyond_the_rest_count_as_values_that_are_not_read(rng, calls):
    q, kv, idx = draw(rng, dim=90)

    def loss(q, kv, implementation):
        options = {"scale": 0.1, "value_dim": 7, "implementation": implementation}
        out, lse = sparse_mla(q, kv, idx, **options)
        assert out.shape == (5, 3, 7)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0))

    got = jax.value_and_grad(loss, (0, 1))(q, kv, None)

    assert_close(got, jax.value_and_grad(loss, (0, 1))(q, kv, "reference"))
    assert calls[0][1][-1] == 90
    assert calls[1][1]["value_dim"] == 512


def test_an_input_that_no_kernel_takes_runs_as_the_definition(rng, calls):
    q, kv, idx = draw(rng)
    sparse_mla(q, kv, idx, scale=2.0, value_dim=6)
    assert calls == []
    with pytest.raises(NotImplementedError, match="gluon_gpu: an axis of length 0"):
        sparse_mla(q[:0], kv, idx[:0], **OPTIONS, implementation="gluon_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["gluon_gpu", "pallas_gpu"])
@pytest.mark.parametrize(
    ("value_dim", "dim"), [(128, 160), (512, 512), (100, 120), (300, 301), (7, 90)]
)
def test_other_widths_agree_with_the_definition(rng, value_dim, dim, implementation):
    shapes = (50, 8, dim), (700, dim), (50, 8, value_dim)
    q, kv, d_out = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    idx = jnp.asarray(rng.integers(-1, 700, size=(50, 130)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=(2,))
    def run(q, kv, name):
        options = {"scale": dim**-0.5, "value_dim": value_dim, "implementation": name}
        out, pull = jax.vjp(lambda q, kv: sparse_mla(q, kv, idx, **options), q, kv)
        return *out, *pull((d_out.astype(out[0].dtype), jnp.ones_like(out[1])))

    got = run(q, kv, implementation)

    with jax.default_matmul_precision("highest"):
        expected = run(q.astype(jnp.float32), kv.astype(jnp.float32), "reference")
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)
