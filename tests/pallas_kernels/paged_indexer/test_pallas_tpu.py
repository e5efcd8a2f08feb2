import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, paged_indexer_topk

PAGE = 16
STATIC = ("k", "page_size", "implementation")
select = jax.jit(paged_indexer_topk, static_argnames=STATIC)


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def draw(rng, n_batch, n_tokens, n_pages, dim=128):
    """Draw whole numbers: scores are exact and tie."""
    n_rows = n_batch * n_pages * PAGE
    shapes = (n_batch, n_tokens, 3, dim), (n_rows, dim), (n_batch, n_tokens, 3)
    arrays = [jnp.asarray(rng.integers(-3, 4, size=s), jnp.float32) for s in shapes]
    table = jnp.asarray(rng.permutation(n_batch * n_pages).reshape(n_batch, n_pages), jnp.int32)
    end = rng.integers(0, n_pages * PAGE + 1, size=(n_batch, n_tokens)).astype(np.int32)
    end[0, 0] = 0
    end[-1, -1] = n_pages * PAGE
    return arrays, table, jnp.asarray(end)


def check(arrays, table, end, k, name="pallas_tpu", page_size=PAGE, told=None):
    """Compare with the definition, which is `told` other arrays where some that are not read are not finite."""
    options = {"k": k, "page_size": page_size, "end": end}
    got = select(*arrays, table, **options, implementation=name)
    want = select(*(told or arrays), table, **options, implementation="reference")
    np.testing.assert_array_equal(got, want)
    return np.asarray(got)


# Regular, then irregular: the pages of a sequence do not fill its tiles of keys.
@pytest.mark.parametrize(
    ("n_batch", "n_tokens", "n_pages", "k"),
    [(2, 1, 8, 16), (3, 1, 5, 5), (2, 3, 13, 40), (1, 9, 70, 130)],
)
def test_it_selects_what_the_definition_does(rng, on_tpu, n_batch, n_tokens, n_pages, k):
    check(*draw(rng, n_batch, n_tokens, n_pages), k)


def test_a_whole_prompt_and_narrow_keys_are_selected_from_joined_pages(rng, on_tpu):
    arrays, table, end = draw(rng, 2, 3, 5, dim=6)
    check(arrays, table, end, 40, "pallas_tpu_gathered")


def test_sequences_without_a_key_select_nothing(rng, on_tpu):
    arrays, table, end = draw(rng, 2, 2, 5)
    assert np.all(check(arrays, table, 0 * end, 7) == -1)


def test_pages_may_be_shared_and_what_lies_past_the_end_may_be_nan(rng, on_tpu):
    told, table, end = draw(rng, 2, 1, 5)
    table = table.at[1, :2].set(table[0, :2])
    end = jnp.asarray([[40], [37]], jnp.int32)  # in the third page
    spoilt = told[1]
    for b in range(2):
        spoilt = spoilt.at[table[b, 2] * PAGE + 9 : (table[b, 2] + 1) * PAGE].set(jnp.nan)
        for page in (3, 4):
            spoilt = spoilt.at[table[b, page] * PAGE : (table[b, page] + 1) * PAGE].set(jnp.nan)
    check([told[0], spoilt, told[2]], table, end, 20, told=told)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_pages": 2**14 + 1}, "takes up to 262144 keys, got 262160"),
        ({"dim": 64}, "pages are copied of 128 index dims, got 64"),
        ({"page_size": 24}, "page_size=24 must be a multiple of 16 that divides 1024"),
        ({"n_tokens": 33}, "takes up to 32 tokens, got 33"),
        ({"scaled": True}, "takes no quantised keys"),
    ],
)
def test_what_it_does_not_take_is_said(monkeypatch, sizes, message):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    sizes = {"n_pages": 2, "dim": 128, "page_size": PAGE, "n_tokens": 1, "scaled": False} | sizes
    dim, n_tokens = sizes["dim"], sizes["n_tokens"]
    dtype = jnp.float8_e4m3fn if sizes["scaled"] else jnp.float32
    arrays = (
        jnp.zeros((1, n_tokens, 2, dim)),
        jnp.zeros((48, dim), dtype),
        jnp.zeros((1, n_tokens, 2)),
    )
    table, end = jnp.zeros((1, sizes["n_pages"]), jnp.int32), jnp.zeros((1, n_tokens), jnp.int32)
    scale = jnp.ones((48, 1)) if sizes["scaled"] else None
    options = {"k": 1, "page_size": sizes["page_size"], "k_scale_NG": scale}
    with pytest.raises(NotImplementedError, match=message):
        paged_indexer_topk(*arrays, table, **options, end=end, implementation="pallas_tpu")


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("n_batch", "n_tokens", "n_keys"),
    [(128, 1, 4096), (32, 1, 32768), (8, 2, 131072), (1, 32, 131072)],
)
@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_tpu_gathered"])
def test_it_compiles_at_the_released_widths(
    compile_for_tpu, monkeypatch, name, n_batch, n_tokens, n_keys
):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    q = jax.ShapeDtypeStruct((n_batch, n_tokens, 64, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((n_batch * n_keys, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n_batch, n_tokens, 64), jnp.float32)
    table = jax.ShapeDtypeStruct((n_batch, n_keys // 64), jnp.int32)
    end = jax.ShapeDtypeStruct((n_batch, n_tokens), jnp.int32)

    def run(q, k, w, table, end):
        options = {"k": 2048, "page_size": 64, "implementation": name}
        return paged_indexer_topk(q, k, w, table, end=end, **options)

    compiled = compile_for_tpu(run, q, k, w, table, end)
    assert compiled.cost_analysis()["flops"] >= 2 * n_batch * n_tokens * n_keys * 64 * 128
    if (
        name == "pallas_tpu"
    ):  # no copy of the keys: queries, bounds and lists of whole tiles are all there is besides
        lists = 4 * n_batch * (n_tokens + 7) * (2048 + 64 * 128)
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * lists
