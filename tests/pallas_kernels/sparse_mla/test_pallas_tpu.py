import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, mosaic_tpu, sparse_mla
from pallas_kernels.sparse_mla import pallas_tpu, pallas_tpu_backward, pallas_tpu_rows, reference

FLOAT32_TOL = 2e-5  # relative Frobenius error: a few float32 roundings
BF16_TOL = 6e-3  # weights, slopes and results are rounded to bfloat16, each 2^-9
SCALE, VALUE_DIM = 0.2, 136


# Small: the interpreter takes milliseconds for each of the 32 copies that a query makes at least.
def draw(rng, n_queries=3, n_keys=40, n_slots=20, heads=3, dim=150, dtype=jnp.float32):
    q = jnp.asarray(rng.normal(size=(n_queries, heads, dim)), dtype)
    kv = jnp.asarray(rng.normal(size=(n_keys, dim)), dtype)
    idx = rng.integers(-1, n_keys + 1, size=(n_queries, n_slots)).astype(np.int32)
    return q, kv, idx


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@functools.partial(jax.jit, static_argnames=("value_dim",))
def on_kernels(q, kv, idx, d_out, d_lse, value_dim):
    options = {"scale": SCALE, "value_dim": value_dim}
    out, lse = pallas_tpu.forward(q, kv, idx, **options)
    d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0.0)
    return out, lse, *pallas_tpu_backward.backward(q, kv, idx, out, lse, d_out, d_lse, **options)


@functools.partial(jax.jit, static_argnames=("value_dim",))
def by_definition(q, kv, idx, d_out, d_lse, value_dim):
    (out, lse), pull = jax.vjp(
        lambda q, kv: reference.sparse_mla(q, kv, idx, SCALE, value_dim), q, kv
    )
    d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0.0)
    return out, lse, *pull((d_out.astype(out.dtype), d_lse))


def check(rng, q, kv, idx, value_dim=VALUE_DIM, tol=FLOAT32_TOL):
    d_out = jnp.asarray(rng.normal(size=(*q.shape[:2], value_dim)), q.dtype)
    d_lse = jnp.asarray(rng.normal(size=q.shape[:2]), jnp.float32)
    idx = jnp.asarray(idx)
    got = on_kernels(q, kv, idx, d_out, d_lse, value_dim)
    full = (x.astype(jnp.float32) for x in (q, kv))
    want = by_definition(*full, idx, d_out.astype(jnp.float32), d_lse, value_dim)
    some = np.isfinite(np.asarray(want[1]))
    np.testing.assert_array_equal(np.isneginf(got[1]), ~some)
    np.testing.assert_allclose(
        np.asarray(got[1])[some], np.asarray(want[1])[some], atol=1e-4, rtol=1e-5
    )
    for name, a, b in zip(("out", "lse", "dq", "dkv"), got, want, strict=True):
        if name != "lse":
            assert a.dtype == q.dtype
            assert np.all(np.isfinite(np.asarray(a, np.float32))), name
            assert relative_error(a, b) < tol, name
    return got


# Regular and irregular.


def test_output_and_gradients_equal_the_definition(rng, interpret_tpu):
    check(rng, *draw(rng))


@pytest.mark.parametrize(
    ("shape", "value_dim"),
    [
        ({"n_queries": 1, "n_keys": 1, "n_slots": 1, "heads": 1, "dim": 3}, 2),
        ({"n_queries": 1, "n_keys": 300, "n_slots": 130, "heads": 17, "dim": 128}, 128),
        ({"n_queries": 2, "n_keys": 32, "n_slots": 40, "heads": 2, "dim": 64}, 48),
    ],
)
def test_odd_sizes_equal_the_definition(rng, interpret_tpu, shape, value_dim):
    check(rng, *draw(rng, **shape), value_dim)


def test_the_released_widths_in_bfloat16(rng, interpret_tpu):
    q, kv, idx = draw(rng, 2, 500, 64, 16, 576, jnp.bfloat16)
    check(rng, q * 0.3, kv, idx, 512, BF16_TOL)


def test_gradients_of_chunks_of_queries_add_up(rng, interpret_tpu, monkeypatch):
    arrays = draw(rng)
    monkeypatch.setattr(pallas_tpu_rows, "CHUNK_BYTES", 2 * 4 * 32 * 256)  # two queries
    on_kernels.clear_cache()
    check(rng, *arrays)
    on_kernels.clear_cache()


# Corner.


def test_rows_without_valid_slots_give_nothing(rng, interpret_tpu):
    q, kv, idx = draw(rng)
    idx[1] = -1
    idx[2], idx[2, ::2] = 10**6, -(10**6)
    out, lse, d_q, _ = check(rng, q, kv, idx)
    for x in (out, d_q):
        assert not np.any(np.asarray(x)[[1, 2]])
    assert np.all(np.isneginf(np.asarray(lse)[[1, 2]]))


def test_a_nan_in_a_row_that_nobody_lists_changes_nothing(rng, interpret_tpu, monkeypatch):
    # Two queries a chunk: the last chunk of three is padded.
    monkeypatch.setattr(pallas_tpu_rows, "CHUNK_BYTES", 2 * 4 * 32 * 256)
    on_kernels.clear_cache()
    q, kv, idx = draw(rng)
    idx[idx == 0] = -1
    clean = check(rng, q, kv, idx)
    spoilt = on_kernels(
        q, kv.at[0].set(jnp.nan), jnp.asarray(idx), clean[0], clean[1] * 0, VALUE_DIM
    )
    on_kernels.clear_cache()
    for x in spoilt:
        assert np.all(np.isfinite(np.asarray(x)))
    np.testing.assert_array_equal(spoilt[0], clean[0])


def test_a_key_listed_many_times_counts_each_time(rng, interpret_tpu):
    q, kv, idx = draw(rng)
    idx[:] = np.arange(idx.shape[1]) % 3
    check(rng, q, kv, idx)


def test_logits_times_a_hundred(rng, interpret_tpu):
    q, kv, idx = draw(rng)
    check(rng, 100 * q, kv, idx, tol=2e-3)  # logits ~1e3 are known to 1e-4


def test_the_op_runs_it_by_name_with_a_batch_and_gradients(rng, interpret_tpu, monkeypatch):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    q, kv, idx = (jnp.stack([x, x[::-1]]) for x in map(jnp.asarray, draw(rng)))

    def loss(q, kv, name):
        options = {"scale": SCALE, "value_dim": VALUE_DIM, "implementation": name}
        out, lse = sparse_mla(q, kv, idx, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    grad = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    got, want = grad(q, kv, "pallas_tpu"), grad(q, kv, "reference")

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < FLOAT32_TOL


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ({"dtype": jnp.float16}, 0.1, "takes bfloat16 or float32"),
        ({"n_keys": 0}, 0.1, "an axis of length 0"),
        ({}, 0.0, "scale=0.0 must be at least 0.0001"),
        ({"n_slots": 2**16}, 0.1, "rows of 65536 slots take .* bytes of VMEM"),
    ],
)
def test_what_it_does_not_take_is_said(rng, shape, scale, message):
    shape = {"n_queries": 2, **shape}
    q, kv, idx = (
        draw(rng, **shape) if shape.get("n_keys", 1) else (*draw(rng)[:2], np.zeros((3, 0)))
    )
    with pytest.raises(NotImplementedError, match=message):
        pallas_tpu.check(q, kv[: shape.get("n_keys", 40)], idx, scale=scale, value_dim=9)


# Broken on purpose: what the interpreter is trusted to find.


def broken(monkeypatch, rng, fetch):
    """Run the forward with another way of fetching; return the output, the definition's and whether a race was seen."""
    monkeypatch.setattr(pallas_tpu_rows, "fetch", fetch)
    q, kv, idx = draw(rng)
    options = {"scale": SCALE, "value_dim": VALUE_DIM}
    params = pltpu.InterpretParams(detect_races=True)
    try:
        with pltpu.force_tpu_interpret_mode(params):
            out, _ = pallas_tpu.forward(q, kv, jnp.asarray(idx), **options)
            out = np.asarray(out)
        raced = interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return out, reference.sparse_mla(q, kv, jnp.asarray(idx), SCALE, VALUE_DIM)[0], raced


def test_a_missing_wait_is_found(rng, monkeypatch):
    def fetch(slots, next_slots, table, rows, arrived):
        @pl.loop(0, rows.shape[1])
        def start(i):
            pltpu.make_async_copy(table.at[slots[0, 0, i]], rows.at[0, i], arrived.at[0]).start()

        return 0

    out, want, raced = broken(monkeypatch, rng, fetch)

    assert raced or not relative_error(out, want) < 0.1  # NaN: the copies never landed


def test_an_index_past_the_table_is_found(rng, monkeypatch):
    real = pallas_tpu_rows.fetch

    def fetch(slots, next_slots, table, rows, arrived):
        copy = pltpu.make_async_copy(table.at[10**6], rows.at[0, 0], arrived.at[0])
        copy.start()
        copy.wait()
        return real(slots, next_slots, table, rows, arrived)

    with pytest.raises((IndexError, jax.errors.JaxRuntimeError), match=r"(?i)out-of-bounds"):
        broken(monkeypatch, rng, fetch)


# Ahead of time.


def shapes(n_queries, n_keys, heads=128, n_slots=2048):
    wide = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n_queries, heads, 576), (n_keys, 576))]
    idx = jax.ShapeDtypeStruct((n_queries, n_slots), jnp.int32)
    d_out = jax.ShapeDtypeStruct((n_queries, heads, 512), jnp.bfloat16)
    return *wide, idx, d_out, jax.ShapeDtypeStruct((n_queries, heads), jnp.float32)


def released(q, kv, idx, d_out, d_lse):
    options = {"scale": SCALE, "value_dim": 512}
    out, lse = pallas_tpu.forward(q, kv, idx, **options)
    return pallas_tpu_backward.backward(q, kv, idx, out, lse, d_out, d_lse, **options)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "heads", "n_slots"),
    [(512, 4096, 128, 2048), (512, 32768, 8, 2048), (4096, 131072, 128, 2048), (64, 500, 16, 40)],
)
def test_it_compiles_at_the_released_widths(compile_for_tpu, n_queries, n_keys, heads, n_slots):
    compiled = compile_for_tpu(released, *shapes(n_queries, n_keys, heads, n_slots))

    assert compiled.cost_analysis()["flops"] >= 2 * n_queries * heads * n_slots * (576 + 512)
    # Rows' gradients exist for a chunk of queries only.
    assert compiled.memory_analysis().peak_memory_in_bytes < 8 * 2**30


@pytest.mark.tpu_aot
def test_rows_beyond_the_vmem_limit_are_refused_by_the_compiler(compile_for_tpu, monkeypatch):
    monkeypatch.setattr(pallas_tpu_rows, "check", lambda *_: None)
    monkeypatch.setattr(mosaic_tpu, "VMEM_LIMIT", 2**23)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        compile_for_tpu(functools.partial(released), *shapes(16, 4096))
