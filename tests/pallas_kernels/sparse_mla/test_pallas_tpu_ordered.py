import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, sparse_mla
from pallas_kernels.sparse_mla import (
    pallas_tpu,
    pallas_tpu_backward,
    pallas_tpu_ordered,
    pallas_tpu_rows,
)
from pallas_kernels.sparse_mla.pallas_tpu_ordered import KEYS, ROWS

WIDTH = 128
FLOAT32_TOL = 1e-6  # of a sum of a few hundred numbers, over the sum of their sizes
SCALE, VALUE_DIM = 0.2, 136

add_rows = jax.jit(pallas_tpu_ordered.add_rows)


def bits(x):
    return np.asarray(x).tobytes()


@pytest.mark.parametrize(
    "keys",
    [
        lambda rng: rng.integers(0, 4 * KEYS, 3 * ROWS - 5),
        lambda rng: np.full(2 * ROWS, 3 * KEYS + 1),  # one key's rows fill two tiles
        lambda rng: np.array([0, 4 * KEYS - 1]),  # one tile spans blocks that have nothing
        lambda rng: np.concatenate([np.full(ROWS, KEYS - 1), np.full(ROWS, KEYS)]),
        lambda rng: np.concatenate([np.full(ROWS - 1, 0), np.full(2, KEYS)]),  # a tile's last row
        lambda rng: np.array([5]),
    ],
    ids=["many", "one key", "far apart", "blocks meet tiles", "one over", "one row"],
)
def test_every_row_is_added_once_to_its_key(rng, interpret_tpu, keys):
    keys = keys(rng).astype(np.int32)
    rows = rng.normal(size=(len(keys), WIDTH)).astype(np.float32)
    sums = rng.normal(size=(4 * KEYS, WIDTH)).astype(np.float32)
    want, size = sums.astype(np.float64), np.abs(sums).astype(np.float64)
    np.add.at(want, keys, rows)
    np.add.at(size, keys, np.abs(rows))

    got = np.asarray(add_rows(sums, keys, rows))

    assert np.all(np.abs(got - want) <= FLOAT32_TOL * size)
    untouched = np.setdiff1d(np.arange(len(sums)), keys)
    assert np.array_equal(got[untouched], sums[untouched])


def test_the_bits_do_not_depend_on_the_order_of_a_querys_slots(rng, interpret_tpu):
    n_queries, n_slots = 40, 16
    keys = np.stack([rng.permutation(KEYS)[:n_slots] for _ in range(n_queries)]).astype(np.int32)
    rows = rng.normal(size=(n_queries, n_slots, WIDTH)).astype(np.float32)
    order = np.stack([rng.permutation(n_slots) for _ in range(n_queries)])
    moved = (np.take_along_axis(keys, order, 1), np.take_along_axis(rows, order[..., None], 1))
    zero = np.zeros((KEYS, WIDTH), np.float32)

    first, again, other = (
        add_rows(zero, k.reshape(-1), r.reshape(-1, WIDTH))
        for k, r in ((keys, rows), (keys, rows), moved)
    )

    assert bits(first) == bits(again) == bits(other)
    # What it would see if the order changed: of sums in another order of the queries some bits differ.
    backwards = add_rows(zero, keys[::-1].reshape(-1), rows[::-1].reshape(-1, WIDTH))
    assert bits(backwards) != bits(first)
    np.testing.assert_allclose(backwards, first, atol=1e-5)


def draw(rng, n_queries=3, n_keys=40, n_slots=20, heads=3, dim=150):
    q = jnp.asarray(rng.normal(size=(n_queries, heads, dim)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(n_keys, dim)), jnp.float32)
    idx = np.stack([rng.permutation(n_keys)[:n_slots] for _ in range(n_queries)])
    idx[:, ::5] = -1
    return q, kv, idx.astype(np.int32)


def test_the_gradient_of_the_keys_repeats_whatever_the_order_of_the_slots(rng, interpret_tpu):
    q, kv, idx = draw(rng)
    options = {"scale": SCALE, "value_dim": VALUE_DIM}
    out, lse = jax.jit(functools.partial(pallas_tpu.forward, **options))(q, kv, idx)
    d_out, d_lse = jnp.ones_like(out), jnp.ones_like(lse)
    backward = jax.jit(
        functools.partial(pallas_tpu_backward.backward, **options, deterministic=True)
    )

    first, again, other = (
        backward(q, kv, listed, out, lse, d_out, d_lse)
        for listed in (idx, idx, rng.permuted(idx, axis=1))
    )

    assert bits(first[0]) == bits(again[0])
    assert bits(first[1]) == bits(again[1]) == bits(other[1])


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_the_ops_gradients_equal_the_definition(rng, interpret_tpu, monkeypatch, chunk):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    monkeypatch.setattr(pallas_tpu_rows, "CHUNK_BYTES", chunk * 4 * 32 * 256)
    added = []
    real = pallas_tpu_ordered.add_rows
    monkeypatch.setattr(
        pallas_tpu_ordered, "add_rows", lambda *a: added.append(len(a[1])) or real(*a)
    )
    q, kv, idx = draw(rng)

    def loss(q, kv, name):
        options = {"scale": SCALE, "value_dim": VALUE_DIM, "deterministic": True}
        out, lse = sparse_mla(q, kv, jnp.asarray(idx), **options, implementation=name)
        return jnp.sum(out**2) + jnp.sum(lse)

    got, want = (
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(q, kv, name)
        for name in ("pallas_tpu", "reference")
    )

    assert added == [chunk * 32]
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) < 2e-5 * np.linalg.norm(b)


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, dtype) for size, dtype in sizes]


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_queries", "n_keys"), [(512, 4096), (4096, 131072)])
def test_it_compiles_at_the_released_widths_and_scatters_nothing(
    compile_for_tpu, n_queries, n_keys
):
    wide = (n_queries, 128, 576), (n_queries, 128, 512)
    arrays = shapes(
        (wide[0], jnp.bfloat16), ((n_keys, 576), jnp.bfloat16), ((n_queries, 2048), jnp.int32),
        (wide[1], jnp.bfloat16), (wide[0][:2], jnp.float32),
        (wide[1], jnp.bfloat16), (wide[0][:2], jnp.float32),
    )  # fmt: skip
    options = {"scale": SCALE, "value_dim": 512, "deterministic": True}

    compiled = compile_for_tpu(functools.partial(pallas_tpu_backward.backward, **options), *arrays)

    text = compiled.as_text()
    assert "add_rows_in_order" in text
    assert " scatter(" not in text
    assert compiled.memory_analysis().peak_memory_in_bytes < 8 * 2**30
