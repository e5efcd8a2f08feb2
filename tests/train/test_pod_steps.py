from dataclasses import replace

import jax
import pytest

from dsv32_jax import flops, sharding
from dsv32_jax.errors import UsageError
from train import pod_steps, stage, traced
from train import state as states
from train.pod_steps import GrpoShape, ServingShape, Shapes

SERVING = ServingShape(slots=2, max_len=16, prefill_chunk=8, page_size=4)
GRPO = GrpoShape(rows=4, row_length=16, microbatches=2, responses=2, response_tokens=8)
SHAPES = Shapes(SERVING, GRPO)


@pytest.mark.parametrize("name", ["dense", "warmup", "sparse", "grpo", "prefill", "decode"])
def test_each_step_traces_with_shapes_alone(name, tiny_run, mesh):
    step = pod_steps.build(name, tiny_run, mesh, SHAPES)
    with jax.set_mesh(mesh):
        trace = step.jitted.trace(*step.arguments)
    assert traced.executed_flops(trace.jaxpr, 1) > 0
    places = {x.sharding.mesh for x in jax.tree.leaves(step.arguments[1:]) if hasattr(x, "sharding")}  # fmt: skip
    assert places == {mesh}


def test_a_training_step_counts_its_tokens_and_flops(tiny_run, mesh):
    step = pod_steps.build("sparse", tiny_run, mesh, SHAPES)
    assert step.tokens == 4 * 16
    assert step.model_flops == step.tokens * stage.train_flops(tiny_run.model, 16, "sparse")
    assert step.seq_len == 16


@pytest.mark.parametrize(
    ("document", "context", "expected"),
    [
        (16, 1, 8 / 16),
        (16, 4, 14 / 16),  # the last 4 queries have 12 to 16 keys
        (4, 1, 2 / 16),
        (4, 4, 2 / 16),
        (4, 8, 3 / 16),  # the last 2 of a document have 2 to 4
    ],
)
def test_reach_is_that_of_the_device_with_a_rows_last_queries(
    tiny_run, torus, document, context, expected
):
    load = pod_steps.load_of("sparse", tiny_run, SHAPES)._replace(document=document)
    found = pod_steps.reach(load, torus((context, 1, 1), context=context))
    assert found == pytest.approx(expected)


def test_each_step_that_trains_says_how_far_its_kernels_reach(tiny_run, mesh):
    expected = {"sparse": 1 / 2, "grpo": 1 / 4, "decode": 1.0}
    steps = {name: pod_steps.build(name, tiny_run, mesh, SHAPES) for name in expected}
    assert {name: step.reach for name, step in steps.items()} == expected


def test_grpos_update_has_rollouts_experts_and_a_reference(tiny_run, mesh):
    step = pod_steps.build("grpo", tiny_run, mesh, Shapes(grpo=replace(GRPO, kept_tokens=100)))
    state, reference, work, _ = step.arguments
    cfg = tiny_run.model
    assert reference == state.parameters
    moments = {
        path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state) if x.ndim
    }
    assert moments == set(states.trainable("rl", state.parameters.weights))
    assert work.packed.tokens.shape == (2, 2, 16)
    assert work.packed.experts.shape == (2, cfg.n_moe_layers, 2, 16, cfg.moe.n_active)
    assert work.packed.place.shape == (2, 2, 2, 8)
    assert work.packed.kept.token.shape == (2, 2, 128)  # rounded up
    token = tuple(sharding.spec("batch", "sequence"))
    assert tuple(work.packed.tokens.sharding.spec) == (None, *token)
    assert tuple(work.packed.experts.sharding.spec)[2:4] == token
    documents = replace(cfg, mtp=False)
    of_token = stage.train_flops(documents, 8, "rl") + flops.forward(documents, 8, "sparse").total
    assert step.model_flops == step.tokens * of_token == 4 * 16 * of_token
    assert pod_steps.build("grpo", tiny_run, mesh, SHAPES).arguments[2].packed.kept is None


def test_grpos_flops_are_those_of_all_its_microbatches(tiny_run, mesh):
    def executed(**changes):
        step = pod_steps.build("grpo", tiny_run, mesh, Shapes(grpo=replace(GRPO, **changes)))
        with jax.set_mesh(mesh):
            return traced.executed_flops(step.jitted.trace(*step.arguments).jaxpr, 1)

    assert executed(rows=4, microbatches=2) == executed(rows=8, microbatches=4) / 2 > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatches": 3}, "microbatches=3 must divide the 4 rows"),
        ({"response_tokens": 16}, "response_tokens=16 must be below row_length=16"),
        ({"responses": 0}, "responses=0 must be at least 1"),
        ({"kept_tokens": -1}, "kept_tokens=-1 must be at least 0"),
    ],
)
def test_a_shape_of_grpo_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(GRPO, **changes)


def test_grpo_needs_a_stage_whose_adam_it_takes(tiny_run):
    warmup = replace(tiny_run, dense=None, sparse=None, init_from="x")
    with pytest.raises(UsageError, match="grpo takes AdamW's settings from a stage"):
        GRPO.load(warmup)


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
        ("decode", SERVING, 2, 1, 15),
        ("prefill", SERVING, 8, 8, 8),
        ("prefill", ServingShape(slots=2, max_len=8, prefill_chunk=99, page_size=4), 8, 8, 0),
    ],
)
def test_a_served_token_costs_what_its_place_asks(name, shape, tokens, n_tokens, first, tiny_run, mesh):  # fmt: skip
    step = pod_steps.build(name, tiny_run, mesh, Shapes(shape))
    cfg, rows = tiny_run.model, 2 if name == "decode" else 1
    assert step.tokens == tokens
    expected = rows * by_hand(cfg.n_layers, cfg, n_tokens, first, head_tokens=1)
    assert step.model_flops == pytest.approx(expected)


def test_the_caches_pages_hold_every_sequence(tiny_run, mesh):
    _, _, cache, _, _, table, _ = pod_steps.build("decode", tiny_run, mesh, SHAPES).arguments
    pages = 5  # 16 tokens and one more, 4 a page
    assert table.shape == (2, pages)
    assert cache[0].index.shape[0] == 2 * pages * 4
    assert len(cache) == tiny_run.model.n_layers


def test_an_unknown_step_names_the_known_ones(tiny_run):
    known = "dense, warmup, sparse, grpo, prefill, decode"
    with pytest.raises(UsageError, match=f"'ppo' must be one of {known}"):
        pod_steps.check_name("ppo", tiny_run)
    for name in ("sparse", "grpo", "decode"):
        pod_steps.check_name(name, tiny_run)
