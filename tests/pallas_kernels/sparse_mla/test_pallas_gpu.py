"""The Pallas kernels for Hopper against float32 formulas, on the device, and what they refuse, anywhere."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.sparse_mla import pallas_gpu, pallas_gpu_backward

OUT_TOL = 3e-3  # relative; weights and output are rounded to 8 bits of mantissa
GRAD_TOL = 6e-3  # relative; P, dS and the gradients are
LSE_TOL = 1e-4  # logits ~100 in float32
DIM, VALUE_DIM = 576, 512
SCALE = DIM**-0.5
STATIC = {"scale": SCALE, "value_dim": VALUE_DIM}
N_QUERIES, N_HEADS, N_KEYS, N_SLOTS = 70, 128, 4096, 2048  # more tiles than multiprocessors
ONE_TILE = 133, 16, 513, 100
TWO_CHUNKS = pallas_gpu_backward.Config(chunk=64)


def attend_one(kv, q, idx, d_out, d_lse):
    """Return out, lse, dq and the added rows of dkv of one query, in float32."""
    some = (idx >= 0) & (idx < kv.shape[0])
    rows = jnp.where(some[:, None], kv[jnp.where(some, idx, 0)], 0.0)
    values = rows[:, :VALUE_DIM]
    with jax.default_matmul_precision("highest"):
        logits = jnp.where(some, SCALE * q @ rows.T, -jnp.inf)
        peak = jnp.max(logits, axis=1, keepdims=True)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        p = jnp.exp(logits - peak)
        total = p.sum(1, keepdims=True)
        p = p / jnp.where(total > 0, total, 1.0)
        out = p @ values
        ds = p * (d_out @ values.T - jnp.sum(out * d_out, 1, keepdims=True) + d_lse[:, None])
        d_rows = (SCALE * ds.T @ q).at[:, :VALUE_DIM].add(p.T @ d_out)
        return (
            out,
            (peak + jnp.log(total))[:, 0],
            SCALE * ds @ rows,
            jnp.where(some[:, None], d_rows, 0.0),
        )


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})  # a minute of compiling
def expected(q, kv, idx, d_out, d_lse):
    """Return out, lse, dq and dkv in float32, one query after another."""
    q, kv, d_out = (x.astype(jnp.float32) for x in (q, kv, d_out))

    def step(dkv, row):
        *results, d_rows = attend_one(kv, *row)
        return dkv.at[row[1].clip(0, kv.shape[0] - 1)].add(d_rows), results

    dkv, (out, lse, dq) = jax.lax.scan(step, jnp.zeros_like(kv), (q, idx, d_out, d_lse))
    return out, lse, dq, dkv


def draw(rng, n_queries=N_QUERIES, n_heads=N_HEADS, n_keys=N_KEYS, n_slots=N_SLOTS):
    """Draw q, kv, indices (some invalid, some twice), dO and dlse on the host, where nothing is compiled."""
    q = rng.standard_normal((n_queries, n_heads, DIM), np.float32).astype(jnp.bfloat16)
    kv = rng.standard_normal((n_keys, DIM), np.float32).astype(jnp.bfloat16)
    idx = rng.integers(-1, n_keys + 1, (n_queries, n_slots), np.int32)
    d_out = rng.standard_normal((n_queries, n_heads, VALUE_DIM), np.float32).astype(jnp.bfloat16)
    return q, kv, idx, d_out, rng.standard_normal((n_queries, n_heads), np.float32)


def distance(x, y):
    """Return the relative distance of two arrays."""
    x, y = (np.asarray(a, np.float32) for a in (x, y))
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


def check_forward(out, lse, expected_out, expected_lse):
    empty = np.isneginf(expected_lse)
    assert out.dtype == jnp.bfloat16
    assert np.array_equal(np.isneginf(lse), empty)
    assert np.all(out[empty] == 0)
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], atol=LSE_TOL)
    assert max(distance(a, b) for a, b in zip(out, expected_out, strict=True)) < OUT_TOL


def check_backward(dq, dkv, expected_dq, expected_dkv, empty):
    assert dq.dtype == dkv.dtype == jnp.bfloat16
    assert np.all(dq[empty] == 0)
    assert distance(dq, expected_dq) < GRAD_TOL
    assert distance(dkv, expected_dkv) < GRAD_TOL


def check_case(q, kv, idx, d_out, d_lse, *, stale=0.0):
    """Compare both directions with the formulas; `stale` stands in the forward's output of empty rows."""
    wanted = jax.device_get(expected(q, kv, idx, d_out, d_lse))
    out, lse = jax.device_get(pallas_gpu.forward(q, kv, idx, **STATIC))
    check_forward(out, lse, *wanted[:2])
    empty = np.isneginf(lse)
    out = np.where(empty[..., None], stale, out).astype(out.dtype)
    grads = pallas_gpu_backward.backward(
        q, kv, idx, out, lse, d_out, d_lse, config=TWO_CHUNKS, **STATIC
    )
    check_backward(*jax.device_get(grads), *wanted[2:], empty)


@pytest.mark.gpu
def test_random_slots_agree_with_the_formulas(rng):
    check_case(*draw(rng))


@pytest.mark.gpu
def test_large_logits_stay_accurate(rng):
    q, *rest = draw(rng)
    check_case(8 * q, *rest)


@pytest.mark.gpu
def test_masks_empty_rows_and_nan_rows_are_right(rng):
    q, kv, idx, d_out, d_lse = draw(rng)
    idx[rng.uniform(size=idx.shape) < 0.3] = -1
    idx[0], idx[1], idx[2, 100:], idx[3, :1990], idx[66:69] = -1, -1, -1, -1, -1
    idx[1, 777] = 5
    idx[4, ::2], idx[5], idx[6, 1:] = N_KEYS + 7, 2**31 - 1, -5
    idx[(idx == 0) | (idx == N_KEYS - 1)] = -1
    kv[0] = kv[-1] = np.nan  # no slot names them
    check_case(q, kv, idx, d_out, d_lse, stale=np.nan)


@pytest.mark.gpu
def test_every_query_may_pick_the_same_keys_twice(rng):
    q, kv, idx, *rest = draw(rng)
    idx[:] = np.arange(N_SLOTS) // 2
    check_case(q, kv, idx, *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [ONE_TILE, (5, 72, 95, 1)])
def test_odd_sizes_agree_with_the_formulas(rng, sizes):
    check_case(*draw(rng, *sizes))


@pytest.mark.gpu
def test_forward_is_repeatable(rng):
    q, kv, idx, *_ = draw(rng)
    first = jax.device_get(pallas_gpu.forward(q, kv, idx, **STATIC))
    for _ in range(10):
        again = jax.device_get(pallas_gpu.forward(q, kv, idx, **STATIC))
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_batches_are_separate_sequences(rng):
    cases = [draw(rng, *ONE_TILE)[:3] for _ in range(2)]
    attend = functools.partial(pallas_gpu.forward, **STATIC)
    batch = jax.device_get(jax.vmap(attend)(*(np.stack(x) for x in zip(*cases, strict=True))))
    for i, case in enumerate(cases):
        for a, b in zip(batch, jax.device_get(attend(*case)), strict=True):
            np.testing.assert_array_equal(a[i], b)


def shapes(n_heads=128, dim=DIM, dtype=jnp.bfloat16, n_slots=128):
    q = jax.ShapeDtypeStruct((256, n_heads, dim), dtype)
    return (
        q,
        jax.ShapeDtypeStruct((512, dim), dtype),
        jax.ShapeDtypeStruct((256, n_slots), jnp.int32),
    )


@pytest.mark.parametrize(
    ("arrays", "value_dim", "why"),
    [
        (shapes(dim=192), 128, "576 dims"),
        (shapes(), 256, "512 are values"),
        (shapes(dtype=jnp.float32), VALUE_DIM, "bfloat16"),
        (shapes(n_slots=0), VALUE_DIM, "empty"),
    ],
)
def test_other_arrays_are_refused(arrays, value_dim, why):
    for module in (pallas_gpu, pallas_gpu_backward):
        with pytest.raises(NotImplementedError, match=why):
            module.check(*arrays, scale=1.0, value_dim=value_dim)


def test_the_backward_refuses_more_heads_than_it_holds():
    with pytest.raises(NotImplementedError, match="at most 128 heads"):
        pallas_gpu_backward.check(*shapes(n_heads=192), scale=1.0, value_dim=VALUE_DIM)


def test_a_scale_that_turns_the_order_of_logits_is_refused():
    for module in (pallas_gpu, pallas_gpu_backward):
        with pytest.raises(NotImplementedError, match=r"positive scale, got -1\.0"):
            module.check(*shapes(), scale=-1.0, value_dim=VALUE_DIM)


@pytest.mark.parametrize("n_heads", [16, 128])
def test_the_kernels_lower_without_a_device(n_heads):
    q, kv, idx = shapes(n_heads)
    out = jax.ShapeDtypeStruct((256, n_heads, VALUE_DIM), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((256, n_heads), jnp.float32)

    forward = pallas_gpu.forward.trace(q, kv, idx, **STATIC)
    backward = pallas_gpu_backward.backward.trace(q, kv, idx, out, lse, out, lse, **STATIC)

    names = ("forward", "backward")
    text = "".join(x.lower(lowering_platforms=("cuda",)).as_text() for x in (forward, backward))
    assert all(f"sparse_mla_{name}" in text for name in names)


@pytest.mark.parametrize("backward", [False, True])
def test_the_compiler_moves_no_memory_access_over_a_barrier(monkeypatch, backward):
    """No GPU: looks at what each barrier, gate and fence tells LLVM when the kernel is lowered."""
    seen, emit = {}, asm.emit

    def record(text, constraints, operands):
        seen[text] = constraints
        emit(text, constraints, operands)

    monkeypatch.setattr(asm, "emit", record)
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, kv, out = bf16((9, 128, DIM)), bf16((200, DIM)), bf16((9, 128, VALUE_DIM))
    idx = jax.ShapeDtypeStruct((9, 100), jnp.int32)
    lse = jax.ShapeDtypeStruct((9, 128), jnp.float32)
    kernel = pallas_gpu_backward.backward if backward else pallas_gpu.forward
    arrays = (q, kv, idx, *((out, lse, out, lse) if backward else ()))
    jax.jit(functools.partial(kernel, **STATIC)).trace(*arrays).lower(lowering_platforms=("cuda",))
    ordering = {text: c for text, c in seen.items() if re.search(r"\bbar\.|fence\.|mbarrier", text)}
    assert len(ordering) > 5
    assert {text for text, c in ordering.items() if asm.MEMORY not in c.split(",")} == set()
