import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dense_mla, mosaic_tpu
from pallas_kernels.dense_mla import pallas_tpu, reference
from pallas_kernels.dense_mla.pallas_tpu_forward import Config

FLOAT32_TOL = 1e-5  # relative Frobenius error: a few float32 roundings
BF16_TOL = 6e-3  # weights, slopes and results are rounded to bfloat16, each 2^-9
SCALE = 0.2
CONFIG = Config(block_q=128, block_k=128, heads=2)  # small tiles, so that small cases have several


def draw(rng, n_queries, n_keys, heads=2, dim=24, value_dim=16, dtype=jnp.float32):
    shapes = ((n_queries, heads, dim), (n_keys, heads, dim), (n_keys, heads, value_dim))
    arrays = [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]
    d_out = jnp.asarray(rng.normal(size=(n_queries, heads, value_dim)), dtype)
    return arrays, (d_out, jnp.asarray(rng.normal(size=(n_queries, heads)), jnp.float32))


def both_ways(attend, arrays, cotangents):
    """Return out, lse and the gradients; rows without keys have no gradient of lse."""
    (out, lse), pull = jax.vjp(attend, *arrays)
    d_out, d_lse = cotangents
    return out, lse, *pull((d_out.astype(out.dtype), jnp.where(jnp.isfinite(lse), d_lse, 0.0)))


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(arrays, cotangents, start, end, selected=None, tol=FLOAT32_TOL, config=CONFIG):
    start, end = (jnp.asarray(x, jnp.int32) for x in (start, end))
    mask = None if selected is None else jnp.asarray(selected)
    kernel = functools.partial(
        pallas_tpu.dense_mla, scale=SCALE, start=start, end=end, selected=mask, config=config
    )
    allowed = reference.allowed_keys(start, end, mask, arrays[1].shape[0])
    got = jax.jit(functools.partial(both_ways, kernel))(arrays, cotangents)
    full = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangents))
    definition = functools.partial(reference.dense_mla, allowed_TS=allowed, scale=SCALE)
    want = jax.jit(functools.partial(both_ways, definition))(*full)
    some = np.isfinite(np.asarray(want[1]))
    np.testing.assert_array_equal(np.isneginf(got[1]), ~some)
    np.testing.assert_allclose(
        np.asarray(got[1])[some], np.asarray(want[1])[some], atol=1e-5, rtol=1e-6
    )
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        if name != "lse":
            assert a.dtype == arrays[0].dtype
            assert np.all(np.isfinite(np.asarray(a, np.float32))), name
            assert relative_error(a, b) < tol, name
    return got


# Regular, then irregular: no size divides a tile.


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "masked"),
    [(256, 256, False), (150, 300, True), (300, 150, False), (1, 1, False), (5, 260, True)],
)
def test_output_and_gradients_equal_the_definition(
    rng, draw_ranges, interpret_tpu, n_queries, n_keys, masked
):
    selected = rng.uniform(size=(n_queries, n_keys)) < 0.4 if masked else None
    check(*draw(rng, n_queries, n_keys), *draw_ranges(rng, (n_queries,), n_keys), selected)


def test_the_released_widths_in_bfloat16(rng, interpret_tpu):
    arrays, cotangents = draw(rng, 140, 140, 4, 192, 128, jnp.bfloat16)
    arrays[0] = arrays[0] * 0.3
    end = np.arange(140) + 1
    config = Config(block_q=128, block_k=128, heads=4)
    check(arrays, cotangents, 0 * end, end, tol=BF16_TOL, config=config)


def test_packed_documents_skip_tiles_between_them(rng, interpret_tpu):
    start = np.repeat([0, 130, 260], [130, 130, 1])
    check(*draw(rng, 261, 261), start, np.arange(261) + 1)


# Corner.


def test_empty_rows_give_zero_and_minus_infinity_and_no_gradient(rng, interpret_tpu):
    n = 300
    end = np.arange(n) + 1
    end[5] = 0
    end[100:290] = 0  # a whole tile among them
    selected = np.ones((n, n), bool)
    selected[7] = False
    arrays, cotangents = draw(rng, n, n)

    out, _, d_q, _, _ = check(arrays, cotangents, 0 * end, end, selected)

    empty = (end == 0) | ~selected.any(axis=1)
    assert not np.any(np.asarray(out)[empty])
    assert not np.any(np.asarray(d_q)[empty])


def test_all_rows_empty(rng, interpret_tpu):
    zero = np.zeros(130, int)
    for x in check(*draw(rng, 130, 130), zero, zero)[2:]:
        assert not np.any(x)


def test_logits_times_a_hundred(rng, interpret_tpu):
    (q, k, v), cotangents = draw(rng, 130, 130)
    end = np.arange(130) + 1
    check([100 * q, k, v], cotangents, 0 * end, end, tol=2e-3)  # logits ~1e3 are known to 1e-4


def test_bounds_past_the_keys_are_cut(rng, interpret_tpu):
    start, end = rng.integers(-50, 20, 9), rng.integers(0, 400, 9)
    check(*draw(rng, 9, 140), start, end)


def test_the_op_runs_it_by_name_with_a_batch(rng, draw_ranges, interpret_tpu, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.require_tpu", lambda: None)
    arrays = [jnp.stack([x, 2 * x]) for x in draw(rng, 9, 20)[0]]
    bounds = dict(
        zip(("start", "end"), map(jnp.asarray, draw_ranges(rng, (2, 9), 20)), strict=True)
    )
    selected = jnp.asarray(rng.uniform(size=(2, 9, 20)) < 0.6)

    got, want = (
        dense_mla(*arrays, scale=SCALE, **bounds, selected=selected, implementation=name)
        for name in ("pallas_tpu", "reference")
    )

    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "dim", "n", "message"),
    [
        (jnp.float16, 24, 9, "takes bfloat16 or float32, all alike, got float16"),
        (jnp.bfloat16, 264, 9, "takes up to 256 dims, got 264"),
        (jnp.bfloat16, 24, 0, "an axis of length 0"),
    ],
)
def test_what_it_does_not_take_is_said(rng, dtype, dim, n, message):
    with pytest.raises(NotImplementedError, match=message):
        pallas_tpu.check(*draw(rng, n, n, dim=dim, dtype=dtype)[0])


def test_without_a_tpu_the_name_is_refused(rng):
    arrays, _ = draw(rng, 3, 3)
    bound = jnp.zeros(3, jnp.int32)
    with pytest.raises(
        NotImplementedError, match="dense_mla: pallas_tpu: needs a TPU, this is cpu"
    ):
        dense_mla(*arrays, scale=1.0, start=bound, end=bound, implementation="pallas_tpu")


# Ahead of time, with the compiler of a real TPU.


def shapes(n, heads=128, masked=True):
    rows = [(n, heads, width) for width in (192, 192, 128)]
    bound = jax.ShapeDtypeStruct((n,), jnp.int32)
    mask = (jax.ShapeDtypeStruct((n, n), jnp.bool_),) if masked else ()
    return [*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in rows), bound, bound, *mask]


def loss(q, k, v, start, end, *mask):
    selected = mask[0] if mask else None
    attend = functools.partial(
        pallas_tpu.dense_mla, scale=SCALE, start=start, end=end, selected=selected
    )

    def total(q, k, v):
        out, lse = attend(q, k, v)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    return jax.grad(total, (0, 1, 2))(q, k, v)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("n", "heads", "masked"),  # a mask of 131072 x 131072 is not for one device
    [
        (4096, 128, False),
        (4096, 128, True),
        (32768, 128, False),
        (32768, 128, True),
        (131072, 32, False),
    ],
)
def test_it_compiles_at_the_released_widths(compile_for_tpu, n, heads, masked):
    compiled = compile_for_tpu(loss, *shapes(n, heads, masked))

    pairs = n * n * heads
    assert compiled.cost_analysis()["flops"] >= 2 * pairs * (3 * 192 + 2 * 192 + 4 * 128)


@pytest.mark.tpu_aot
def test_tiles_beyond_the_vmem_limit_are_refused_by_the_compiler(compile_for_tpu, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "VMEM_LIMIT", 2**21)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        compile_for_tpu(functools.partial(loss), *shapes(1024, 4, masked=False))
