import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from pallas_kernels.sparse_mla import gluon_gpu, gluon_gpu_items

gpu = pytest.mark.gpu
BF16_TOL = 3e-3  # of a query's output by norm; rounding weights and output to 8 bits gives 2.2e-3
LSE_TOL = 1e-4  # float32 sums of exponentials by the special function unit
DIM, VALUE_DIM = 576, 512
SCALE = DIM**-0.5
WAITS = (
    2 * 4
)  # each group waits for logits, for each of two products, and for the logits past the last tile


def draw(rng, n_queries, n_keys, n_slots, n_heads=128, dim=DIM):
    """Draw bf16 queries and rows, and distinct indices in random order; -1 where there are too few keys."""
    q, kv = (
        np.asarray(jnp.asarray(rng.normal(size=s), jnp.bfloat16), np.float32)
        for s in ((n_queries, n_heads, dim), (n_keys, dim))
    )
    idx = np.full((n_queries, n_slots), -1, np.int32)
    n = min(n_keys, n_slots)
    for t in range(n_queries):
        idx[t, :n] = rng.permutation(n_keys)[:n]
    return q, kv, idx


def run(q, kv, idx, scale=SCALE, value_dim=VALUE_DIM):
    q, kv = jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16)
    return gluon_gpu.forward(q, kv, jnp.asarray(idx), scale=scale, value_dim=value_dim)


def check(q, kv, idx, scale=SCALE, value_dim=VALUE_DIM, lse_tol=LSE_TOL, queries=None):
    """Compare with float32 attention, query by query."""
    out, lse = run(q, kv, idx, scale, value_dim)
    assert out.dtype == jnp.bfloat16
    assert bool(jnp.all(jnp.isfinite(out)))
    queries = np.asarray(range(len(q)) if queries is None else queries)
    outs, lses = np.asarray(out[queries], np.float32), np.asarray(lse[queries])
    for t, got, got_lse in zip(queries, outs, lses, strict=True):
        rows = kv[[i for i in idx[t] if 0 <= i < len(kv)]]
        if not len(rows):
            np.testing.assert_array_equal(got, 0.0)
            assert np.all(np.isneginf(got_lse))
            continue
        logits = scale * (q[t] @ rows.T)
        peak = logits.max(-1, keepdims=True)
        weights = np.exp(logits - peak)
        total = weights.sum(-1, keepdims=True)
        expected = weights / total @ rows[:, :value_dim]
        assert np.linalg.norm(got - expected) <= BF16_TOL * np.linalg.norm(expected)
        np.testing.assert_allclose(got_lse, (peak + np.log(total))[:, 0], atol=lse_tol, rtol=1e-5)


# What the compiler makes of it, which an update can undo without a wrong result. No GPU.


@pytest.fixture(scope="module", params=[128, 512])
def compiled(request, compile_for_hopper):
    pointers, scalars = "bf16 bf16 i32 i32 bf16 fp32 fp32 fp32", "i32 i32 i32 i32 i32 i32 fp32"
    constants = {"HALF": request.param // 2, "ROPE": 64}
    return request.param, compile_for_hopper(
        gluon_gpu.sparse_mla_kernel, pointers, scalars, constants
    )


def test_three_groups_of_warps_fit_the_shared_memory(compiled):
    _, kernel = compiled
    assert kernel.num_warps == 12
    assert kernel.shared_bytes <= 227 * 1024


def test_products_stay_asynchronous(compiled):
    value_dim, kernel = compiled
    ptx = kernel.ptx
    # Each group: logits over all columns in steps of 16, of the first block and of the next; two products of 64 slots.
    assert ptx.count("wgmma.mma_async") == 2 * (2 * (value_dim + 64) // 16 + 2 * 4)
    assert ptx.count("wgmma.wait_group") == WAITS
    assert ptx.count("cp.async.cg.shared.global") == 3 * (value_dim + 64) // 16


def test_machine_code_does_not_spill_and_moves_registers_to_the_consumers(compiled):
    _, kernel = compiled
    sass = kernel.sass
    assert sass.count("HGMMA") == kernel.ptx.count("wgmma.mma_async")
    assert not re.findall(r"\b(LDL|STL)\b", sass)  # local memory
    # One wait for each wait written: more means that ptxas serialises the products.
    assert sass.count("WARPGROUP.DEPBAR") == WAITS
    registers = {int(n, 16) for n in re.findall(r"USETMAXREG\S* (?:UP\d, )?(0x[0-9a-f]+)", sass)}
    assert {216, 72} <= registers


@pytest.mark.parametrize("n_parts", [2, gluon_gpu_items.MAX_PARTS])
def test_the_merging_kernel_does_not_spill(compile_for_hopper, n_parts):
    constants = {"n_parts": n_parts, "DIM": 512}
    pointers = "fp32 fp32 bf16 fp32 bf16 fp32"
    kernel = compile_for_hopper(gluon_gpu.merge_kernel, pointers, "i32 i32", constants)
    assert kernel.spilled_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "scale", "reason"),
    [
        (jnp.float32, 576, 512, 1.0, "takes bfloat16"),
        (jnp.bfloat16, 48, 32, 1.0, "takes value_dim in"),
        (jnp.bfloat16, 640, 512, 1.0, "up to 64 further columns"),
        (jnp.bfloat16, 500, 512, 1.0, "got 512 of 500"),
        (jnp.bfloat16, 140, 128, 1.0, "a multiple of 8"),
        (jnp.bfloat16, 576, 512, -1.0, "positive scale"),
    ],
)
def test_an_input_it_cannot_take_is_refused_with_the_reason(dtype, dim, value_dim, scale, reason):
    q, kv = jnp.zeros((2, 16, dim), dtype), jnp.zeros((4, dim), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        gluon_gpu.check(q, kv, jnp.zeros((2, 3), jnp.int32), scale=scale, value_dim=value_dim)


@pytest.mark.parametrize(("n_queries", "n_keys", "n_slots"), [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_to_do_needs_no_kernel(n_queries, n_keys, n_slots):
    q, kv = jnp.zeros((n_queries, 64, DIM), jnp.bfloat16), jnp.zeros((n_keys, DIM), jnp.bfloat16)
    out, lse = run(q, kv, jnp.zeros((n_queries, n_slots), jnp.int32))
    assert out.shape == (n_queries, 64, VALUE_DIM)
    assert np.all(np.asarray(out) == 0)
    assert np.all(np.isneginf(np.asarray(lse)))


def test_steps_end_with_the_last_valid_slot():
    idx = np.full((6, 300), -1, np.int32)
    idx[1, 0] = idx[2, 127] = idx[3, 128] = idx[4, 299] = 3
    idx[5] = 9  # past the end
    steps = gluon_gpu._steps(jnp.asarray(idx), n_keys=9)
    np.testing.assert_array_equal(steps, [1, 1, 1, 2, 3, 1])


# The choice of what to split, and the kernel's own arithmetic on it, run as Python.


@pytest.mark.parametrize(
    ("n_queries", "n_steps", "expected"),
    [(4096, 16, (4, 16)), (1, 16, (1, 16)), (64, 16, (0, 1)), (66, 16, (0, 1)), (70, 1, (0, 1))],
)
def test_the_last_incomplete_round_is_split_where_that_pays(n_queries, n_steps, expected):
    assert gluon_gpu_items.choose_split(n_queries, 2, n_steps, n_programs=132) == expected


@pytest.mark.parametrize("tiles_per_query", [1, 2, 5])
@pytest.mark.parametrize("n_steps", [1, 2, 7, 16, 40])
def test_a_split_takes_less_than_one_round_of_whole_queries(n_steps, tiles_per_query):
    for n_queries in range(1, 300):
        split = gluon_gpu_items.choose_split(n_queries, tiles_per_query, n_steps, n_programs=132)
        n_whole_tiles = (n_queries - split.n_queries) * tiles_per_query
        assert 0 <= split.n_queries <= n_queries
        assert 1 <= split.n_parts <= min(n_steps, gluon_gpu_items.MAX_PARTS)
        assert (split.n_queries == 0) == (split.n_parts == 1)
        assert (
            split.n_queries == 0
            or n_queries * tiles_per_query - n_whole_tiles < 132 + tiles_per_query
        )


@pytest.fixture
def device_code(monkeypatch):
    """Return the kernel's module, whose functions of integers run as Python; `load(i)` of its gl is to be set."""
    module = gluon_gpu_items
    for name in ("n_items", "tile_and_part", "load_steps", "span"):
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    stand_in = types.SimpleNamespace(maximum=max, cdiv=lambda a, b: -(-a // b))
    monkeypatch.setattr(module, "gl", stand_in)
    monkeypatch.setattr(module, "HEADS", 64)
    return module


@pytest.mark.parametrize("n_heads", [16, 64, 80, 128])
@pytest.mark.parametrize("n_queries", [1, 5, 67, 70, 133, 200])
@pytest.mark.parametrize("n_steps", [1, 5, 16])
def test_items_cover_every_step_of_every_tile_once(rng, device_code, n_queries, n_heads, n_steps):
    tiles_per_query = -(-n_heads // 64)
    n_tiles = n_queries * tiles_per_query
    steps = rng.integers(1, n_steps + 1, n_queries)
    device_code.gl.load = lambda i, mask, other: steps[i] if mask else other
    chosen = gluon_gpu_items.choose_split(n_queries, tiles_per_query, n_steps, n_programs=132)
    for n_split, n_parts in (chosen, (n_queries, 3), (1, 16), (0, 1)):
        work = 0, n_heads, n_tiles, n_tiles - n_split * tiles_per_query, n_parts
        n_items = device_code.n_items(work)
        seen, places = [], []
        for item in range(n_items):
            tile, part = device_code.tile_and_part(item, work)
            first, end = device_code.span(item, device_code.load_steps(item, work), work)
            assert end - first <= -(-n_steps // (1 if item < work[3] else n_parts))
            seen += [(tile, step) for step in range(first, end)]
            places.append((tile, part))
        assert sorted(seen) == [
            (i, s) for i in range(n_tiles) for s in range(steps[i // tiles_per_query])
        ]
        whole = [(i, 0) for i in range(work[3])]
        assert sorted(places) == whole + [
            (i, p) for i in range(work[3], n_tiles) for p in range(n_parts)
        ]
        for past in range(n_items, n_items + 200):
            assert device_code.span(past, device_code.load_steps(past, work), work) == (0, 0)


# Regular.


@gpu
def test_attention_equals_float32_attention(rng):
    check(*draw(rng, 70, 4096, 2048), queries=range(0, 70, 7))


@gpu
def test_attention_is_the_same_inside_jit(rng):
    q, kv, idx = draw(rng, 70, 1000, 256)
    direct = run(q, kv, idx)
    inside = jax.jit(run)(q, kv, idx)
    for a, b in zip(direct, inside, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@gpu
@pytest.mark.parametrize(("value_dim", "dim"), [(128, 160), (256, 288), (512, 512)])
def test_other_widths(rng, value_dim, dim):
    check(*draw(rng, 70, 500, 384, dim=dim), dim**-0.5, value_dim, queries=range(0, 70, 9))


# Irregular: slots that fill no block, numbers of queries that fill no round of programs, heads, few keys.


@gpu
@pytest.mark.parametrize("n_slots", [1, 64, 65, 100, 705])
def test_any_number_of_slots(rng, n_slots):
    check(*draw(rng, 70, 705, n_slots), queries=[0, 1, 35, 68, 69])


@gpu
@pytest.mark.parametrize("n_heads", [64, 128])
@pytest.mark.parametrize("n_queries", [1, 5, 62, 66, 67, 70, 133, 213])
def test_any_number_of_queries(rng, n_queries, n_heads):
    some = {0, n_queries // 2, *range(max(n_queries - 6, 0), n_queries)}  # the last are in parts
    check(*draw(rng, n_queries, 1500, 1100, n_heads), queries=sorted(some))


@gpu
@pytest.mark.parametrize("split", [(0, 1), (1, 2), (6, 3), (29, 16), (70, 5), (70, 9)])
def test_any_split_gives_the_same_up_to_rounding_and_again_the_same_bits(rng, monkeypatch, split):
    q, kv, idx = draw(rng, 70, 3000, 2048, 80)
    idx[3], idx[67], idx[69, 1:], idx[68, 900:] = (
        -1,
        -1,
        -1,
        -1,
    )  # parts without a step, or without a slot
    idx[66, :1500], idx[65, 1024:1152] = -1, 3000
    monkeypatch.setattr(gluon_gpu, "choose_split", lambda *_: gluon_gpu_items.Split(*split))
    check(q, kv, idx, queries=[0, 1, 3, 40, 41, *range(62, 70)])
    first = run(q, kv, idx)
    for _ in range(5):
        for a, b in zip(first, run(q, kv, idx), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@gpu
@pytest.mark.parametrize("n_heads", [16, 32, 64, 80, 192])
def test_any_number_of_heads(rng, n_heads):
    check(*draw(rng, 140, 500, 256, n_heads), queries=[0, 1, 77, 139])


@gpu
@pytest.mark.parametrize("n_keys", [1, 95, 1840])
def test_fewer_keys_than_slots(rng, n_keys):
    check(*draw(rng, 30, n_keys, 2048), queries=[0, 13, 29])


@gpu
def test_seventy_thousand_queries(rng):
    q, kv, idx = draw(rng, 70, 300, 64, 16)
    q, idx = np.tile(q, (1000, 1, 1)), np.tile(idx, (1000, 1))
    check(q, kv, idx, queries=[0, 35_000, 69_999])


@gpu
def test_arrays_beyond_two_to_the_31_elements(rng):
    """The queries pass it at 29,128 rows of 128 heads, the output at 32,768."""
    q, kv, idx = draw(rng, 67, 300, 64)
    copies = 500  # 33,500 queries, made on the device
    many_q = jnp.tile(jnp.asarray(q, jnp.bfloat16), (copies, 1, 1))
    out, lse = run(many_q, kv, jnp.tile(jnp.asarray(idx), (copies, 1)))
    expected_out, expected_lse = run(q, kv, idx)
    queries = np.asarray([0, 29_127, 29_130, 32_770, 33_499])
    np.testing.assert_array_equal(
        np.asarray(out[queries], np.float32), np.asarray(expected_out[queries % 67], np.float32)
    )
    np.testing.assert_array_equal(lse[queries], expected_lse[queries % 67])


@gpu
def test_rows_beyond_two_to_the_31_elements(rng):
    n_keys = 4_000_000
    q, rows, idx = draw(rng, 67, 300, 200)
    kv = jnp.zeros((n_keys, DIM), jnp.bfloat16).at[-300:].set(jnp.asarray(rows, jnp.bfloat16))
    out, lse = run(q, kv, idx + (n_keys - 300))
    expected_out, expected_lse = run(q, rows, idx)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected_out, np.float32))
    np.testing.assert_array_equal(lse, expected_lse)


# Corner: empty slots, blocks and rows in tiles of one program; order; values that must not leak.


@gpu
def test_empty_slots_blocks_and_rows(rng):
    q, kv, idx = draw(rng, 213, 700, 600)
    idx[rng.uniform(size=idx.shape) < 0.3] = -1
    idx[::3] = -1  # empty rows among full ones, in the same program
    idx[1, 1:], idx[4, :500], idx[5, 100:], idx[7, ::2] = -1, -1, -1, 700
    idx[8], idx[10, :64], idx[11, 64:], idx[13, 128:256] = 2**31 - 1, -1, -1, -1
    idx[212] = -1
    check(q, kv, idx, queries=[*range(15), 66, 67, 132, 133, 211, 212])


@gpu
def test_rows_that_end_early(rng):
    """As causal rows do: the first queries have few keys, and programs take tiles of unequal length."""
    q, kv, idx = draw(rng, 213, 700, 600)
    idx[np.arange(600) > 3 * np.arange(213)[:, None]] = -1
    check(q, kv, idx, queries=[0, 1, 42, 43, 66, 67, 130, 199, 212])


@gpu
def test_every_row_empty(rng):
    q, kv, idx = draw(rng, 140, 100, 130)
    check(q, kv, np.full_like(idx, -1))


@gpu
def test_rows_that_are_nan_and_not_listed_spoil_nothing(rng):
    q, kv, idx = draw(rng, 70, 700, 256)
    idx[(idx == 0) | (idx == 699)] = 5
    idx[:, 3], idx[:, 200] = -1, 700
    kv[[0, 699]] = np.nan
    check(q, kv, idx, queries=range(0, 70, 9))


@gpu
def test_a_duplicate_counts_once_a_slot(rng):
    q, kv, idx = draw(rng, 70, 700, 256)
    idx[:, 1::2] = idx[:, ::2]
    idx[3] = idx[3, 0]
    check(q, kv, idx, queries=range(0, 70, 9))


@gpu
@pytest.mark.parametrize("scale", [SCALE / 16, 8 * SCALE, 100 * SCALE])
def test_small_and_large_logits(rng, scale):
    check(*draw(rng, 70, 1000, 512), scale, lse_tol=2e-3, queries=range(0, 70, 9))


@gpu
@pytest.mark.parametrize("scale", [SCALE, 1.0])
@pytest.mark.parametrize("order", [1, -1])
def test_logits_that_rise_or_fall_along_the_slots(rng, order, scale):
    """Every block moves the softmax's reference, or none after the first."""
    q, kv, _ = draw(rng, 70, 1024, 1)
    kv = np.linspace(0, 0.5, 1024)[:, None] * q[0, 0]
    kv = np.asarray(jnp.asarray(kv, jnp.bfloat16), np.float32)
    idx = np.tile(np.arange(1024, dtype=np.int32)[::order], (70, 1))
    check(q, kv, idx, scale, lse_tol=1e-3, queries=range(0, 70, 9))


@gpu
def test_attention_is_repeatable(rng):
    q, kv, idx = draw(rng, 213, 1000, 600)
    first = run(q, kv, idx)
    for _ in range(10):
        for a, b in zip(first, run(q, kv, idx), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
