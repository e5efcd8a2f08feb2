import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from pallas_kernels.paged_indexer import gluon_gpu

SCORE_TOL = 3e-6  # of the largest score: sums of exact products in float32, in another order

gpu = pytest.mark.gpu


def draw(rng, n_batch, n_tokens, n_pages, page, *, n_heads=64, dim=128, quantised=False):
    n_rows = (n_batch * n_pages + 3) * page
    q = jnp.asarray(rng.normal(size=(n_batch, n_tokens, n_heads, dim)), jnp.bfloat16)
    keys = rng.normal(size=(n_rows, dim))
    keys = jnp.asarray(
        keys * (20 if quantised else 1), jnp.float8_e4m3fn if quantised else jnp.bfloat16
    )
    scale = jnp.asarray(2.0 ** rng.integers(-9, 3, (n_rows, 1)), jnp.float32) if quantised else None
    w = jnp.asarray(rng.normal(size=(n_batch, n_tokens, n_heads)), jnp.float32)
    table = rng.permutation(n_rows // page)[: n_batch * n_pages].reshape(n_batch, n_pages)
    end = rng.integers(0, n_pages * page + 1, size=(n_batch, n_tokens))
    end[0, 0], end[-1, -1] = n_pages * page, 0
    return q, keys, w, table, end, scale


def run(q, keys, w, table, end, scale, page):
    score = jax.jit(gluon_gpu.paged_scores, static_argnames="page_size")
    table, end = jnp.asarray(table, jnp.int32), jnp.asarray(end, jnp.int32)
    return np.asarray(score(q, keys, w, table, page_size=page, end=end, k_scale_NG=scale))


def expect(q, keys, w, table, scale, page):
    """Score in float64."""
    q, keys, w = (np.asarray(x, np.float32).astype(np.float64) for x in (q, keys, w))
    keys = keys if scale is None else keys * np.asarray(scale, np.float64)
    out = []
    for b in range(len(q)):
        rows = (table[b][:, None] * page + np.arange(page)).reshape(-1)
        out.append(np.einsum("tjs,tj->ts", np.maximum(q[b] @ keys[rows].T, 0), w[b]))
    return np.stack(out)


def assert_near(found, expected, end):
    seen = np.arange(expected.shape[-1]) < end[..., None]
    np.testing.assert_allclose(
        np.where(seen, found, 0),
        np.where(seen, expected, 0),
        atol=SCORE_TOL * np.abs(expected).max(),
    )


@gpu
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("n_batch", "n_tokens", "n_pages", "page", "n_heads"),
    [
        (3, 1, 40, 64, 64), (1, 1, 1, 64, 64), (128, 1, 9, 64, 64), (2, 2, 5, 256, 64),
        (2, 3, 33, 48, 64), (3, 8, 20, 64, 64), (2, 1, 700, 1, 32), (2, 5, 9, 100, 5), (2, 2, 9, 64, 128),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_pages(rng, n_batch, n_tokens, n_pages, page, n_heads, quantised):
    q, keys, w, table, end, scale = draw(
        rng, n_batch, n_tokens, n_pages, page, n_heads=n_heads, quantised=quantised
    )
    found = run(q, keys, w, table, end, scale, page)
    assert_near(found, expect(q, keys, w, table, scale, page), end)


@gpu
def test_narrow_keys(rng):
    q, keys, w, table, end, _ = draw(rng, 2, 1, 10, 64, dim=64)
    found = run(q, keys, w, table, end, None, 64)
    assert_near(found, expect(q, keys, w, table, None, 64), end)


@gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_what_lies_past_the_end_is_not_read_and_a_visible_nan_shows(rng, quantised):
    q, keys, w, table, end, scale = draw(rng, 2, 1, 10, 64, quantised=quantised)
    end[:] = [[130], [64]]
    expected = expect(q, keys, w, table, scale, 64)
    rows = (table[..., None] * 64 + np.arange(64)).reshape(2, -1)
    past = np.concatenate([rows[b, end[b, 0] :] for b in range(2)])
    broken = keys.at[past].set(jnp.nan)
    assert_near(run(q, broken, w, table, end, scale, 64), expected, end)
    found = run(q, keys.at[table[0, 0] * 64 + 3].set(jnp.nan), w, table, end, scale, 64)
    assert np.isnan(found[0, 0, 3])
    assert np.isfinite(found[0, 0, 4:130]).all()


@gpu
def test_queries_of_any_size_keep_their_digits(rng):
    q, keys, w, table, end, scale = draw(rng, 2, 1, 10, 64, quantised=True)
    size = 2.0 ** rng.integers(-60, 60, (2, 1, 64, 1))
    q = (q.astype(jnp.float32) * size).astype(jnp.bfloat16)
    w = w / jnp.asarray(size[..., 0], jnp.float32)
    q, w = q.at[0, 0, 3].set(0), w.at[0, 0, 3].set(1)
    assert_near(run(q, keys, w, table, end, scale, 64), expect(q, keys, w, table, scale, 64), end)


@gpu
def test_keys_beyond_two_gib_are_reached(rng):
    q, keys, w, table, end, _ = draw(rng, 2, 1, 10, 64)
    n_rows = 2**24 + len(keys)
    big = jnp.zeros((n_rows, 128), jnp.bfloat16).at[2**24 :].set(keys)
    found = run(q, big, w, table + 2**24 // 64, end, None, 64)
    assert_near(found, expect(q, keys, w, table, None, 64), end)


@gpu
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_the_selected_positions_are_the_best(rng, n_tokens):
    # Whole numbers: scores are exact, and tie.
    q, keys, w, table, end, _ = draw(rng, 3, n_tokens, 40, 64)
    q, keys = (jnp.asarray(rng.integers(-2, 3, x.shape), jnp.bfloat16) for x in (q, keys))
    w = jnp.asarray(rng.integers(-2, 3, w.shape), jnp.float32)
    select = jax.jit(gluon_gpu.paged_indexer_topk, static_argnames=("k", "page_size"))
    found = select(
        q,
        keys,
        w,
        jnp.asarray(table, jnp.int32),
        k=200,
        page_size=64,
        end=jnp.asarray(end, jnp.int32),
    )
    scores = expect(q, keys, w, table, None, 64)
    for at in np.ndindex(end.shape):
        best = np.argsort(-scores[at][: end[at]], kind="stable")[:200]
        expected = np.full(200, -1)
        expected[: len(best)] = np.sort(best)
        np.testing.assert_array_equal(found[at], expected)


@pytest.mark.parametrize("n_groups", [1, 3, 128, 1000])
@pytest.mark.parametrize("n_keys", [1, 64, 1000, 131072])
def test_chunks_are_whole_tiles(n_groups, n_keys):
    chunk = gluon_gpu.choose_chunk(n_groups, n_keys)
    assert chunk % gluon_gpu.TILE == 0
    assert gluon_gpu.MIN_CHUNK <= chunk <= gluon_gpu.MAX_CHUNK


@pytest.mark.parametrize("quantised", [False, True])
def test_a_tile_is_one_product_and_programs_share_a_multiprocessor(quantised, compile_for_hopper):
    stages = gluon_gpu.choose_stages(64 * 128 * 2, 1 if quantised else 2)
    types = "fp16 fp32 fp8e4nv fp32" if quantised else "bf16 fp32 bf16 fp32"
    kernel = compile_for_hopper(
        gluon_gpu.paged_scores_kernel, types + " i32 i32 fp32", "i32 i32 i32 i32 i32",
        {"J": 64, "X": 128, "PAGE": 64, "TOKENS": 1, "STAGES": stages, "QUANTISED": quantised},
    )  # fmt: skip
    assert kernel.ptx.count("wgmma.mma_async") == 128 // 16
    assert kernel.ptx.count("wgmma.wait_group") == 1
    assert 2 * kernel.shared_bytes <= 227 * 1024


def array(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("q", "keys", "scale", "words"),
    [
        (array(1, 1, 64, 128, dtype=jnp.float32), array(9, 128), None, "bfloat16 queries"),
        (array(1, 1, 256, 128), array(9, 128), None, "at most 128 heads"),
        (array(1, 1, 64, 32), array(9, 32), None, "bfloat16 of 32 with 0"),
        (array(1, 1, 64, 128), array(9, 128, dtype=jnp.float8_e4m3fn), array(9, 2), "with 2"),
        (array(1, 1, 64, 128), array(9, 128), None, "Hopper"),
    ],
)
def test_an_input_it_cannot_take_is_refused_with_the_reason(q, keys, scale, words):
    with pytest.raises(NotImplementedError, match=words):
        gluon_gpu.check(q, keys, k_scale_NG=scale)
