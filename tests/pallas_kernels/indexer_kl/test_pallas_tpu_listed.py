import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, sparse_indexer_kl
from pallas_kernels.indexer_kl import pallas_tpu_listed
from pallas_kernels.sparse_mla import pallas_tpu_ordered, pallas_tpu_rows
from pallas_kernels.sparse_mla import reference as sparse_reference

KL_TOL = 1e-5
FLOAT32_TOL = 2e-5  # relative Frobenius error: a few float32 roundings
BF16_TOL = 6e-3  # cotangents are rounded to bfloat16 before they are multiplied
SCALE = 0.3
NAMES = ("dq", "dk", "dw")


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


# Small: the interpreter takes milliseconds for each of the 32 copies that a query makes at least.
def draw(
    rng, n_queries=3, n_keys=40, n_slots=20, heads=3, dim=150, index=(5, 12), dtype=jnp.float32
):
    """Draw the indexer's (q, k, w), the attention's (q, kv) and listed keys, some of them invalid."""
    index_heads, index_dim = index
    shapes = (n_queries, index_heads, index_dim), (n_keys, index_dim)
    shapes += (n_queries, heads, dim), (n_keys, dim)
    q, k, attn_q, kv = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    w = jnp.asarray(rng.normal(size=(n_queries, index_heads)), jnp.float32)
    idx = rng.integers(-1, n_keys + 1, size=(n_queries, n_slots)).astype(np.int32)
    return (q, k, w), (0.3 * attn_q, kv), idx


def log_sum_exp(attention, idx):
    q, kv = (x.astype(jnp.float32) for x in attention)
    return sparse_reference.sparse_mla(q, kv, jnp.asarray(idx), SCALE, kv.shape[1])[1]


@functools.partial(jax.jit, static_argnames=("name",))
def value_and_gradients(index, attention, lse, idx, weight, name):
    def loss(q, k, w):
        options = {"scale": SCALE, "implementation": name}
        kl = sparse_indexer_kl(q, k, w, *attention, lse, idx, **options)
        return jnp.sum(weight * kl), kl

    (_, kl), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*index)
    return kl, gradients


def relative_error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(rng, index, attention, idx, *, lse=None, told=None):
    """Compare with the definition, which is `told` other arrays where some that are not listed are not finite."""
    lse = log_sum_exp(told[1] if told else attention, idx) if lse is None else lse
    weight = jnp.asarray(rng.normal(size=idx.shape[:-1]), jnp.float32)
    rest = (lse, jnp.asarray(idx), weight)

    index, attention = jax.tree.map(jnp.asarray, (index, attention))
    got = value_and_gradients(index, attention, *rest, "pallas_tpu")

    full = jax.tree.map(lambda x: x.astype(jnp.float32), told or (index, attention))
    want = value_and_gradients(*full, *rest, "reference")
    np.testing.assert_allclose(got[0], want[0], atol=KL_TOL, rtol=1e-5)
    tol = FLOAT32_TOL if index[0].dtype == jnp.float32 else BF16_TOL
    for name, a, b, like in zip(NAMES, got[1], want[1], index, strict=True):
        assert a.dtype == like.dtype
        assert relative_error(a, b) < tol, name
    return got


# Regular and irregular.


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_queries": 1, "n_keys": 1, "n_slots": 1, "heads": 1, "dim": 3, "index": (1, 2)},
        {"n_queries": 2, "n_keys": 300, "n_slots": 70, "heads": 33, "dim": 128, "index": (40, 130)},
        {"n_queries": 1, "n_keys": 20, "n_slots": 40, "heads": 2, "dim": 64, "index": (2, 128)},
    ],
)
def test_loss_and_gradients_equal_the_definition(rng, on_tpu, shape):
    check(rng, *draw(rng, **shape))


def test_the_released_widths_in_bfloat16(rng, on_tpu):
    index, attention, idx = draw(rng, 2, 300, 64, 16, 576, (8, 128), jnp.bfloat16)
    check(rng, (0.1 * index[0], *index[1:]), attention, idx)


def test_sequences_of_a_batch_are_apart(rng, on_tpu):
    first, second = draw(rng, 2), draw(rng, 2)
    lse = jnp.stack([log_sum_exp(x[1], x[2]) for x in (first, second)])
    check(rng, *jax.tree.map(lambda *x: np.stack(x), first, second), lse=lse)


def test_gradients_of_chunks_of_queries_add_up(rng, on_tpu, monkeypatch):
    monkeypatch.setattr(pallas_tpu_rows, "CHUNK_BYTES", 2 * 4 * 32 * 128)  # two queries
    value_and_gradients.clear_cache()
    check(rng, *draw(rng))
    value_and_gradients.clear_cache()


# Corner.


def test_slots_and_rows_without_a_key_count_for_nothing(rng, on_tpu):
    index, attention, idx = draw(rng)
    idx[1], idx[2, ::2] = -1, 10**6
    kl, (d_q, _, d_w) = check(rng, index, attention, idx)
    assert kl[1] == 0
    assert not np.any(d_q[1])
    assert not np.any(d_w[1])


def test_keys_that_are_not_listed_are_not_read(rng, on_tpu):
    told = draw(rng)
    (q, k, w), (attn_q, kv), idx = told
    idx[idx == 0] = -1
    index, attention = (q, k.at[0].set(jnp.nan), w), (attn_q, kv.at[0].set(jnp.nan))
    check(rng, index, attention, idx, told=told[:2])


def test_each_head_counts_by_its_share_of_the_given_denominator(rng, on_tpu):
    index, attention, idx = draw(rng)
    lse = log_sum_exp(attention, idx)
    lse = lse.at[:, 1].add(np.log(400.0)).at[:, 2].add(-np.log(50.0))
    check(rng, index, attention, idx, lse=lse)


def test_a_key_listed_many_times_counts_each_time(rng, on_tpu):
    index, attention, idx = draw(rng)
    idx[:] = np.arange(idx.shape[1]) % 3
    check(rng, index, attention, idx)


def test_the_attention_gets_no_gradient(rng, on_tpu):
    index, attention, idx = draw(rng, 1)

    def loss(attention):
        options = {"scale": SCALE, "implementation": "pallas_tpu"}
        lse = jnp.zeros((1, 3))
        return jnp.sum(sparse_indexer_kl(*index, *attention, lse, jnp.asarray(idx), **options))

    for gradient in jax.grad(loss)(attention):
        assert not np.any(gradient)


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ({"dtype": jnp.float16}, 0.1, "takes bfloat16 or float32"),
        ({"n_slots": 0}, 0.1, "an axis of length 0"),
        ({}, 0.0, "scale=0.0 must be at least 0.0001"),
        ({"n_slots": 2**16}, 0.1, "rows of 65536 slots take .* bytes of VMEM"),
    ],
)
def test_what_it_does_not_take_is_said(rng, shape, scale, message):
    (q, k, _), attention, idx = draw(rng, 2, **shape)
    with pytest.raises(NotImplementedError, match=message):
        pallas_tpu_listed.check(q, k, *attention, idx, scale=scale)


def test_a_gradient_that_must_repeat_is_added_in_order_and_equals_the_definition(
    rng, on_tpu, monkeypatch
):
    added = []
    real = pallas_tpu_ordered.add_rows
    monkeypatch.setattr(
        pallas_tpu_ordered, "add_rows", lambda *a: added.append(a[1].shape) or real(*a)
    )
    index, attention, idx = draw(rng)
    rest = (log_sum_exp(attention, idx), jnp.asarray(idx))

    def loss(k, name):
        options = {"scale": SCALE, "deterministic": True, "implementation": name}
        return jnp.sum(sparse_indexer_kl(index[0], k, index[2], *attention, *rest, **options))

    got, want = (jax.grad(loss)(index[1], name) for name in ("pallas_tpu", "reference"))

    assert added == [(3 * 32,)]
    assert relative_error(got, want) < FLOAT32_TOL


@pytest.mark.tpu_aot
@pytest.mark.parametrize("n_keys", [4096, 32768, 131072])
def test_it_compiles_at_the_released_widths(compile_for_tpu, monkeypatch, n_keys):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    n_queries, n_slots = 4096, 2048
    wide = (n_queries, 64, 128), (n_keys, 128), (n_queries, 128, 576), (n_keys, 576)
    q, k, attn_q, kv = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in wide)
    w, lse, weight = (
        jax.ShapeDtypeStruct((n_queries, *s), jnp.float32) for s in ((64,), (128,), ())
    )
    idx = jax.ShapeDtypeStruct((n_queries, n_slots), jnp.int32)

    def both(*arguments):
        return value_and_gradients(*arguments, "pallas_tpu")

    compiled = compile_for_tpu(both, (q, k, w), (attn_q, kv), lse, idx, weight)

    # A chunk's kernel is counted once, though a loop runs it many times.
    pairs = n_queries * n_slots
    assert compiled.cost_analysis()["flops"] >= 2 * pairs * (128 * 576 + 64 * 128)
    # Rows' gradients exist for a chunk of queries only; the input, its tables and the residual are the rest.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 2**30
