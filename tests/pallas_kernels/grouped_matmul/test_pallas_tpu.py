import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, grouped_matmul

FLOAT32_TOL = 2e-5
BF16_TOL = 6e-3  # relative Frobenius error: results are rounded to 2^-9


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


@functools.partial(jax.jit, static_argnames=("name",))
def both_ways(x, w, sizes, d_out, name):
    fn = functools.partial(grouped_matmul, group_sizes=sizes, align=1, implementation=name)
    out, pull = jax.vjp(fn, x, w)
    return out, *pull(d_out.astype(out.dtype))


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize(
    ("sizes", "n_rows"),
    [
        ((8, 4, 12), 24),
        ((0, 137, 0, 100, 0), 300),  # groups that share a tile, empty ones, rows left over
        ((0, 0, 0), 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_gradients_equal_the_definition(rng, on_tpu, sizes, n_rows, dtype):
    shapes = (n_rows, 40), (len(sizes), 40, 24), (n_rows, 24)
    x, w, d_out = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)

    got = both_ways(x, w, jnp.asarray(sizes), d_out, "pallas_tpu")

    full = (a.astype(jnp.float32) for a in (x, w))
    want = both_ways(*full, jnp.asarray(sizes), d_out, "blocked")
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < (FLOAT32_TOL if dtype == jnp.float32 else BF16_TOL)


def test_rows_past_the_last_group_are_zero_even_where_they_are_nan(rng, on_tpu):
    x = jnp.asarray(rng.normal(size=(20, 8)), jnp.float32).at[12:].set(jnp.nan)
    w = jnp.asarray(rng.normal(size=(2, 8, 8)), jnp.float32)
    d_out = jnp.ones((20, 8), jnp.float32)
    for result in both_ways(x, w, jnp.asarray([4, 8]), d_out, "pallas_tpu"):
        assert np.all(np.isfinite(result))


def test_other_dtypes_are_refused(on_tpu):
    x, w = jnp.zeros((8, 8), jnp.float16), jnp.zeros((1, 8, 8), jnp.float16)
    with pytest.raises(NotImplementedError, match="pallas_tpu: takes bfloat16 or float32"):
        grouped_matmul(x, w, jnp.asarray([8]), align=1, implementation="pallas_tpu")


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("k", "n"), [(7168, 2048), (2048, 7168)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_it_compiles_at_the_released_widths(compile_for_tpu, monkeypatch, k, n, dtype):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    shapes = (8192, k), (16, k, n), (8192, n)
    x, w, d_out = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)

    compiled = compile_for_tpu(lambda *a: both_ways(*a, "pallas_tpu"), x, w, sizes, d_out)

    assert compiled.cost_analysis()["flops"] >= 3 * 2 * 8192 * k * n
