import jax
import pytest

from dsv32_jax.errors import UsageError
from train import pod_steps, stage, traced
from train.pod_steps import ServingShape

SHAPE = ServingShape(slots=2, max_len=16, prefill_chunk=8, page_size=4)


@pytest.mark.parametrize("name", ["dense", "warmup", "sparse", "prefill", "decode"])
def test_each_step_traces_with_shapes_alone(name, tiny_run, mesh):
    step = pod_steps.build(name, tiny_run, mesh, SHAPE)
    with jax.set_mesh(mesh):
        trace = step.jitted.trace(*step.arguments)
    assert traced.executed_flops(trace.jaxpr, 1) > 0
    places = {x.sharding.mesh for x in jax.tree.leaves(step.arguments[1:]) if hasattr(x, "sharding")}  # fmt: skip
    assert places == {mesh}


def test_a_training_step_counts_its_tokens_and_flops(tiny_run, mesh):
    step = pod_steps.build("sparse", tiny_run, mesh, SHAPE)
    assert step.tokens == 4 * 16
    assert step.model_flops == step.tokens * stage.train_flops(tiny_run.model, 16, "sparse")
    assert step.seq_len == 16


def by_hand(n_layers, cfg, n_tokens, first, head_tokens):
    """Count the products of n_tokens tokens from place `first` on, layer by layer."""
    mla, ix = cfg.mla, cfg.indexer
    attention = cfg.dim * (mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim)
    attention += mla.q_lora_rank * mla.n_heads * mla.qk_dim + mla.n_heads * mla.v_dim * cfg.dim
    attention += mla.kv_lora_rank * mla.n_heads * (mla.nope_dim + mla.v_dim)
    index = mla.q_lora_rank * ix.n_heads * ix.head_dim + cfg.dim * (ix.head_dim + ix.n_heads)
    experts = 3 * cfg.dim * cfg.moe.expert_dim * (cfg.moe.n_active + cfg.moe.n_shared)
    feed_forward = [3 * cfg.dim * cfg.ffn_dim] * cfg.n_dense_layers
    feed_forward += [experts + cfg.dim * cfg.moe.n_experts] * (n_layers - cfg.n_dense_layers)
    total = head_tokens * cfg.dim * cfg.vocab_size
    for one in feed_forward:
        for place in range(first, first + n_tokens):
            read = min(place + 1, ix.topk) * mla.n_heads * (mla.qk_dim + mla.v_dim)
            total += attention + index + one + read + (place + 1) * ix.n_heads * ix.head_dim
    return 2 * total


@pytest.mark.parametrize(
    ("name", "shape", "tokens", "n_tokens", "first"),
    [
        ("decode", SHAPE, 2, 1, 15),
        ("prefill", SHAPE, 8, 8, 8),
        ("prefill", ServingShape(slots=2, max_len=8, prefill_chunk=99, page_size=4), 8, 8, 0),
    ],
)
def test_a_served_token_costs_what_its_place_asks(name, shape, tokens, n_tokens, first, tiny_run, mesh):  # fmt: skip
    step = pod_steps.build(name, tiny_run, mesh, shape)
    cfg, rows = tiny_run.model, 2 if name == "decode" else 1
    assert step.tokens == tokens
    expected = rows * by_hand(cfg.n_layers, cfg, n_tokens, first, head_tokens=1)
    assert step.model_flops == pytest.approx(expected)


def test_the_caches_pages_hold_every_sequence(tiny_run, mesh):
    _, _, cache, _, _, table, _ = pod_steps.build("decode", tiny_run, mesh, SHAPE).arguments
    pages = 5  # 16 tokens and one more, 4 a page
    assert table.shape == (2, pages)
    assert cache[0].latent.shape[0] == 2 * pages * 4
    assert len(cache) == tiny_run.model.n_layers


def test_an_unknown_step_names_the_known_ones(tiny_run):
    with pytest.raises(UsageError, match="'grpo' must be one of dense, warmup, sparse, prefill, decode"):  # fmt: skip
        pod_steps.check_name("grpo", tiny_run)
    for name in ("sparse", "decode"):
        pod_steps.check_name(name, tiny_run)
