import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from pallas_kernels.fp8 import op as fp8
from pallas_kernels.paged_mla import gluon_gpu

C, R, SCALE = 512, 64, 576**-0.5
BF16_DIFF = 2e-5  # calc_diff; weights and outputs are rounded to 8 bits
LSE_TOL = 2e-3  # float32 sums in another order, exp2 and log2 approximated to 2 ulp
STEEP_LSE_TOL = 2e-2  # the same at logits of several hundred

gpu = pytest.mark.gpu


def draw(rng, n_queries, n_heads, n_slots, *, n_rows=5000, quantised=False):
    """Return queries, latents, rope keys, latent scales and rows, some of them out of range."""
    q = jnp.asarray(rng.normal(size=(n_queries, n_heads, C + R)), jnp.bfloat16)
    latent = jnp.asarray(rng.normal(size=(n_rows, C)), jnp.bfloat16)
    rope = jnp.asarray(rng.normal(size=(n_rows, R)), jnp.bfloat16)
    rows = rng.integers(-n_rows // 10, n_rows + n_rows // 10, size=(n_queries, n_slots))
    scale = None
    if quantised:
        latent, scale = fp8.quantize(latent.astype(jnp.float32) * rng.choice([1, 9.0], (n_rows, 1)))
    return q, latent, rope, scale, rows


def run(q, latent, rope, latent_scale, rows, scale=SCALE):
    attend = jax.jit(gluon_gpu.paged_mla, static_argnames="scale")
    return attend(q, latent, rope, latent_scale, jnp.asarray(rows, jnp.int32), scale=scale)


def expect(q, latent, rope, latent_scale, rows, scale=SCALE):
    """Attend in float32 on the host, query by query."""
    q, latent, rope = (np.asarray(x, np.float32) for x in (q, latent, rope))
    if latent_scale is not None:
        latent = latent * np.repeat(np.asarray(latent_scale), 128, axis=1)
    keys = np.concatenate([latent, rope], axis=1)
    out = np.zeros((*q.shape[:2], C), np.float32)
    lse = np.full(q.shape[:2], -np.inf, np.float32)
    for t in range(len(q)):
        kept = rows[t][(rows[t] >= 0) & (rows[t] < len(keys))]
        if len(kept):
            logits = scale * q[t] @ keys[kept].T
            lse[t] = np.logaddexp.reduce(logits, axis=1)
            out[t] = np.exp(logits - lse[t][:, None]) @ latent[kept]
    return out, lse


def assert_near(found, expected, calc_diff, lse_tol=LSE_TOL):
    out, lse = (np.asarray(x, np.float32) for x in found)
    assert np.isfinite(out).all()
    assert calc_diff(out, expected[0]) < BF16_DIFF
    np.testing.assert_allclose(lse, expected[1], atol=lse_tol)  # -inf equals -inf


@gpu
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("n_queries", "n_heads", "n_slots"),
    [(70, 128, 2048), (4, 128, 2048), (24, 16, 100), (5, 80, 1000), (9, 64, 1)],
)
def test_the_listed_rows_are_attended_to(rng, calc_diff, n_queries, n_heads, n_slots, quantised):
    inputs = draw(rng, n_queries, n_heads, n_slots, quantised=quantised)
    assert_near(run(*inputs), expect(*inputs), calc_diff)


@gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_rows_without_slots_give_nothing_and_unlisted_rows_are_not_read(rng, calc_diff, quantised):
    q, latent, rope, scale, rows = draw(rng, 70, 128, 300, quantised=quantised)
    rows[0], rows[1, 1:], rows[2, :260], rows[3, 70:], rows[4, ::2] = -1, -1, -1, -1, 5000
    rows[5], rows[rows == 0] = 2**31 - 1, 1
    rope = rope.at[0].set(jnp.nan)
    latent = latent if quantised else latent.at[0].set(jnp.nan)
    out, lse = run(q, latent, rope, scale, rows)
    assert (np.asarray(out[jnp.array([0, 5])]) == 0).all()
    assert (np.asarray(lse[jnp.array([0, 5])]) == -np.inf).all()
    assert_near((out, lse), expect(q, latent, rope, scale, rows), calc_diff)


@gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_steep_and_rising_logits_stay_near(rng, calc_diff, quantised):
    q, latent, rope, scale, rows = draw(rng, 4, 128, 2048, quantised=quantised)
    assert_near(
        run(q, latent, rope, scale, rows, 4.0), expect(q, latent, rope, scale, rows, 4.0),
        calc_diff, STEEP_LSE_TOL,
    )  # fmt: skip
    if not quantised:
        # The maximum moves in every tile, so every rescaling counts.
        latent = latent.at[:].set(jnp.arange(5000)[:, None] / 2500 * q[0, 0, :C] / 8)
        inputs = (q, latent, rope, scale, np.sort(rows, axis=1))
        assert_near(run(*inputs), expect(*inputs), calc_diff)


@gpu
def test_twenty_runs_are_equal(rng):
    inputs = draw(rng, 70, 128, 2048, quantised=True)
    first = run(*inputs)
    for _ in range(20):
        again = run(*inputs)
        assert all(bool((a == b).all()) for a, b in zip(first, again, strict=True))


@gpu
def test_a_listed_nan_shows(rng):
    q, latent, rope, _, rows = draw(rng, 2, 64, 128)
    rows[1, 5] = 7
    out, lse = run(q, latent.at[7].set(jnp.nan), rope, None, np.where(rows == 7, 8, rows))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    out, lse = run(q, latent.at[7].set(jnp.nan), rope, None, rows)
    assert np.isnan(np.asarray(out[1], np.float32)).all()
    assert np.isnan(np.asarray(lse[1])).all()


@gpu
def test_every_e4m3_code_is_its_value(calc_diff):
    """One slot a query: the output is the row itself, exactly."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without NaN
    latent = np.resize(codes, (64, C)).view(jnp.float8_e4m3fn)
    scale = 2.0 ** np.arange(-100, 92, 3).reshape(64, 1) * np.ones((64, 4))
    inputs = (
        jnp.zeros((64, 16, C + R), jnp.bfloat16), jnp.asarray(latent), jnp.zeros((64, R), jnp.bfloat16),
        jnp.asarray(scale, jnp.float32), np.arange(64)[:, None],
    )  # fmt: skip
    exact = latent.astype(np.float32) * np.repeat(scale, 128, axis=1)
    np.testing.assert_array_equal(np.asarray(run(*inputs)[0], np.float32)[:, 0], exact)


@gpu
def test_rows_beyond_two_gib_are_reached(rng, calc_diff):
    n_rows = 2**22 + 1000  # 4.3 GB of latents
    q, latent, rope, _, rows = draw(rng, 2, 64, 256, n_rows=1000)
    big, big_rope = jnp.zeros((n_rows, C), jnp.bfloat16), jnp.zeros((n_rows, R), jnp.bfloat16)
    big, big_rope = big.at[-1000:].set(latent), big_rope.at[-1000:].set(rope)
    rows = np.clip(rows, 0, 999)
    found = run(q, big, big_rope, None, rows + n_rows - 1000)
    assert_near(found, expect(q, latent, rope, None, rows), calc_diff)


@pytest.mark.parametrize(
    ("n_programs", "n_slots", "expected"),
    [(256, 2048, (1, 2048)), (2, 2048, (16, 128)), (1, 1, (1, 128)), (1000, 100, (1, 128))],
)
def test_splits_fill_the_chip(n_programs, n_slots, expected):
    assert gluon_gpu.choose_splits(n_programs, n_slots) == expected


@pytest.mark.parametrize("n_slots", [1, 127, 129, 1000, 2048, 5000])
@pytest.mark.parametrize("n_programs", [1, 3, 16, 64, 100, 300])
def test_splits_cover_every_slot_and_none_is_empty(n_programs, n_slots):
    n, slots = gluon_gpu.choose_splits(n_programs, n_slots)
    assert slots % gluon_gpu.STEP_SLOTS == 0
    assert (n - 1) * slots < n_slots <= n * slots


@pytest.fixture(scope="module", params=[False, True])
def compiled(request, compile_for_hopper):
    latent = "fp8e4nv" if request.param else "bf16"
    constants = gluon_gpu.constants(128, 2048, (1, 2048), SCALE, request.param)
    pointers = f"bf16 {latent} bf16 fp32 i32 bf16 fp32"
    return compile_for_hopper(gluon_gpu.attend_kernel, pointers, "i32 i32", constants)


def test_products_stay_asynchronous_and_all_groups_fit(compiled):
    ptx = compiled.ptx
    # Each group: logits over 576 dims in steps of 16, two products of 64 slots; one wait for each.
    assert ptx.count("wgmma.mma_async") == 2 * (576 // 16 + 2 * 4)
    assert ptx.count("wgmma.wait_group") == 2 * 3
    assert compiled.num_warps == 12
    assert compiled.shared_bytes <= 227 * 1024


def test_machine_code_does_not_spill(compiled):
    assert compiled.spilled_bytes == 0


def array(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latent": array(9, 256)}, "widths 512 and 64"),
        ({"q": array(1, 8, 576, dtype=jnp.float32)}, "bfloat16 queries"),
        (
            {"latent": array(9, 512, dtype=jnp.float8_e4m3fn), "scales": array(9, 1)},
            "with 1 scales",
        ),
        ({"latent": array(9, 512, dtype=jnp.float16)}, "float16 with 0 scales"),
        ({"scale": -1.0}, "positive scale"),
        ({}, "Hopper"),
    ],
)
def test_an_input_it_cannot_take_is_refused_with_the_reason(change, words):
    with pytest.raises(NotImplementedError, match=words):
        gluon_gpu.check(
            change.get("q", array(1, 8, 576)), change.get("latent", array(9, 512)), array(9, 64),
            scale=change.get("scale", 1.0), latent_scale_NG=change.get("scales"),
        )  # fmt: skip
