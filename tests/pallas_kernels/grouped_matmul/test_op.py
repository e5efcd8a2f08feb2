import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, grouped_matmul
from pallas_kernels.grouped_matmul import op, reference

FLOAT32_TOL = 1e-5  # sums of 7 products of size ~1
BF16_DIFF = 2e-5  # calc_diff; the output is rounded to 8 bits of mantissa
ALIGN = 4
BOTH = pytest.mark.parametrize("implementation", ["blocked", "ragged_dot"])

# All groups full; some of size zero at either end and in the middle; rows left over; nothing at all.
SIZES = pytest.mark.parametrize(
    "sizes", [(8, 4, 12), (0, 8, 0, 12, 0), (4, 0, 8), (24,), (0, 0, 0)], ids=str
)


def oracle(x, w, sizes):
    """Multiply row by row in float64."""
    out = np.zeros((len(x), w.shape[2]))
    row = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            out[row] = x[row] @ w[expert]
            row += 1
    return out


def draw(rng, sizes, n_rows=24):
    return rng.normal(size=(n_rows, 7)), rng.normal(size=(len(sizes), 7, 5))


def run(x, w, sizes, implementation, dtype=jnp.float32):
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    sizes = jnp.asarray(sizes, jnp.int32)
    return grouped_matmul(x, w, sizes, align=ALIGN, implementation=implementation)


@BOTH
@SIZES
def test_products_equal_a_loop_over_rows(rng, sizes, implementation):
    x, w = draw(rng, sizes)
    np.testing.assert_allclose(
        run(x, w, sizes, implementation), oracle(x, w, sizes), atol=FLOAT32_TOL
    )


@BOTH
def test_rows_past_the_last_group_are_zero_even_where_they_are_nan(rng, implementation):
    x, w = draw(rng, (4, 8))
    x[12:] = np.nan

    out = np.asarray(run(x, w, (4, 8), implementation))

    assert np.all(out[12:] == 0)
    np.testing.assert_allclose(out[:12], oracle(x, w, (4, 8))[:12], atol=FLOAT32_TOL)


@BOTH
@SIZES
def test_gradients_equal_a_loop_over_rows(rng, sizes, implementation):
    x, w = draw(rng, sizes)
    d_out = rng.normal(size=(24, 5))
    group = np.repeat(np.arange(len(sizes)), sizes)
    d_x, d_w = np.zeros(x.shape), np.zeros(w.shape)
    for row, expert in enumerate(group):
        d_x[row] = w[expert] @ d_out[row]
        d_w[expert] += np.outer(x[row], d_out[row])

    got = jax.grad(lambda x, w: jnp.sum(run(x, w, sizes, implementation) * d_out), (0, 1))(
        jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    )

    for a, b in zip(got, (d_x, d_w), strict=True):
        np.testing.assert_allclose(a, b, atol=2 * FLOAT32_TOL)


@BOTH
def test_bf16_products_accumulate_in_float32(rng, implementation, calc_diff):
    sizes = (8, 4, 12)
    x, w = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in draw(rng, sizes))

    out = run(x, w, sizes, implementation, jnp.bfloat16)

    assert out.dtype == jnp.bfloat16
    assert calc_diff(out, oracle(x, w, sizes)) < BF16_DIFF


def test_a_cpu_prefers_blocks(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "cpu")
    assert op.preferred_order() == ("blocked", "ragged_dot")
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    assert op.preferred_order() == ("ragged_dot", "blocked")


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_a_precision_set_around_it_is_for_float32_alone(dtype, precision):
    # XLA's grouped kernel on TPU does not compile for bfloat16 with another precision than the default.
    x, w = jnp.zeros((8, 4), dtype), jnp.zeros((2, 4, 4), dtype)
    with jax.default_matmul_precision("highest"):
        traced = jax.make_jaxpr(lambda: reference.ragged(x, w, jnp.asarray([4, 4])))()
    found = [e.params["precision"] for e in traced.eqns if "ragged" in e.primitive.name]
    assert len(found) == 1
    assert precision in str(found[0])


@pytest.mark.parametrize("align", [0, 5])
def test_an_align_that_does_not_divide_the_rows_is_refused(align):
    with pytest.raises(ValueError, match=f"grouped_matmul: align={align} must divide M=24"):
        grouped_matmul(
            jnp.zeros((24, 2)), jnp.zeros((1, 2, 3)), jnp.zeros(1, jnp.int32), align=align
        )


def test_an_unknown_implementation_is_refused(rng):
    with pytest.raises(ValueError, match="grouped_matmul: implementation='magic' must be one of"):
        run(*draw(rng, (24,)), (24,), "magic")


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (8, 0, 3, 4), (8, 2, 0, 4)])
def test_an_empty_axis_gives_zeros(shape):
    n_rows, groups, depth, columns = shape
    w, sizes = jnp.ones((groups, depth, columns)), jnp.zeros(groups, jnp.int32)

    out = grouped_matmul(jnp.ones((n_rows, depth)), w, sizes, align=8)

    assert out.shape == (n_rows, columns)
    assert not np.any(out)


def test_the_reference_is_a_form_without_a_kernel(rng, monkeypatch):
    sizes = (8, 4, 12)
    x, w = draw(rng, sizes)
    np.testing.assert_array_equal(
        run(x, w, sizes, "reference"), run(x, w, sizes, op.preferred_order()[0])
    )
    monkeypatch.setattr(op.dispatch, "require_hopper", lambda: pytest.fail("a kernel was asked"))
    run(x, w, sizes, "reference")
