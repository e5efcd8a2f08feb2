import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import query_blocks


def causal_sum(rows, keys):
    """Sum, for row t, the keys up to t weighed by the row: a causal function of each row alone."""
    place, x = rows
    mask = jnp.arange(keys.shape[0]) <= place[:, None]
    return jnp.sum(jnp.where(mask, jnp.sin(x[:, None] * keys), 0.0), axis=1)


def expected_causal_sum(x, keys):
    return np.array([np.sum(np.sin(x[t] * keys[: t + 1])) for t in range(len(x))])


# Below one block, one block, a ragged second, every span filled, spans of two blocks with a ragged end.
@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 131])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_and_spans_change_nothing(rng, n, causal):
    x, keys = rng.normal(size=n), rng.normal(size=n)
    rows = (jnp.arange(n), jnp.asarray(x))

    out = query_blocks.map_query_blocks(causal_sum, rows, jnp.asarray(keys), block=8, causal=causal)

    # float32 sums of up to 131 terms of size 1
    np.testing.assert_allclose(out, expected_causal_sum(x, keys), atol=3e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_and_spans_change_no_gradient(rng, causal):
    n = 131
    x, keys = (jnp.asarray(rng.normal(size=n), jnp.float32) for _ in range(2))
    places = jnp.arange(n)

    def loss(x, keys):
        out = query_blocks.map_query_blocks(causal_sum, (places, x), keys, block=8, causal=causal)
        return jnp.sum(out**2)

    got = jax.grad(loss, argnums=(0, 1))(x, keys)
    expected = jax.grad(lambda x, keys: jnp.sum(causal_sum((places, x), keys) ** 2), (0, 1))(
        x, keys
    )

    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)  # float32, sums of ~1e3


def test_causal_rows_never_see_keys_past_their_span():
    seen = []

    def record(rows, keys):
        seen.append((rows.shape[0], keys.shape[0]))
        return rows

    query_blocks.map_query_blocks(record, jnp.zeros(16), jnp.zeros(16), block=4, causal=True)

    assert seen == [(4, 4 * (i + 1)) for i in range(4)]


@pytest.mark.parametrize(
    ("row_elements", "rows"), [(1, 128), (2**21, 128), (2**21 + 1, 64), (2**28, 1), (2**40, 1)]
)
def test_rows_per_block_keeps_a_block_within_its_limit(row_elements, rows):
    assert query_blocks.rows_per_block(row_elements) == rows
