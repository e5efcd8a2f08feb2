import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dense_mla import pallas_gpu


def shapes(dtype=jnp.bfloat16, n_queries=300, n_keys=500, dim=192, value_dim=128, heads=2):
    rows = [(n_queries, dim), (n_keys, dim), (n_keys, value_dim)]
    arrays = [jax.ShapeDtypeStruct((n, heads, d), dtype) for n, d in rows]
    bound = jax.ShapeDtypeStruct((n_queries,), jnp.int32)
    mask = jax.ShapeDtypeStruct((n_queries, n_keys), jnp.bool_)
    return arrays, bound, mask


@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_backward_lower_for_cuda_without_a_gpu(masked):
    (q, k, v), bound, mask = shapes()

    def loss(q, k, v, start, end, selected):
        out, lse = pallas_gpu.dense_mla(
            q, k, v, scale=0.1, start=start, end=end, selected=selected if masked else None
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, v, bound, bound, mask)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 3  # forward, backward, dq out of fragment order


def test_vmap_launches_once_for_each_member():
    arrays, bound, _ = shapes()
    batched = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (*arrays, bound, bound)]

    def loss(q, k, v, start, end):
        out, lse = pallas_gpu.dense_mla(q, k, v, scale=0.1, start=start, end=end)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    traced = jax.jit(jax.vmap(jax.grad(loss))).trace(*batched)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == 2


@pytest.mark.parametrize(
    ("options", "scale", "message"),
    [
        ({"dtype": jnp.float32}, 0.1, "takes bfloat16, got float32"),
        ({"dim": 200}, 0.1, "takes up to 192 dims, got 200"),
        ({"value_dim": 136}, 0.1, "takes up to 128 value dims, got 136"),
        ({"n_keys": 0}, 0.1, "an axis of length 0"),
        ({}, -1.0, "scale=-1.0 must be positive"),
    ],
)
def test_what_it_does_not_take_is_said(options, scale, message):
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in shapes(**options)[0])
    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu.check(q, k, v, scale)
