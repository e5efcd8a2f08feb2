import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, grouped_matmul
from pallas_kernels.grouped_matmul import pallas_gpu

BF16_TOL = 3e-3  # relative Frobenius error of one rounding to bfloat16


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that the default device is one."""
    monkeypatch.setattr(dispatch, "require_hopper", lambda: None)


def run(x, w, sizes, align):
    return grouped_matmul(x, w, sizes, align=align, implementation="pallas_gpu")


# The 671B experts' two shapes, many experts a device, and tiles that hang over K and N.
@pytest.mark.parametrize("align", [4, 8, 128])
@pytest.mark.parametrize(
    "shape", [(16384, 32, 7168, 2048), (4096, 256, 2048, 7168), (640, 3, 320, 448)], ids=str
)
def test_products_and_gradients_lower_for_cuda_without_a_gpu(hopper, shape, align):
    n_rows, n_groups, depth, columns = shape
    x = jax.ShapeDtypeStruct((n_rows, depth), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n_groups, depth, columns), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((n_groups,), jnp.int32)

    def loss(x, w, sizes):
        return jnp.sum(run(x, w, sizes, align).astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w, sizes).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("@mosaic_gpu") == 3


# Empty groups, a group of more than a tile, rows past the last group that are NaN; 12 does not divide into eights.
@pytest.mark.parametrize(("sizes", "align"), [((136, 0, 24), 8), ((64, 128), 64), ((12, 60), 12)])
def test_interpreted_kernels_equal_a_loop_over_groups(hopper, monkeypatch, rng, sizes, align):
    monkeypatch.setattr(pallas_gpu, "Config", functools.partial(pallas_gpu.Config, n_sms=2, band=2))
    n_rows, depth, columns = -(-(sum(sizes) + 8) // align) * align, 256, 320
    draws = (n_rows, depth), (len(sizes), depth, columns), (n_rows, columns)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in draws)
    x, d_out = (a.at[sum(sizes) :].set(jnp.nan) for a in (x, d_out))
    exact = [np.asarray(a, np.float64) for a in (x, w, d_out)]
    want = [np.zeros((n_rows, columns)), np.zeros((n_rows, depth)), np.zeros(w.shape)]
    for group, size in enumerate(sizes):
        rows = slice(sum(sizes[:group]), sum(sizes[:group]) + size)
        want[0][rows] = exact[0][rows] @ exact[1][group]
        want[1][rows] = exact[2][rows] @ exact[1][group].T
        want[2][group] = exact[0][rows].T @ exact[2][rows]

    with plgpu.force_gpu_interpret_mode():
        out, pull = jax.vjp(lambda x, w: run(x, w, jnp.asarray(sizes, jnp.int32), align), x, w)
        got = (out, *pull(d_out))

    for a, b in zip(got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) < BF16_TOL * np.linalg.norm(b)
    assert np.all(np.asarray(got[0][sum(sizes) :]) == 0)
    assert np.all(np.asarray(got[1][sum(sizes) :]) == 0)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (jnp.zeros((8, 64)), jnp.zeros((1, 64, 64), jnp.bfloat16), "takes bfloat16, got float32"),
        (jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64)), "bfloat16 and float32"),
        (
            jnp.zeros((8, 64), jnp.bfloat16),
            jnp.zeros((1, 64, 96), jnp.bfloat16),
            r"multiples of 64, got \(64, 96\)",
        ),
        (
            jnp.zeros((8, 256), jnp.bfloat16),
            jnp.zeros((1, 256, 256), jnp.bfloat16),
            r"M of at least 64, K and N of at least 256, got \(8, 256, 256\)",
        ),
        (
            jnp.zeros((64, 256), jnp.bfloat16),
            jnp.zeros((1, 256, 192), jnp.bfloat16),
            r"got \(64, 256, 192\)",
        ),
    ],
)
def test_what_it_does_not_take_is_said(hopper, x, w, message):
    with pytest.raises(NotImplementedError, match=f"grouped_matmul: pallas_gpu: .*{message}"):
        run(x, w, jnp.zeros(1, jnp.int32), 8)


def test_a_cpu_is_refused(monkeypatch):
    def refuse():
        raise NotImplementedError("needs an NVIDIA Hopper GPU, this is a cpu")

    monkeypatch.setattr(dispatch, "require_hopper", refuse)
    x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="pallas_gpu: needs an NVIDIA Hopper GPU"):
        run(x, w, jnp.zeros(1, jnp.int32), 8)
