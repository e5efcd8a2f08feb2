import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, mosaic_tpu
from pallas_kernels.fp8 import op as fp8
from pallas_kernels.topk_select import pallas_tpu

sys.path.insert(0, str(Path(__file__).parent))  # the tests are not a package
import selection_cases

SCALE = 64  # of the cases; the interpreter takes milliseconds for each tile of each pass
NAMES = list(selection_cases.cases(np.random.default_rng(0), SCALE))


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def draw(rng, n_queries, n_keys, heads=3, dim=4):
    """Draw small integers: every score is exact and many of them tie."""
    shapes = ((n_queries, heads, dim), (n_keys, dim), (n_queries, heads))
    return [jnp.asarray(rng.integers(-2, 3, size=s), jnp.float32) for s in shapes]


@functools.partial(jax.jit, static_argnames=("op", "k", "name"))
def run(op, arrays, start, end, k, name="pallas_tpu"):
    fn = getattr(pallas_kernels, op)
    return fn(*arrays, k=k, start=start, end=end, implementation=name)


@pytest.mark.parametrize("name", NAMES)
def test_it_selects_what_a_sort_does(rng, on_tpu, name):
    scores, k, start, end = selection_cases.cases(rng, SCALE)[name]

    got = run("topk_select", (jnp.asarray(scores),), jnp.asarray(start), jnp.asarray(end), k)

    np.testing.assert_array_equal(got, selection_cases.expected(scores, k, start, end))


def test_lists_of_several_tiles_move_by_every_power_of_two(rng, on_tpu):
    scores = rng.normal(size=(40, 5000)).astype(np.float32)  # two blocks of rows
    start = rng.integers(0, 3000, 40).astype(np.int32)
    end = np.minimum(start + rng.integers(0, 5000, 40), 5000).astype(np.int32)

    got = run("topk_select", (jnp.asarray(scores),), jnp.asarray(start), jnp.asarray(end), 300)

    np.testing.assert_array_equal(got, selection_cases.expected(scores, 300, start, end))


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "k"), [(1, 1, 1), (5, 95, 128), (131, 40, 9), (40, 2500, 200)]
)
def test_the_fused_selection_equals_a_sort_of_the_scores(
    rng, draw_ranges, on_tpu, n_queries, n_keys, k
):
    q, keys, w = arrays = draw(rng, n_queries, n_keys)
    start, end = draw_ranges(rng, (n_queries,), n_keys)
    scores = np.einsum("tj,tjs->ts", w, np.maximum(np.einsum("tjx,sx->tjs", q, keys), 0))
    expected = selection_cases.expected(scores.astype(np.float32), k, start, end)

    bounds = (jnp.asarray(start), jnp.asarray(end))
    listed = run("indexer_topk", tuple(arrays), *bounds, k)
    mask = np.asarray(run("indexer_topk_mask", tuple(arrays), *bounds, k))

    np.testing.assert_array_equal(listed, expected)
    assert mask.shape == (n_queries, n_keys)
    for row, slots in zip(mask, expected, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), slots[slots >= 0])


@pytest.mark.parametrize("op", ["indexer_topk", "indexer_topk_mask"])
def test_values_that_are_whole_in_e4m3_are_selected_by_fp8_products_too(
    rng, draw_ranges, on_tpu, op
):
    q, keys, w = draw(rng, 9, 95)
    q, keys = 2.0 ** rng.integers(-3, 4, (9, 3, 1)) * q, 2.0 ** rng.integers(-3, 4, (95, 1)) * keys
    arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, keys, w))
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (9,), 95)))

    got, want = (run(op, arrays, *bounds, 20, name) for name in ("pallas_tpu_fp8", "reference"))

    np.testing.assert_array_equal(got, want)


def test_fp8_products_multiply_rounded_values(rng, on_tpu):
    arrays = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in draw(rng, 9, 95))
    q, keys = (fp8.simulate(x) for x in arrays[:2])
    bounds = jnp.zeros(9, jnp.int32), jnp.full(9, 95)

    got = run("indexer_topk", arrays, *bounds, 20, "pallas_tpu_fp8")

    want = run("indexer_topk", (q, keys, arrays[2]), *bounds, 20, "pallas_tpu")
    np.testing.assert_array_equal(got, want)


def test_sequences_of_a_batch_are_apart(rng, draw_ranges, on_tpu):
    arrays = tuple(jnp.stack([x, x[::-1]]) for x in draw(rng, 12, 30))
    bounds = tuple(map(jnp.asarray, draw_ranges(rng, (2, 12), 30)))

    got = run("indexer_topk", arrays, *bounds, 5)

    ranges = dict(zip(("start", "end"), bounds, strict=True))
    expected = pallas_kernels.indexer_topk(*arrays, k=5, **ranges, implementation="reference")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("n_keys", "k", "message"),
    [
        (2**18 + 1, 5, "takes up to 262144 keys, got 262145"),
        (9, 2**13 + 1, "takes k up to 8192, got 8193"),
        (0, 1, "an axis of length 0"),
    ],
)
def test_what_it_does_not_take_is_said(n_keys, k, message):
    with pytest.raises(NotImplementedError, match=message):
        pallas_tpu.check(n_keys, k)


@pytest.mark.parametrize("n_keys", [128, 4096, 32768, 131072, 2**18])
@pytest.mark.parametrize("n_rows", [1, 100, 5000])
def test_a_block_of_rows_fits_vmem(n_rows, n_keys):
    for form, multiple, out_bytes in (("mask", 32, n_keys), ("list", 8, 4 * 2048)):
        rows = pallas_tpu.rows_per_block(n_rows, n_keys, form)
        assert rows % multiple == 0
        assert rows < n_rows + multiple
        assert rows * (4 * (n_keys + 128) + 2 * out_bytes) < mosaic_tpu.VMEM_LIMIT


def shapes(n_queries, n_keys):
    q = jax.ShapeDtypeStruct((n_queries, 64, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((n_keys, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n_queries, 64), jnp.float32)
    bound = jax.ShapeDtypeStruct((n_queries,), jnp.int32)
    return (q, k, w), bound, bound


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("n_queries", "n_keys"),
    [(4096, 4096), (32768, 32768), (4096, 131072), (64, 2**18), (1, 131072)],
)
@pytest.mark.parametrize("op", ["indexer_topk", "indexer_topk_mask"])
@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_tpu_fp8"])
def test_the_fused_selection_compiles_at_the_released_widths(
    compile_for_tpu, monkeypatch, name, op, n_queries, n_keys
):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    compiled = compile_for_tpu(
        lambda arrays, *bounds: run(op, arrays, *bounds, 2048, name), *shapes(n_queries, n_keys)
    )
    assert compiled.cost_analysis()["flops"] >= 2 * 64 * 128 * n_queries * n_keys
    # No score leaves VMEM: besides inputs and outputs there is no array of a float for each pair.
    assert compiled.memory_analysis().temp_size_in_bytes < max(4 * n_queries * n_keys, 2**25)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("n_keys", [4096, 32768, 131072])
def test_selection_of_given_scores_compiles(compile_for_tpu, monkeypatch, n_keys):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    _, *bounds = shapes(1024, n_keys)
    scores = jax.ShapeDtypeStruct((1024, n_keys), jnp.float32)
    compiled = compile_for_tpu(lambda x, *b: run("topk_select", (x,), *b, 2048), scores, *bounds)
    assert compiled.memory_analysis().output_size_in_bytes >= 4 * 1024 * 2048
