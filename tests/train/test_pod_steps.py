import jax
import pytest

from dsv32_jax import flops
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


def test_a_decoded_token_costs_what_the_longest_row_gains_by_it(tiny_run, mesh):
    step = pod_steps.build("decode", tiny_run, mesh, SHAPE)
    whole, shorter = (flops.forward(tiny_run.model, n, "sparse").total * n for n in (16, 15))
    assert step.tokens == 2
    assert step.model_flops == pytest.approx(2 * (whole - shorter))


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
