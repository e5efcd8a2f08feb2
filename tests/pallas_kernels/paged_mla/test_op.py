import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_mla
from pallas_kernels.paged_mla.layout import Parts

FLOAT32_TOL = 1e-5  # weighted means of values ~1, a few float32 roundings
SCALE, H, C, R, N = 0.3, 3, 8, 4, 40
attend = jax.jit(paged_mla, static_argnames="scale")


def oracle(q, latent, rope, rows, scale=SCALE):
    """Attend in float64, slot by slot."""
    kv = np.concatenate([latent, rope], axis=1)
    out = np.zeros((*rows.shape[:-1], H, latent.shape[1]))
    lse = np.full((*rows.shape[:-1], H), -np.inf)
    for at in np.ndindex(rows.shape[:-1]):
        kept = [r for r in rows[at] if 0 <= r < len(kv)]
        for h in range(H if kept else 0):
            logits = scale * kv[kept] @ q[at][h]
            weights = np.exp(logits - logits.max())
            lse[at][h] = logits.max() + np.log(weights.sum())
            out[at][h] = weights / weights.sum() @ latent[kept]
    return out, lse


def draw(rng, batch, k):
    q = rng.normal(size=(*batch, H, C + R))
    rows = rng.integers(-2, N + 2, size=(*batch, k))
    return q, rng.normal(size=(N, C)), rng.normal(size=(N, R)), rows


def float32(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


@pytest.mark.parametrize("batch", [(5,), (2, 1), (3, 2), (1, 300)])
@pytest.mark.parametrize("k", [1, 7])
def test_the_listed_rows_are_attended_to(rng, batch, k):
    q, latent, rope, rows = draw(rng, batch, k)
    q32, *parts = float32(q, latent, rope)
    out, lse = attend(q32, Parts(*parts), jnp.asarray(rows), scale=SCALE)
    expected_out, expected_lse = oracle(q, latent, rope, rows)
    np.testing.assert_allclose(out, expected_out, atol=FLOAT32_TOL)
    np.testing.assert_allclose(lse, expected_lse, atol=FLOAT32_TOL)
    assert lse.dtype == jnp.float32


def test_a_row_without_a_slot_gives_nothing_and_other_rows_are_not_read(rng):
    q, latent, rope, rows = draw(rng, (3,), 4)
    rows[1] = -1
    listed = np.unique(rows[(rows >= 0) & (rows < N)])
    others = np.setdiff1d(np.arange(N), listed)
    latent[others] = rope[others] = np.nan
    q32, *parts = float32(q, latent, rope)
    out, lse = attend(q32, Parts(*parts), jnp.asarray(rows), scale=SCALE)
    assert np.isfinite(out).all()
    assert (np.asarray(out[1]) == 0).all()
    assert (np.asarray(lse[1]) == -np.inf).all()


def test_quantised_latents_are_their_values_times_their_scales(rng):
    q, _, rope, rows = draw(rng, (4,), 6)
    codes = rng.choice([-448.0, -1.5, 0.0, 0.25, 3.5, 96.0], size=(N, 256)) / 64
    q = rng.normal(size=(4, H, 256 + R))
    scales = 2.0 ** rng.integers(-8, -3, size=(N, 2))
    exact = codes * np.repeat(scales, 128, axis=1)
    cache = Parts(jnp.asarray(codes, jnp.float8_e4m3fn), *float32(rope, scales))
    out, lse = attend(*float32(q), cache, jnp.asarray(rows), scale=SCALE)
    expected_out, expected_lse = oracle(q, exact, rope, rows)
    np.testing.assert_allclose(out, expected_out, atol=FLOAT32_TOL * 10)
    np.testing.assert_allclose(lse, expected_lse, atol=FLOAT32_TOL * 10)


def test_bf16_stays_near(rng, calc_diff):
    q, latent, rope, rows = draw(rng, (6,), 7)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (q, latent, rope)]
    out, _ = attend(low[0], Parts(*low[1:]), jnp.asarray(rows), scale=SCALE)
    expected, _ = oracle(*(np.asarray(a, np.float64) for a in low), rows)
    assert out.dtype == jnp.bfloat16
    assert calc_diff(out, expected) < 2e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (4, H, C)}, "queries have 8 dims"),
        ({"latent": jnp.float8_e4m3fn}, "needs scales"),
        ({"scale": (N, 1)}, "has no scales"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(rng, change, words):
    q, latent, rope, rows = draw(rng, (4,), 3)
    q = np.ones(change["q"]) if "q" in change else q
    scales = jnp.ones(change["scale"]) if "scale" in change else None
    dtype = change.get("latent", jnp.float32)
    cache = Parts(jnp.asarray(latent, dtype), *float32(rope), scales)
    options = {"scale": SCALE, "implementation": change.get("implementation")}
    with pytest.raises(ValueError, match=words):
        paged_mla(*float32(q), cache, jnp.asarray(rows), **options)
