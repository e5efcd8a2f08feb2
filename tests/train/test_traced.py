import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dense_mla import pallas_tpu
from train import traced


def trace(fn, *shapes):
    return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def test_a_product_is_counted_in_every_round_of_a_loop():
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    found = traced.executed_flops(trace(fn, (8, 16), (5, 16, 16)), 1)

    assert found == 5 * 2 * 8 * 16 * 16


def test_recomputation_is_counted():
    def fn(x, w):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x))

    # forward, forward again, and the gradient of x
    found = traced.executed_flops(trace(jax.grad(fn), (8, 16), (16, 32)), 1)

    assert found == 3 * 2 * 8 * 16 * 32


def test_a_batched_product_and_the_dearest_branch_are_counted():
    def fn(x, y):
        return jax.lax.cond(x[0, 0, 0] > 0, lambda: jnp.einsum("bik,bkj->bij", x, y), lambda: x)

    assert traced.executed_flops(trace(fn, (3, 4, 4), (3, 4, 4)), 1) == 2 * 3 * 4 * 4 * 4


def test_each_row_of_a_ragged_product_meets_one_group():
    def fn(x, w):
        return jnp.sum(jax.lax.ragged_dot(x, w, jnp.asarray([3, 5], jnp.int32)))

    one = 2 * 8 * 16 * 32
    assert traced.executed_flops(trace(fn, (8, 16), (2, 16, 32)), 1) == one
    assert traced.executed_flops(trace(fn, (8, 16), (2, 16, 32)), 1, 0.25) == one / 4
    gradients = traced.executed_flops(trace(jax.grad(fn, (0, 1)), (8, 16), (2, 16, 32)), 1)
    assert gradients in (2 * one, 3 * one)  # the forward product may be dropped as unused


def test_a_kernels_body_runs_at_each_step_of_its_grid():
    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...])

    def fn(x, y):
        return pl.pallas_call(
            kernel,
            grid=(3, 2),
            in_specs=[
                pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
                pl.BlockSpec((16, 32), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((8, 32), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((24, 64), jnp.float32),
        )(x, y)

    assert traced.executed_flops(trace(fn, (24, 16), (16, 64)), 1) == 2 * 24 * 64 * 16


def test_a_kernel_skips_the_blocks_of_keys_that_no_range_reaches():
    n, heads, block = 4096, 4, 512
    widths = (192, 192, 128)

    def fn(q, k, v):
        end = jnp.arange(1, n + 1)
        out, _ = pallas_tpu.dense_mla(q, k, v, scale=1.0, start=jnp.zeros_like(end), end=end)
        return jnp.sum(out)

    program = trace(fn, *((n, heads, width) for width in widths))
    square = 2 * heads * n * n * (192 + 128)
    assert traced.executed_flops(program, 1) == square
    # One document a row: the blocks below the diagonal, and those on it.
    blocks = n // block
    causal = square * (blocks + 1) / (2 * blocks)
    assert causal <= traced.executed_flops(program, 1, reach=0.5) <= 1.15 * causal
    backward = trace(jax.grad(fn, (0, 1, 2)), *((n, heads, width) for width in widths))
    share = traced.executed_flops(backward, 1, reach=0.5) / traced.executed_flops(backward, 1)
    assert (blocks + 1) / (2 * blocks) <= share < 0.65


def test_a_shard_maps_body_runs_on_each_device():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    fn = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=spec, out_specs=spec)

    assert traced.executed_flops(trace(fn, (4, 4)), 6) == 6 * 2 * 4 * 4 * 4


def test_the_largest_values_come_with_their_lines():
    def fn(x):
        wide = jnp.outer(x, x)
        return jnp.sum(wide * 2.0)

    values = traced.largest_values(trace(fn, (64,)), 4, 2)

    assert [value.bytes for value in values] == [64 * 64 * 4 // 4] * 2
    assert all(value.source.startswith("test_traced.py:") for value in values)
    assert values[0].shape == "float32[64,64]" or values[0].shape == "f32[64,64]"


def test_a_loop_of_unknown_length_runs_as_often_as_its_condition_allows():
    def fn(x, n):
        def run(more):
            carry = (jnp.zeros((), jnp.int32), x)
            return jax.lax.while_loop(more, lambda c: (c[0] + 1, c[1] @ x), carry)[1]

        return run(lambda c: (c[0] < n) & (c[0] < 5)) + run(lambda c: c[0] < n)

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert traced.executed_flops(jax.make_jaxpr(fn)(*shapes), 1) == (5 + 1) * 2 * 8**3
