import inspect
from dataclasses import replace

import jax
import pytest

from dsv32_jax.sharding import AXES
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import EvidenceConfig, RunConfig, StageConfig

MAIN, INDEXER = (
    OptimizerConfig(main=Schedule(peak=1.0)),
    OptimizerConfig(indexer=Schedule(peak=1.0)),
)
BOTH = OptimizerConfig(main=Schedule(peak=1.0), indexer=Schedule(peak=1.0))


check_mesh = inspect.unwrap(
    RunConfig.check_mesh
)  # without the check that its argument is a real mesh


def changed(cfg, path, value):
    """Replace one field, given by its dotted path."""
    first, _, rest = path.partition(".")
    return replace(cfg, **{first: changed(getattr(cfg, first), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", -1, r"seed=-1 must be in \[0, 2\*\*32\)"),
        ("seed", 2**32, r"seed=4294967296 must be in"),
        ("dense.steps", 0, "steps=0 must be at least 1"),
        ("dense.microbatches", 0, "microbatches=0 must be at least 1"),
        ("dense.microbatches", 3, r"dense.microbatches=3 must divide the batch of 4 rows"),
        ("dense.seq_len", 0, "seq_len=0 must be at least 2"),
        ("dense.batch_size", 0, "batch_size=0 must be at least 1"),
        ("dense.seq_len", 2, "dense seq_len=2 must be at least 3 with MTP"),
        ("model.indexer.topk", 16, "model.indexer.topk=16 must be below the warmup stage's seq_len=16"),
        ("sparse.seq_len", 4, "model.indexer.topk=4 must be below the sparse stage's seq_len=4"),
        ("dense.optimizer", INDEXER, "dense.optimizer.main must be given: the dense stage trains it"),
        ("dense.optimizer", BOTH, "dense.optimizer.indexer must not be given: the dense stage does not train it"),
        ("warmup.optimizer", MAIN, "warmup.optimizer.main must not be given"),
        ("warmup.optimizer", OptimizerConfig(), "warmup.optimizer.indexer must be given"),
        ("sparse.optimizer", MAIN, "sparse.optimizer.indexer must be given"),
        ("sparse.optimizer", INDEXER, "sparse.optimizer.main must be given"),
        ("sparse.loss.kl", 0.0, "kl=0.0 must be positive"),
        ("dense.loss.mtp", 0.0, "mtp=0.0 must be positive, or None to turn it off"),
        ("dense", None, "the run begins with the stage warmup, which needs init_from=DIR"),
    ],
)  # fmt: skip
def test_a_run_whose_fields_do_not_fit_is_refused_in_one_clear_line(tiny_run, path, value, message):
    with pytest.raises(ValueError, match=message) as raised:
        changed(tiny_run, path, value)
    assert "\n" not in str(raised.value)


def test_a_sparse_run_needs_a_run_to_start_from(tiny_run):
    with pytest.raises(ValueError, match="begins with the stage sparse, which needs init_from"):
        replace(tiny_run, dense=None, warmup=None)
    assert replace(tiny_run, dense=None, warmup=None, init_from="x").stages == ("sparse",)


def test_a_run_without_a_stage_is_refused(tiny_run):
    with pytest.raises(ValueError, match="at least one of the stages dense, warmup, sparse"):
        RunConfig(model=tiny_run.model, data=tiny_run.data)


def test_evidence_needs_the_sparse_stage(run_with_evidence):
    with pytest.raises(ValueError, match="evidence is measured after the sparse stage"):
        replace(run_with_evidence, sparse=None)


@pytest.mark.parametrize(
    ("rows", "at_once", "message"),
    [(1, 1, "rows=1 must be at least 2"), (8, 3, "rows_per_batch=3 must divide rows=8"), (8, 0, "rows_per_batch=0")],
)  # fmt: skip
def test_evidence_of_no_use_is_refused(rows, at_once, message):
    with pytest.raises(ValueError, match=message):
        EvidenceConfig(rows=rows, rows_per_batch=at_once, caveat="")


def test_a_short_dense_stage_may_come_before_a_longer_sparse_one(tiny_run):
    cfg = changed(changed(tiny_run, "dense.seq_len", 4), "sparse.batch_size", 8)

    assert (cfg.stage_data("dense").seq_len, cfg.stage_data("sparse").seq_len) == (4, 16)
    assert (cfg.stage_data("dense").batch_size, cfg.stage_data("sparse").batch_size) == (4, 8)


def test_each_stage_has_an_order_of_its_own_whatever_stages_run_with_it(tiny_run):
    alone = replace(tiny_run, dense=None, init_from="x")

    seeds = [tiny_run.stage_data(stage).seed for stage in tiny_run.stages]

    assert len(set(seeds)) == 3
    assert [alone.stage_data(stage).seed for stage in alone.stages] == seeds[1:]


def abstract_mesh(**sizes):
    """Return something with a mesh's shape, of devices that need not exist."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.sharding.AbstractMesh(shape, AXES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 4}, "model.mla.n_heads=2 is not a multiple of the 4 shards of mesh axes tensor"),
        ({"expert": 3}, "model.moe.n_experts=8 is not a multiple of the 3 shards of mesh axes expert"),
        ({"fsdp": 8}, "dense batch_size / microbatches=4 is not a multiple of the 8 shards of mesh axes data, "
            "fsdp, expert"),
        ({"data": 2, "expert": 4}, "dense batch_size / microbatches=4"),
        ({"context": 3}, "dense seq_len=16 is not a multiple of the 3 shards of mesh axes context, tensor"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_is_refused(run_with_evidence, sizes, message):
    with pytest.raises(ValueError, match=message):
        check_mesh(run_with_evidence, abstract_mesh(**sizes))


def test_a_mesh_that_divides_everything_is_taken(run_with_evidence):
    check_mesh(run_with_evidence, abstract_mesh(fsdp=2, expert=2, tensor=2))


def test_microbatches_must_still_fill_the_mesh(tiny_run):
    cfg = changed(tiny_run, "dense.microbatches", 4)

    with pytest.raises(ValueError, match="dense batch_size / microbatches=1"):
        check_mesh(cfg, abstract_mesh(fsdp=2))


def test_a_stage_config_is_its_own(tiny_run):
    assert tiny_run.stage_config("warmup") is tiny_run.warmup
    assert isinstance(tiny_run.stage_config("dense"), StageConfig)
