import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, mosaic_tpu, paged_mla
from pallas_kernels.paged_mla import layout, pallas_tpu, reference

FLOAT32_TOL = 1e-5
BF16_TOL = 6e-3  # relative Frobenius error: weights and output are rounded to bfloat16
SCALE = 0.2
attend = jax.jit(paged_mla, static_argnames=("scale", "implementation"))


@pytest.fixture
def on_tpu(monkeypatch, interpret_tpu):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)


def records(latent, rope, quantised=False):
    """Write rows in a random order."""
    n = len(latent)
    row = layout.Format(latent.shape[1], rope.shape[1], rope.dtype.name, quantised)
    order = np.random.default_rng(1).permutation(n).astype(np.int32)
    return layout.write(
        layout.empty_records(n, row), jnp.asarray(order), latent[order], rope[order]
    )


# Small: the interpreter takes milliseconds for each copy.
def draw(rng, batch, n_slots, n_rows=70, heads=3, dims=(40, 8), dtype=jnp.float32):
    q = jnp.asarray(rng.normal(size=(*batch, heads, sum(dims))), dtype)
    latent, rope = (jnp.asarray(rng.normal(size=(n_rows, d)), dtype) for d in dims)
    rows = rng.integers(-2, n_rows + 2, size=(*batch, n_slots)).astype(np.int32)
    return q, latent, rope, rows


def check(q, cache, rows, tol):
    run = functools.partial(attend, q, cache, jnp.asarray(rows), scale=SCALE)
    out, lse = run(implementation="pallas_tpu")
    want, want_lse = run(implementation="reference")
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    some = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[some], np.asarray(want_lse)[some], atol=1e-4)
    out, want = (np.asarray(x, np.float64) for x in (out, want))
    assert np.linalg.norm(out - want) <= tol * np.linalg.norm(want)
    return out


@pytest.mark.parametrize(("batch", "n_slots"), [((5,), 1), ((2, 3), 40), ((3, 1), 130)])
def test_output_equals_the_definition(rng, on_tpu, batch, n_slots):
    q, latent, rope, rows = draw(rng, batch, n_slots)
    check(q, records(latent, rope), rows, FLOAT32_TOL)


@pytest.mark.parametrize("dims", [(130, 8), (256, 130)])
def test_parts_of_several_tiles_equal_the_definition(rng, on_tpu, dims):
    q, latent, rope, rows = draw(rng, (2,), 20, dims=dims)
    check(0.3 * q, records(latent, rope), rows, FLOAT32_TOL)


def test_the_released_widths_in_bfloat16(rng, on_tpu):
    q, latent, rope, rows = draw(rng, (3,), 100, 500, 16, (512, 64), jnp.bfloat16)
    check(0.3 * q, records(latent, rope), rows, BF16_TOL)


@pytest.mark.parametrize("dims", [(512, 64), (256, 32), (48, 130)])
def test_a_quantised_cache(rng, on_tpu, dims):
    q, latent, rope, rows = draw(rng, (2,), 50, 90, 4, dims, jnp.bfloat16)
    spread = jnp.asarray(2.0 ** rng.integers(-12, 4, size=latent.shape), latent.dtype)
    check(0.3 * q, records(latent * spread, rope, quantised=True), rows, BF16_TOL)


def test_every_code_of_e4m3_is_read_as_its_value(rng, on_tpu):
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # these two are NaN
    values = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    words = layout._to_words(jnp.stack([values] * 4, axis=1).repeat(128, axis=1))[:, 0]

    for place in range(4):
        got = jax.jit(pallas_tpu._values, static_argnums=(1, 2))(words, place, "float8_e4m3fn")
        np.testing.assert_array_equal(got[:, 0], values.astype(jnp.float32))


def test_slots_past_the_last_valid_one_are_not_copied_and_no_unlisted_row_is_read(rng, on_tpu):
    q, latent, rope, rows = draw(rng, (5,), 100)
    rows[3] = -1
    rows[4, 3:] = -1
    rows[2, 40:] = 10**6
    rows[rows == 7] = 8
    out = check(q, records(latent.at[7].set(jnp.nan), rope), rows, FLOAT32_TOL)
    assert not np.any(out[3])


def test_a_query_that_reads_nan_spoils_no_other(rng, on_tpu):
    # The buffer that the first query's rows lie in is the third one's, which fills less of it.
    q, latent, rope, rows = draw(rng, (8,), 64)
    rows[rows == 7] = 8
    rows[0] = 7
    rows[2, 2:] = -1
    cache = records(latent.at[7].set(jnp.nan), rope)
    out = attend(q, cache, jnp.asarray(rows), scale=SCALE, implementation="pallas_tpu")[0]
    assert np.all(np.isnan(out[0]))
    assert np.all(np.isfinite(out[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float16}, "takes bfloat16 or float32"),
        ({"n_rows": 0}, "an axis of length 0"),
        ({"n_slots": 2**15}, "rows of 32768 slots take .* bytes of VMEM"),
    ],
)
def test_what_it_does_not_take_is_said(rng, change, message):
    q, latent, rope, rows = draw(rng, (2,), 4, dtype=change.get("dtype", jnp.float32))
    cache = records(latent, rope)
    if "n_rows" in change:
        cache = layout.empty_records(0, cache.format)
    rows = np.zeros((2, change.get("n_slots", 4)))
    with pytest.raises(NotImplementedError, match=message):
        pallas_tpu.check(q, cache, rows)


def test_a_cache_in_parts_is_refused(rng, monkeypatch):
    monkeypatch.setattr(dispatch, "require_tpu", lambda: None)
    q, latent, rope, rows = draw(rng, (2,), 4)
    with pytest.raises(NotImplementedError, match="takes a cache in records"):
        paged_mla(
            q,
            layout.Parts(latent, rope),
            jnp.asarray(rows),
            scale=SCALE,
            implementation="pallas_tpu",
        )


# Broken on purpose: what the interpreter is trusted to find.


def broken(monkeypatch, rng, fetch):
    """Run with another way of fetching; return the output, the definition's and whether a race was seen."""
    monkeypatch.setattr(pallas_tpu, "_fetch", fetch)
    q, latent, rope, rows = draw(rng, (3,), 20)
    cache = records(latent, rope)
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            out = np.asarray(pallas_tpu.paged_mla(q, cache, jnp.asarray(rows), SCALE)[0])
        raced = interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return out, np.asarray(reference.paged_mla(q, cache, jnp.asarray(rows), SCALE)[0]), raced


def test_a_missing_wait_is_found(rng, monkeypatch, races_of_strides):
    def fetch(slots, next_slots, words, records, arrived, lines):
        @pl.loop(0, 20)
        def start(i):
            pltpu.make_async_copy(
                words.at[pl.ds(slots[0, 0, i], lines)],
                records.at[pl.ds(i * lines, lines)],
                arrived.at[0],
            ).start()

        return 0

    out, want, raced = broken(monkeypatch, rng, fetch)

    assert raced or not np.linalg.norm(out - want) < 0.1 * np.linalg.norm(want)


def test_a_row_past_the_cache_is_found(rng, monkeypatch, races_of_strides):
    real = pallas_tpu._fetch

    def fetch(slots, next_slots, words, records, arrived, lines):
        past = words.shape[0] - lines + 1 + 0 * pl.program_id(0)  # traced, as a slot would be
        to = records.at[pl.ds(0, lines)]
        copy = pltpu.make_async_copy(words.at[pl.ds(past, lines)], to, arrived.at[0])
        copy.start()
        copy.wait()
        return real(slots, next_slots, words, records, arrived, lines)

    with pytest.raises((IndexError, jax.errors.JaxRuntimeError), match=r"(?i)out-of-bounds"):
        broken(monkeypatch, rng, fetch)


# Ahead of time.


def shapes(n_queries, heads, dtype, quantised, n_slots=2048):
    row = layout.Format(512, 64, dtype, quantised)
    cache = jax.eval_shape(lambda: layout.empty_records(2**20, row))
    q = jax.ShapeDtypeStruct((n_queries, heads, 576), dtype)
    return q, cache, jax.ShapeDtypeStruct((n_queries, n_slots), jnp.int32)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("n_queries", "heads"), [(128, 128), (8, 8)])
@pytest.mark.parametrize("quantised", [False, True])
def test_it_compiles_at_the_released_widths(compile_for_tpu, n_queries, heads, quantised):
    arrays = shapes(n_queries, heads, "bfloat16", quantised)

    compiled = compile_for_tpu(functools.partial(pallas_tpu.paged_mla, scale=SCALE), *arrays)

    assert compiled.cost_analysis()["flops"] >= 2 * n_queries * heads * 2048 * (576 + 512)
    # No copy of the cache nor of its rows: queries and results in whole tiles are all there is besides.
    size = n_queries * mosaic_tpu.round_up(heads, 32) * 640 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * size + 4 * 2**20


@pytest.mark.tpu_aot
@pytest.mark.parametrize("quantised", [False, True])
def test_a_cache_is_written_where_it_lies(compile_for_tpu, quantised):
    _, cache, _ = shapes(1, 1, "bfloat16", quantised)
    values = (jax.ShapeDtypeStruct((128, d), jnp.bfloat16) for d in (512, 64))
    rows = jax.ShapeDtypeStruct((128,), jnp.int32)

    def write(cache, rows, latent, rope):
        # Twice, so that the second finds an array that is the program's own.
        return layout.write(layout.write(cache, rows, latent, rope), rows + 1, latent, rope)

    compiled = compile_for_tpu(write, cache, rows, *values)

    assert compiled.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.tpu_aot
def test_records_beyond_the_vmem_limit_are_refused_by_the_compiler(compile_for_tpu, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "VMEM_LIMIT", 2**22)
    monkeypatch.setattr(pallas_tpu, "check", lambda *_: None)
    arrays = shapes(16, 8, "bfloat16", False)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        compile_for_tpu(functools.partial(pallas_tpu.paged_mla, scale=SCALE), *arrays)
