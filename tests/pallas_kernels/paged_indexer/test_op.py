import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_indexer_topk

J, X, PAGE = 3, 6, 4
select = jax.jit(paged_indexer_topk, static_argnames=("k", "page_size"))


def oracle(q, k_cache, w, table, k, end):
    """Score in float64, position by position; ties go to the earlier one."""
    out = np.full((*end.shape, k), -1)
    for b, t in np.ndindex(end.shape):
        rows = [table[b, s // PAGE] * PAGE + s % PAGE for s in range(end[b, t])]
        scores = np.maximum(q[b, t] @ k_cache[rows].T, 0).T @ w[b, t] if rows else np.zeros(0)
        best = sorted(range(len(rows)), key=lambda s: (-scores[s], s))[:k]
        out[b, t, : len(best)] = sorted(best)
    return out


def draw(rng, n_batch, n_tokens, n_pages):
    n_rows = n_batch * n_pages * PAGE
    q = rng.integers(
        -3, 4, size=(n_batch, n_tokens, J, X)
    )  # whole numbers: scores are exact and tie
    k_cache = rng.integers(-3, 4, size=(n_rows, X))
    w = rng.integers(-2, 3, size=(n_batch, n_tokens, J))
    table = rng.permutation(n_batch * n_pages).reshape(n_batch, n_pages)
    end = rng.integers(0, n_pages * PAGE + 1, size=(n_batch, n_tokens))
    end[0, 0] = 0
    return q, k_cache, w, table, end


def run(q, k_cache, w, table, k, end, **options):
    q, w = jnp.asarray(q, jnp.float32), jnp.asarray(w, jnp.float32)
    if "k_scale_NG" not in options:
        k_cache = jnp.asarray(k_cache, jnp.float32)
    return np.asarray(
        select(
            q, k_cache, w, jnp.asarray(table, jnp.int32), k=k, page_size=PAGE,
            end=jnp.asarray(end, jnp.int32), **options,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("n_batch", "n_tokens", "n_pages"), [(1, 1, 1), (3, 1, 5), (2, 3, 4)])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_the_best_positions_are_selected_wherever_their_pages_lie(
    rng, n_batch, n_tokens, n_pages, k
):
    q, k_cache, w, table, end = draw(rng, n_batch, n_tokens, n_pages)
    found = run(q, k_cache, w, table, k, end)
    np.testing.assert_array_equal(found, oracle(q, k_cache, w, table, k, end))
    assert found.dtype == np.int32


def test_what_lies_past_a_sequences_end_is_not_selected(rng):
    q, k_cache, w, table, end = draw(rng, 2, 1, 4)
    end[:] = [[6], [9]]
    expected = oracle(q, k_cache, w, table, 5, end)
    k_cache = k_cache.astype(float)
    for b in range(2):
        for s in range(end[b, 0], 4 * PAGE):
            k_cache[table[b, s // PAGE] * PAGE + s % PAGE] = np.nan
    np.testing.assert_array_equal(run(q, k_cache, w, table, 5, end), expected)


def test_quantised_keys_are_their_values_times_their_scales(rng):
    q, k_cache, w, table, end = draw(rng, 2, 2, 4)
    scales = 2.0 ** rng.integers(-2, 3, size=(len(k_cache), 1))
    found = run(
        q, jnp.asarray(k_cache, jnp.float8_e4m3fn), w, table, 5, end,
        k_scale_NG=jnp.asarray(scales, jnp.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(found, oracle(q, k_cache * scales, w, table, 5, end))


def test_arguments_that_do_not_fit_are_refused(rng):
    q, k_cache, w, table, end = draw(rng, 1, 1, 2)
    with pytest.raises(ValueError, match="have no scales"):
        run(q, jnp.asarray(k_cache, jnp.float32), w, table, 2, end, k_scale_NG=jnp.ones((8, 1)))
    with pytest.raises(ValueError, match="k=0"):
        run(q, k_cache, w, table, 0, end)
