import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, paged_indexer_topk

PAGE = 8
STATIC = ("k", "page_size", "implementation")
select = jax.jit(paged_indexer_topk, static_argnames=STATIC)


def draw(rng, n_batch, n_tokens, n_pages):
    """Draw whole numbers: scores are exact and tie."""
    n_rows = n_batch * n_pages * PAGE
    shapes = (n_batch, n_tokens, 3, 6), (n_rows, 6), (n_batch, n_tokens, 3)
    arrays = [jnp.asarray(rng.integers(-3, 4, size=s), jnp.float32) for s in shapes]
    table = jnp.asarray(rng.permutation(n_batch * n_pages).reshape(n_batch, n_pages), jnp.int32)
    end = rng.integers(0, n_pages * PAGE + 1, size=(n_batch, n_tokens)).astype(np.int32)
    end[0, 0] = 0
    return arrays, table, jnp.asarray(end)


@pytest.mark.parametrize(("n_batch", "n_tokens", "k"), [(3, 1, 5), (2, 3, 40)])
def test_it_selects_what_the_definition_does(rng, interpret_tpu, monkeypatch, n_batch, n_tokens, k):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    arrays, table, end = draw(rng, n_batch, n_tokens, 5)

    got, want = (
        select(*arrays, table, k=k, page_size=PAGE, end=end, implementation=name)
        for name in ("pallas_tpu", "reference")
    )

    np.testing.assert_array_equal(got, want)


def test_more_keys_than_fit_vmem_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    zeros = jnp.zeros((1, 1, 2, 4)), jnp.zeros((8, 4)), jnp.zeros((1, 1, 2))
    table, end = jnp.zeros((1, 2**16), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="takes up to 262144 keys, got 524288"):
        paged_indexer_topk(*zeros, table, k=1, page_size=PAGE, end=end, implementation="pallas_tpu")


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_batch", "n_keys"), [(8, 131072), (32, 32768)])
def test_it_compiles_at_the_released_widths(compile_for_tpu, monkeypatch, n_batch, n_keys):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    q = jax.ShapeDtypeStruct((n_batch, 1, 64, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((n_batch * n_keys, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n_batch, 1, 64), jnp.float32)
    table = jax.ShapeDtypeStruct((n_batch, n_keys // 64), jnp.int32)
    end = jax.ShapeDtypeStruct((n_batch, 1), jnp.int32)

    def run(q, k, w, table, end):
        options = {"k": 2048, "page_size": 64, "implementation": "pallas_tpu"}
        return paged_indexer_topk(q, k, w, table, end=end, **options)

    compiled = compile_for_tpu(run, q, k, w, table, end)
    assert compiled.memory_analysis().output_size_in_bytes >= 4 * n_batch * 2048
