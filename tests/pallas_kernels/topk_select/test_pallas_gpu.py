import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.topk_select import fused_gpu, pallas_gpu, reference, row, row_select

sys.path.insert(0, str(Path(__file__).parent))  # the tests are not a package
import lockstep
import selection_cases

SCALE, ROWS = 64, 3  # of the cases on the CPU
NAMES = list(selection_cases.cases(np.random.default_rng(0), 64))
CPU_CONFIGS = {
    "one block": {"cluster": 1, "capacity": 100, "sample": 32},
    "four blocks": {"cluster": 4, "capacity": 52, "sample": 16},
}


def emulate(scores, k, start, end, config, seed=0, shift=0):
    """Run the kernel's code on the lockstep machine; `shift` moves the scores off 16-byte boundaries."""
    rng = np.random.default_rng(seed)
    n_rows = len(scores)
    pad = 8 + shift
    around = np.full(pad, 3e38, np.float32)  # neighbours that would win if they were read
    flat = np.concatenate([around, scores.reshape(-1), around]).view(np.uint32)
    out = np.full(n_rows * k, 12345, np.uint32)
    arrays = {"scores": (flat, pad), "out": (out, 0)}
    arrays |= {name: (x.view(np.uint32), 0) for name, x in (("start", start), ("end", end))}
    for group in range(n_rows):
        words = row.regions(config).size
        m = lockstep.Lockstep(arrays, words, config.n_threads, config.cluster, group, rng)
        row_select.select_row(m, config, k, scores.shape)
    return out.view(np.int32).reshape(n_rows, k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", CPU_CONFIGS)
def test_the_kernels_code_selects_what_a_sort_does(rng, name, which):
    scores, k, *bounds = selection_cases.cases(rng, SCALE)[name]
    scores, start, end = (x[:ROWS] for x in (scores, *bounds))
    config = row.Config(n_threads=128, unroll=2, **CPU_CONFIGS[which])

    out = emulate(scores, k, start, end, config, shift=1)

    np.testing.assert_array_equal(out, selection_cases.expected(scores, k, start, end))


@pytest.mark.parametrize("shape", [(2, 8192), (1, 131072), (70, 20000)])
def test_the_chosen_configuration_selects_what_a_sort_does(rng, shape):
    scores = rng.normal(size=shape).astype(np.float32)[:2]
    start, end = np.zeros(len(scores), np.int32), np.full(len(scores), shape[1], np.int32)

    out = emulate(scores, 2048, start, end, pallas_gpu.choose_config(*shape, 2048))

    np.testing.assert_array_equal(out, selection_cases.expected(scores, 2048, start, end))


@pytest.mark.parametrize("n_rows", [1, 17, 128, 5000])
@pytest.mark.parametrize("n_keys", [1, 705, 8192, 8193, 40000, 2**18 + 1, 2**20, 2**24])
def test_every_shape_gets_a_configuration_that_fits(n_rows, n_keys):
    config = pallas_gpu.choose_config(n_rows, n_keys, 2048)

    assert 4 * row.regions(config).size <= 227 * 1024
    assert config.capacity >= config.sample
    if not config.sample:  # rows at any phase of the 16-byte grid must fit
        assert 4 * config.cluster * config.capacity >= n_keys + 3


def test_arrival_order_changes_nothing(rng):
    scores = rng.integers(0, 40, size=(1, 5000)).astype(np.float32)
    bounds = np.zeros(1, np.int32), np.full(1, 5000, np.int32)
    config = row.Config(n_threads=256, capacity=260, sample=64)

    outs = [emulate(scores, 200, *bounds, config, seed=seed) for seed in range(3)]

    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


@pytest.mark.parametrize("shape", [(1024, 705), (1024, 32768), (128, 262209), (8, 2**20)])
@pytest.mark.parametrize("select", [pallas_gpu.topk_select, pallas_gpu.topk_mask])
def test_shapes_lower_for_the_gpu(shape, select):
    ints = jax.ShapeDtypeStruct(shape[:1], jnp.int32)

    traced = jax.jit(lambda scores, start, end: select(scores, k=2048, start=start, end=end)).trace(
        jax.ShapeDtypeStruct(shape, jnp.float32), ints, ints
    )

    assert "topk_select" in traced.lower(lowering_platforms=("cuda",)).as_text()
    listed = select is pallas_gpu.topk_select
    assert traced.out_info.shape == ((shape[0], 2048) if listed else shape)


def test_the_fused_selection_lowers_for_the_gpu():
    def scores(q, k, w, start, end):
        return jnp.einsum("tj,tjs->ts", w, jnp.einsum("tjx,sx->tjs", q, k))

    def fused(q, k, w, start, end):
        return fused_gpu.indexer_topk(q, k, w, k=64, start=start, end=end, scores=scores)

    n = 5000
    shapes = [(n, 2, 8), (n, 8), (n, 2)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ints = jax.ShapeDtypeStruct((n,), jnp.int32)
    traced = jax.jit(fused).trace(*args, ints, ints)

    traced.lower(lowering_platforms=("cuda",))

    assert traced.out_info.shape == (n, 64)


def test_a_row_too_wide_is_refused():
    bounds = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="takes k <= 2048"):
        pallas_gpu.topk_select(jnp.zeros((1, 10)), k=2049, start=bounds, end=bounds)


# On the GPU. Compiling is most of the time, so cases share shapes and few run in every configuration.

select = jax.jit(pallas_gpu.topk_select, static_argnames=("k", "config"))
mark = jax.jit(pallas_gpu.topk_mask, static_argnames=("k",))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_selects_what_a_sort_does(rng, name):
    scores, k, start, end = selection_cases.cases(rng, 1)[name]

    out = select(scores, k=k, start=start, end=end)

    np.testing.assert_array_equal(out, selection_cases.expected(scores, k, start, end))


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_cluster_size_selects_what_a_sort_does(rng, cluster):
    config = row.Config(cluster=cluster, sample=256)
    for name in ("normal", "winners over zeros in a long row", "unaligned ranges, some empty"):
        scores, k, start, end = selection_cases.cases(rng, 1)[name]

        out = select(scores, k=k, start=start, end=end, config=config)

        np.testing.assert_array_equal(out, selection_cases.expected(scores, k, start, end))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 8192), (1024, 32768), (600, 100003)])
def test_many_rows_select_what_lax_top_k_does(shape):
    scores = jax.random.normal(jax.random.key(0), shape)
    bounds = {
        "start": jnp.zeros(shape[0], jnp.int32),
        "end": jnp.full(shape[0], shape[1], jnp.int32),
    }

    out = select(scores, k=2048, **bounds)

    np.testing.assert_array_equal(out, jnp.sort(jax.lax.top_k(scores, 2048)[1], axis=1))


@pytest.mark.gpu
def test_the_mask_marks_what_the_reference_does(rng):
    for name in ("ranges past the keys", "NaN in most places (vllm#49896)"):
        scores, k, start, end = selection_cases.cases(rng, 1)[name]

        out = mark(scores, k=k, start=start, end=end)

        np.testing.assert_array_equal(out, reference.topk_mask(jnp.asarray(scores), k, start, end))


@pytest.mark.gpu
def test_blocks_of_queries_select_what_one_call_does(rng):
    n, k = 4300, 256
    q, keys, w = (rng.integers(-2, 3, s).astype(np.float32) for s in ((n, 2, 8), (n, 8), (n, 2)))
    end = np.arange(1, n + 1, dtype=np.int32)

    def scores(q, k, w, start, end):
        return jnp.einsum("tj,tjs->ts", w, jax.nn.relu(jnp.einsum("tjx,sx->tjs", q, k)))

    fused = jax.jit(
        lambda *a: fused_gpu.indexer_topk(*a, k=k, start=0 * end, end=end, scores=scores)
    )

    expected = selection_cases.expected(np.asarray(scores(q, keys, w, 0, 0)), k, 0 * end, end)
    np.testing.assert_array_equal(fused(q, keys, w), expected)


@pytest.mark.gpu
def test_twenty_launches_agree(rng):
    scores = jnp.asarray(rng.integers(0, 300, size=(64, 50000)), jnp.float32)
    bounds = {"start": jnp.zeros(64, jnp.int32), "end": jnp.full(64, 50000, jnp.int32)}

    outs = [select(scores, k=2048, **bounds) for _ in range(20)]

    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
