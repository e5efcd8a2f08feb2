"""Gluon backward of sparse_mla: compiled form (no GPU needed), and gradients on a GPU against float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import gluon_gpu_backward

pytest.importorskip("triton")

SCALE = 576**-0.5
# Operands, P, dS and the results are rounded to bf16 (rms 0.0017 each): 0.0022 to 0.0026 is usual.
RELATIVE_ERROR = 6e-3
SPILLED_BYTES = 64  # at the entry of a kernel: arguments of the partitions, never in a loop
KEYS = 1024


def assert_overlapping(kernel):
    """No spills beyond the entry, and runs of wgmma between fences: ptxas serialises all or none."""
    assert kernel.spilled_bytes <= SPILLED_BYTES
    assert kernel.shared_bytes <= 232_448
    assert kernel.sass.count("WARPGROUP.ARRIVE") * 3 < kernel.sass.count("HGMMA")


SIZES = {"N_SLOTS": 2048, "N_TILES": 32}


@pytest.mark.parametrize("heads", [64, 128])
def test_slot_kernels_compile_without_spills_or_serialised_products(heads, compile_for_hopper):
    from pallas_kernels.sparse_mla import gluon_gpu_backward_slots, gluon_gpu_backward_slots_64

    kernel = {
        64: gluon_gpu_backward_slots_64.slots_of_64_heads,
        128: gluon_gpu_backward_slots.slots_of_128_heads,
    }[heads]
    pointers = "bf16 bf16 bf16 i32 fp32 fp32 i32 bf16 bf16"
    assert_overlapping(compile_for_hopper(kernel, pointers, "i32 fp32 fp32", SIZES))


def test_query_kernel_compiles_without_spills_or_serialised_products(compile_for_hopper):
    from pallas_kernels.sparse_mla.gluon_gpu_backward_queries import query_gradients

    pointers, constants = "bf16 bf16 i32 i32 bf16 bf16", SIZES | {"N_HEADS": 128}
    assert_overlapping(compile_for_hopper(query_gradients, pointers, "i32", constants))


def test_key_kernel_adds_16_bytes_an_instruction(compile_for_hopper):
    from pallas_kernels.sparse_mla.gluon_gpu_backward_keys import key_gradients

    pointers = "bf16 bf16 bf16 bf16 i32 i32 fp32 fp32 fp32"
    constants = SIZES | {"N_HEADS": 128, "SPAN": 32, "FIXED": False}
    kernel = compile_for_hopper(key_gradients, pointers, "i32 i32", constants)
    assert_overlapping(kernel)
    assert "red.relaxed" in kernel.ptx or "red.global" in kernel.ptx
    assert kernel.sass.count("RED") == kernel.sass.count("ADD.F32x4")


def test_fixed_point_unit_keeps_sums_in_range(rng):
    q, kv, d_out = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((3, 2, 576), (5, 576), (3, 2, 512))
    )
    kv = kv.at[4].set(jnp.nan)
    delta = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    unit = float(gluon_gpu_backward._fixed_unit(q, kv, d_out, delta, SCALE)[0])
    assert np.log2(unit) == round(np.log2(unit))
    assert 2**20 < unit < 2**61
    assert not np.isfinite(
        gluon_gpu_backward._fixed_unit(q.at[0, 0, 0].set(jnp.inf), kv, d_out, delta, SCALE)[0]
    )


def test_spans_cover_a_share_of_the_keys_that_fits_the_cache():
    assert gluon_gpu_backward._span(32, 8192) == 32
    assert gluon_gpu_backward._span(32, 131072) == 4
    assert gluon_gpu_backward._span(2, 131072) >= 2


def exact(q, kv, idx, d_out, d_lse, *, rounded=False):
    """Out, lse and the gradients in float32, query by query.

    `rounded` takes sum(out * d_out) from the bf16 output, as any backward that is given only that must. Where a weight
    is near 1, dP - sum(out * d_out) cancels, and that rounding is most of what remains.
    """
    out, dq = np.zeros(d_out.shape, np.float32), np.zeros(q.shape, np.float32)
    lse, dkv = np.full(q.shape[:2], -np.inf, np.float32), np.zeros(kv.shape, np.float32)
    for t in range(len(q)):
        slots = idx[t][(idx[t] >= 0) & (idx[t] < len(kv))]
        if not len(slots):
            continue
        k = kv[slots]
        s = SCALE * (q[t] @ k.T)
        peak = s.max(1, keepdims=True)
        lse[t] = peak[:, 0] + np.log(np.exp(s - peak).sum(1))
        p = np.exp(s - lse[t][:, None])
        out[t] = p @ k[:, :512]
        kept = np.asarray(jnp.bfloat16(out[t]), np.float32) if rounded else out[t]
        delta = (kept * d_out[t]).sum(1) - d_lse[t]
        ds = SCALE * p * (d_out[t] @ k[:, :512].T - delta[:, None])
        dq[t] = ds @ k
        rows = ds.T @ q[t]
        rows[:, :512] += p.T @ d_out[t]
        if len(np.unique(slots)) == len(slots):
            dkv[slots] += rows
        else:
            np.add.at(dkv, slots, rows)
    return out, lse, dq, dkv


def draw(rng, queries, heads, keys, slots):
    """Random bf16 values in float32, and distinct indices (repeated once they run out)."""
    shapes = ((queries, heads, 576), (keys, 576), (queries, heads, 512))
    q, kv, d_out = (
        rng.standard_normal(shape, np.float32).astype(jnp.bfloat16).astype(np.float32)
        for shape in shapes
    )
    order = np.argsort(rng.random((queries, keys), np.float32), axis=1).astype(np.int32)
    idx = np.tile(order, (1, -(-slots // keys)))[:, :slots]
    return q, kv, idx, d_out, rng.standard_normal((queries, heads), np.float32)


@functools.partial(jax.jit, static_argnames="deterministic")
def jitted(q, kv, idx, out, lse, d_out, d_lse, deterministic=False):
    return gluon_gpu_backward.backward(
        *(q, kv, idx, out, lse, d_out, d_lse),
        scale=SCALE, value_dim=512, deterministic=deterministic,
    )  # fmt: skip


def run(q, kv, idx, out, lse, d_out, d_lse, **options):
    q, kv, out, d_out = (np.asarray(x).astype(jnp.bfloat16) for x in (q, kv, out, d_out))
    return jitted(q, kv, idx, out, lse, d_out, d_lse, **options)


def assert_close(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= RELATIVE_ERROR * np.linalg.norm(want)


def compare(q, kv, idx, d_out, d_lse, *, poison=(), rounded=False, **options):
    """Check both gradients; `poison` lists rows of `out` to overwrite with NaN."""
    out, lse, dq, dkv = exact(q, kv, idx, d_out, d_lse, rounded=rounded)
    out[list(poison)] = np.nan
    got_dq, got_dkv = run(q, kv, idx, out, lse, d_out, d_lse, **options)
    assert_close(got_dq, dq)
    assert_close(got_dkv, dkv)
    return got_dq, got_dkv


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 62, 213])
def test_gradients_match_float32(rng, queries):
    compare(*draw(rng, queries, 128, KEYS, 256))


@pytest.mark.gpu
def test_masked_slots_and_empty_rows_give_nothing(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 62, 128, KEYS, 256)
    idx[3] = -1
    idx[4, ::2] = -1
    idx[5, 1::2] += KEYS
    idx[6, 1:] = -1
    idx[7, :190] = np.iinfo(np.int32).max
    idx[8] = idx[8, 0]  # one key 256 times
    idx[9, 100:] = idx[9, :156]
    dq, _ = compare(q, kv, idx, d_out, d_lse, poison=[3])
    assert not np.any(np.asarray(dq[3], np.float32))


@pytest.mark.gpu
def test_all_rows_empty_give_zeros_even_if_out_is_nan(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 62, 128, KEYS, 256)
    out, lse = np.full(d_out.shape, np.nan), np.full(d_lse.shape, -np.inf, np.float32)
    for gradient in run(q, kv, np.full_like(idx, -1), out, lse, d_out, d_lse):
        assert not np.any(np.asarray(gradient, np.float32))


@pytest.mark.gpu
def test_rows_that_no_slot_names_may_be_nan(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 62, 128, KEYS, 256)
    idx = np.where(idx < 8, -1, idx)
    kv[:8] = np.nan
    _, dkv = compare(q, kv, idx, d_out, d_lse)
    assert not np.any(np.asarray(dkv[:8], np.float32))


@pytest.mark.gpu
def test_large_logits(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 62, 128, KEYS, 256)
    compare(np.float32(jnp.bfloat16(q * 100)), kv, idx, d_out, d_lse, rounded=True)


@pytest.mark.gpu
def test_heads_short_of_a_group_and_several_launches(rng):
    compare(*draw(rng, 2 * gluon_gpu_backward.QUERIES_A_LAUNCH + 7, 16, KEYS, 256))


@pytest.mark.gpu
def test_64_heads(rng):
    compare(*draw(rng, 32, 64, 8192, 2048))


@pytest.mark.gpu
def test_more_slots_than_keys_and_a_partial_tile(rng):
    compare(*draw(rng, 62, 32, 95, 100))


@pytest.mark.gpu
def test_all_queries_name_the_same_keys(rng):
    q, kv, _, d_out, d_lse = draw(rng, 512, 16, 4096, 2048)
    compare(q, kv, np.tile(np.arange(2048, dtype=np.int32), (512, 1)), d_out, d_lse)


@pytest.mark.gpu
def test_many_keys_in_spans(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 32, 128, 40000, 2048)
    compare(q, kv, idx, d_out, d_lse)


@pytest.mark.gpu
def test_deterministic_sums_repeat_bit_for_bit(rng):
    q, kv, idx, d_out, d_lse = draw(rng, 213, 128, KEYS, 256)
    first = compare(q, kv, idx, d_out, d_lse, deterministic=True)
    out, lse, _, _ = exact(q, kv, idx, d_out, d_lse)
    for _ in range(20):
        again = run(q, kv, idx, out, lse, d_out, d_lse, deterministic=True)
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.gpu
def test_offsets_past_32_bits(rng):
    """The last queries alone have a cotangent; every other row would show a wrapped offset."""
    q, kv, idx, d_out, d_lse = draw(rng, 8, 128, KEYS, 256)
    out, lse, dq, dkv = exact(q, kv, idx, d_out, d_lse)
    n = 29_200  # 29,128 rows of 128 x 576 elements reach 2^31
    q, out, d_out = (x.astype(jnp.bfloat16) for x in (q, out, d_out))
    q, idx, out, lse, d_out, d_lse = (
        jnp.zeros((n, *x.shape[1:]), x.dtype).at[-8:].set(x)
        for x in (q, idx, out, lse, d_out, d_lse)
    )
    got_dq, got_dkv = jitted(q, kv.astype(jnp.bfloat16), idx, out, lse, d_out, d_lse)
    assert_close(got_dq[-8:], dq)
    assert_close(got_dkv, dkv)
    assert not jnp.any(got_dq[:-8])
