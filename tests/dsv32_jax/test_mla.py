import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from dsv32_jax import mla, rope, segments
from pallas_kernels import dispatch

FLOAT32_TOL = 2e-5  # four projections and a weighted mean of values ~1
IDS = [[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0], [3, 3, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]]
N = len(IDS[0])


def rms(x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * np.asarray(weight[...])


def turn_pairs(x, angles):
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def oracle(module, cfg, x, ids, reads):
    """Attend in float64, token by token; `reads(row, t)` lists the keys token t reads."""
    dims = cfg.mla
    w = {n: np.asarray(getattr(module, n)[...], np.float64) for n in ("wq_a", "wq_b", "wkv_a")}
    w |= {n: np.asarray(getattr(module, n)[...], np.float64) for n in ("wkv_b", "wo")}
    position = np.asarray(segments.from_ids(jnp.asarray(ids)).position)
    angles = position[..., None] * rope.inverse_frequencies(cfg.rope, dims.rope_dim)
    q = np.einsum("btq,qhd->bthd", rms(x @ w["wq_a"], module.q_norm.weight), w["wq_b"])
    q_rope = turn_pairs(q[..., dims.nope_dim :], angles[:, :, None])
    q = np.concatenate([q[..., : dims.nope_dim], q_rope], -1)
    down = x @ w["wkv_a"]
    latent = rms(down[..., : dims.kv_lora_rank], module.kv_norm.weight)
    k_rope = turn_pairs(down[..., dims.kv_lora_rank :], angles)
    kv = np.einsum("btc,chd->bthd", latent, w["wkv_b"])
    out = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        keys = reads(b, t)
        if not len(keys):
            continue
        for h in range(dims.n_heads):
            k = np.concatenate([kv[b, keys, h, : dims.nope_dim], k_rope[b, keys]], -1)
            weights = np.exp(cfg.softmax_scale * k @ q[b, t, h])
            value = weights @ kv[b, keys, h, dims.nope_dim :] / weights.sum()
            out[b, t] += value @ w["wo"][h]
    return out


def document_before(b, t):
    return [s for s in range(t + 1) if IDS[b][t] and len({*IDS[b][s : t + 1]}) == 1]


@pytest.fixture(scope="module")
def sized(cfg):
    return dataclasses.replace(
        cfg, init_std=0.3, indexer=dataclasses.replace(cfg.indexer, topk=4, n_heads=6)
    )


@pytest.fixture(scope="module")
def module(sized):
    module = mla.MLA(sized, rngs=nnx.Rngs(0))
    module.q_norm.weight = nnx.Param(jnp.linspace(0.5, 2, sized.mla.q_lora_rank))
    module.kv_norm.weight = nnx.Param(jnp.linspace(2, 0.5, sized.mla.kv_lora_rank))
    return module


@pytest.fixture(scope="module")
def x(sized):
    return np.random.default_rng(0).normal(size=(2, N, sized.dim))


def selected(tensors):
    """List what the indexer chose, from the opened tensors."""
    return pallas_kernels.indexer_topk(*tensors.index, k=4, start=tensors.start, end=tensors.end)


def run(module, x, mode, dtype=jnp.float32, **options):
    documents = segments.from_ids(jnp.asarray(IDS))
    call = jax.jit(lambda module, x: module(x, documents, mode=mode, **options))
    return call(module, jnp.asarray(x, dtype))


def with_form(module, sized, **options):
    """Return the module under other attention options."""
    cfg = dataclasses.replace(sized, mla=dataclasses.replace(sized.mla, **options))
    graph, _ = nnx.split(mla.MLA(cfg, rngs=nnx.Rngs(1)))
    return nnx.merge(graph, nnx.split(module)[1])


@pytest.fixture(scope="module")
def sparse(module, x):
    return run(module, x, "sparse", indexer_loss=True, probe=selected)


@pytest.fixture(scope="module")
def dense(module, x):
    return run(module, x, "dense", indexer_loss=True, probe=lambda tensors: tensors)


def test_dense_attention_equals_a_loop_over_tokens(module, sized, x, dense):
    expected = oracle(module, sized, x, IDS, document_before)
    np.testing.assert_allclose(dense[0], expected, atol=FLOAT32_TOL * np.abs(expected).max())


def test_the_window_reads_the_last_k_of_the_document(module, sized, x):
    out, kl, measured = run(module, x, "window")
    expected = oracle(module, sized, x, IDS, lambda b, t: document_before(b, t)[-4:])
    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL * np.abs(expected).max())
    assert kl is None
    assert measured is None


def test_sparse_attention_reads_the_keys_the_indexer_ranks_highest(module, sized, x, sparse, dense):
    index = dense[2].index
    scores = np.einsum(
        "btj,btjs->bts", index.w, np.maximum(np.einsum("btjx,bsx->btjs", index.q, index.k), 0)
    )

    def best(b, t):
        return sorted(document_before(b, t), key=lambda s: (-scores[b, t, s], s))[:4]

    expected = oracle(module, sized, x, IDS, best)
    chosen = [[set(np.asarray(sparse[2])[b, t]) - {-1} for t in range(N)] for b in range(2)]
    assert chosen == [[set(best(b, t)) for t in range(N)] for b in range(2)]
    np.testing.assert_allclose(sparse[0], expected, atol=FLOAT32_TOL * np.abs(expected).max())


def test_gathered_rows_in_absorbed_form_equal_masked_heads(module, sized, x, sparse):
    gathered = with_form(module, sized, masked_max_len=0)
    out, kl, chosen = run(gathered, x, "sparse", indexer_loss=True, probe=selected)
    np.testing.assert_allclose(out, sparse[0], atol=FLOAT32_TOL * np.abs(sparse[0]).max())
    np.testing.assert_allclose(kl, sparse[1], atol=FLOAT32_TOL)
    np.testing.assert_array_equal(chosen, sparse[2])


def test_masked_max_len_is_the_longest_masked_row(module, sized, x, monkeypatch):
    gathered_rows = []
    attend = mla.sharded_ops.attend_selected
    monkeypatch.setattr(
        mla.sharded_ops, "attend_selected", lambda *a: gathered_rows.append(N) or attend(*a)
    )
    run(with_form(module, sized, masked_max_len=N), x, "sparse")
    assert gathered_rows == []
    run(with_form(module, sized, masked_max_len=N - 1), x, "sparse")
    assert gathered_rows == [N]


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [("gpu", None, 12288), ("cpu", None, 12288), ("tpu", None, 32768), ("tpu", 0, 0)],
)
def test_without_a_number_masks_reach_as_far_as_they_are_faster(
    sized, monkeypatch, platform, given, expected
):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    assert mla.masked_up_to(dataclasses.replace(sized.mla, masked_max_len=given)) == expected


@pytest.mark.parametrize("masked_max_len", [0, N])
def test_the_field_kernels_names_the_implementation_of_every_op(
    sized, x, masked_max_len, monkeypatch
):
    asked = {}
    choose = dispatch.choose

    def record(op, implementation, backends):
        asked[op] = implementation
        return choose(op, implementation, backends)

    monkeypatch.setattr(dispatch, "choose", record)
    form = dataclasses.replace(sized.mla, masked_max_len=masked_max_len)
    for kernels, implementation in (("auto", None), ("reference", "reference")):
        cfg = dataclasses.replace(sized, mla=form, kernels=kernels)
        run(mla.MLA(cfg, rngs=nnx.Rngs(0)), x, "sparse", indexer_loss=True)
        masked = {"dense_mla", "indexer_kl", "indexer_topk_mask"}
        gathered = {"sparse_mla", "sparse_indexer_kl", "indexer_topk"}
        assert asked == dict.fromkeys(masked if masked_max_len else gathered, implementation)


@pytest.mark.parametrize(("masked_max_len", "op"), [(0, "indexer_topk"), (N, "indexer_topk_mask")])
def test_fp8_kernels_are_asked_of_the_selection_and_never_replaced(sized, x, masked_max_len, op):
    form = dataclasses.replace(sized.mla, masked_max_len=masked_max_len)
    index = dataclasses.replace(sized.indexer, fp8=True)
    cfg = dataclasses.replace(sized, mla=form, indexer=index, kernels="fp8")
    with pytest.raises(NotImplementedError, match=f"{op}: pallas_gpu_fp8: needs an NVIDIA Hopper"):
        run(mla.MLA(cfg, rngs=nnx.Rngs(0)), x, "sparse")
    assert run(mla.MLA(cfg, rngs=nnx.Rngs(0)), x, "dense")[0].shape == x.shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_field_deterministic_reaches_both_ops_that_add_into_listed_keys(
    sized, x, deterministic, monkeypatch
):
    asked = {}
    for name in ("sparse_mla", "sparse_indexer_kl"):
        op = getattr(pallas_kernels, name)

        def record(*arrays, deterministic, name=name, op=op, **options):
            asked[name] = deterministic
            return op(*arrays, deterministic=deterministic, **options)

        monkeypatch.setattr(pallas_kernels, name, record)
    form = dataclasses.replace(sized.mla, masked_max_len=0)
    cfg = dataclasses.replace(sized, mla=form, deterministic=deterministic)

    run(mla.MLA(cfg, rngs=nnx.Rngs(0)), x, "sparse", indexer_loss=True)

    assert asked == {"sparse_mla": deterministic, "sparse_indexer_kl": deterministic}


def test_kl_compares_the_heads_sum_with_the_indexer(dense):
    _, kl, opened = dense
    logits = opened.scale * np.einsum("bthd,bshd->bhts", opened.q, opened.k)
    index = opened.index
    scores = np.einsum(
        "btj,btjs->bts", index.w, np.maximum(np.einsum("btjx,bsx->btjs", index.q, index.k), 0)
    )
    for b, t in np.ndindex(2, N):
        keys = document_before(b, t)
        if not keys:
            assert kl[b, t] == 0
            continue
        heads = np.exp(logits[b, :, t, keys]).T
        p = (heads / heads.sum(-1, keepdims=True)).mean(0)
        q = np.exp(scores[b, t, keys])
        np.testing.assert_allclose(
            kl[b, t], np.sum(p * np.log(p / (q / q.sum()))), atol=5 * FLOAT32_TOL
        )


def test_the_probe_opens_the_attention(module, sized, x, dense):
    opened = dense[2]
    assert opened.q.shape == (2, N, 2, sized.mla.qk_dim)
    assert opened.scale == sized.softmax_scale
    logits = opened.scale * np.einsum("thd,shd->hts", opened.q[0], opened.k[0])
    lse = np.log(np.exp(logits[:, 9, :10]).sum(-1))
    np.testing.assert_allclose(opened.lse[0, 9], lse, atol=FLOAT32_TOL)
    assert np.all(np.isneginf(opened.lse[0, 13]))


def test_padding_attends_to_nothing(dense, sparse):
    for out, kl, _ in (dense, sparse):
        assert np.all(np.asarray(out)[np.array(IDS) == 0] == 0)
        assert np.all(np.asarray(kl)[np.array(IDS) == 0] == 0)


def test_fp8_rounds_the_latent_but_not_the_rope_key(module, sized, x):
    rounded = with_form(module, sized, fp8_latent=True)
    keys = {
        name: run(m, x, "dense", probe=lambda tensors: tensors.k)[2]
        for name, m in (("plain", module), ("rounded", rounded))
    }
    nope = sized.mla.nope_dim
    np.testing.assert_array_equal(keys["plain"][..., nope:], keys["rounded"][..., nope:])
    moved = np.abs(keys["plain"] - keys["rounded"])[..., :nope]
    assert 0 < moved.max() < 0.2 * np.abs(keys["plain"]).max()


def test_bf16_attention_stays_near_float32(module, x, dense):
    out, kl, _ = run(module, x, "dense", jnp.bfloat16, indexer_loss=True)
    assert out.dtype == jnp.bfloat16
    assert kl.dtype == jnp.float32
    # Five roundings to 8 bits of mantissa on the way.
    np.testing.assert_allclose(
        np.asarray(out, np.float32), dense[0], atol=0.05 * np.abs(dense[0]).max()
    )
