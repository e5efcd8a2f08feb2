from dataclasses import replace

import jax
import pytest

from configs import v32_671b_sparse, v32_671b_warmup
from dsv32_jax import sharding
from train import pod_steps, step_estimate, topology

GIB = topology.GIB


def changed(cfg, stage, kernels, dispatch="auto", **fields):
    cfg = replace(cfg, model=replace(cfg.model, kernels=kernels, expert_dispatch=dispatch))
    return replace(cfg, **{stage: replace(cfg.stage_config(stage), **fields)})


CONTEXT, FSDP = {"expert": 16, "context": 32}, {"fsdp": 32, "expert": 16}
SHORT = {"seq_len": 4096, "batch_size": 512, "microbatches": 1}


# Compiled for v5p:8x8x8, see docs/pods.md: GiB of arguments and at the peak; seconds of products, memory and links.
@pytest.mark.parametrize(
    ("stage", "kernels", "dispatch", "sizes", "fields", "gib", "times"),
    [
        ("sparse", "reference", "all_gather", CONTEXT, {}, (12.46, 49.12), (215, 1300, 77)),
        ("sparse", "auto", "all_gather", CONTEXT, {}, (12.46, 49.59), (96.6, 484, 76.9)),
        ("sparse", "reference", "all_gather", FSDP, SHORT, (12.46, 40.56), (4.2, 15.9, 2.5)),
        ("sparse", "auto", "all_gather", FSDP, SHORT, (12.46, 40.93), (2.8, 10.1, 2.5)),
        ("sparse", "auto", "auto", FSDP, SHORT, (12.46, 37.98), (2.83, 2.46, 2.41)),
        ("warmup", "reference", "all_gather", CONTEXT, {}, (5.00, 27.59), (23.4, 268, 3.7)),
        ("warmup", "auto", "all_gather", CONTEXT, {}, (5.00, 27.86), (26.9, 5.59, 4.42)),
    ],
)
def test_the_estimate_is_near_what_was_compiled(
    stage, kernels, dispatch, sizes, fields, gib, times, torus
):
    cfg = {"sparse": v32_671b_sparse, "warmup": v32_671b_warmup}[stage].get_config()
    cfg = changed(cfg, stage, kernels, dispatch, **fields)
    load, mesh = step_estimate.load_of(cfg, stage), torus((8, 8, 8), **sizes)
    found = step_estimate.estimate(cfg.model, load, mesh, topology.CHIPS["v5p"])
    assert found.arguments_bytes / GIB == pytest.approx(gib[0], rel=0.005)
    assert found.peak_bytes / GIB == pytest.approx(gib[1], rel=0.12)
    assert found.times.products_s == pytest.approx(times[0], rel=0.7 if kernels == "auto" else 0.1)
    assert found.times.memory_s == pytest.approx(times[1], rel=0.15)
    assert found.times.links_s == pytest.approx(times[2], rel=0.5)


def test_the_estimate_of_grpo_is_near_what_was_compiled(torus):
    cfg, mesh = v32_671b_sparse.get_config(), torus((8, 8, 8), fsdp=4, expert=16, context=8)
    load = pod_steps.GrpoShape().load(cfg)
    found = step_estimate.estimate(cfg.model, load, mesh, topology.CHIPS["v5p"])
    assert found.arguments_bytes / GIB == pytest.approx(17.28, rel=0.005)
    assert found.peak_bytes / GIB == pytest.approx(50.66, rel=0.12)
    # 111 s of products with all that kernels skip, keys after the query and of other rollouts
    assert found.times.products_s < 111 / 3
    assert found.times.memory_s == pytest.approx(30.2, rel=0.25)
    assert found.times.links_s == pytest.approx(56.1, rel=0.5)


@pytest.fixture
def estimate(torus):
    def run(cfg, stage="sparse", shape=(2, 2, 2), slices=1, chip="v5p", **sizes):
        mesh = torus(shape, slices, **sizes)
        load = step_estimate.load_of(cfg, stage)
        return step_estimate.estimate(cfg.model, load, mesh, topology.CHIPS[chip])

    return run


def test_arguments_are_those_of_the_real_step(tiny_run, estimate):
    one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    state = pod_steps.build("sparse", tiny_run, one, pod_steps.Shapes()).arguments[0]
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    found = estimate(tiny_run, shape=(1, 1, 1))
    assert found.arguments_bytes == pytest.approx(expected, rel=0.01)  # but for the router's bias


def test_gradients_are_those_of_what_trains_twice_where_they_are_added_up(tiny_run, torus):
    mesh = torus((1, 1, 1))
    whole = changed(tiny_run, "sparse", "auto", microbatches=1)
    parts = changed(tiny_run, "sparse", "auto", microbatches=2)

    def size(cfg, stage):
        return step_estimate.gradient_bytes(cfg.model, step_estimate.load_of(cfg, stage), mesh)

    one = size(whole, "sparse")
    assert size(parts, "sparse") == 2 * one
    assert 0 < size(whole, "warmup") < one / 5


def test_each_axis_is_paid_on_the_links_where_it_has_devices(estimate):
    cfg = changed(v32_671b_sparse.get_config(), "sparse", "auto", "all_gather", **SHORT)
    base = estimate(cfg, shape=(8, 8, 8), fsdp=128, expert=4)
    assert (
        estimate(cfg, shape=(8, 8, 8), fsdp=32, expert=4, tensor=4).times.links_s
        > base.times.links_s
    )
    # every device has the rows of all tokens of its expert axis
    wide = estimate(cfg, shape=(8, 8, 8), fsdp=32, expert=16)
    assert 1.5 < wide.times.memory_s / base.times.memory_s < 4
    # and gathers the weights of more experts where that is short
    assert wide.peak_bytes < base.peak_bytes


def test_more_microbatches_take_less_memory_and_more_time(estimate):
    cfg = v32_671b_sparse.get_config()
    few, many = (
        estimate(changed(cfg, "sparse", "auto", microbatches=m), shape=(8, 8, 8), expert=4, context=128)
        for m in (10, 120)
    )  # fmt: skip
    assert many.peak_bytes < few.peak_bytes
    assert many.times.links_s > few.times.links_s


def test_a_link_across_slices_is_slower(estimate):
    cfg = changed(v32_671b_sparse.get_config(), "sparse", "auto", **SHORT)
    within = estimate(cfg, shape=(16, 32), chip="v6e", fsdp=32, expert=16)
    across = estimate(cfg, shape=(8, 32), slices=2, chip="v6e", fsdp=32, expert=16)
    assert across.times.links_s > 1.1 * within.times.links_s
    assert across.times[:2] == within.times[:2]
