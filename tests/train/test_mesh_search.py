import json
import os
from dataclasses import replace

import pytest

from configs import v32_671b_sparse, v32_671b_warmup
from train import command, mesh_search, step_estimate, topology
from train import compile as pod_compile
from train.mesh_search import Candidate
from train.roofline import Roofline
from train.step_estimate import Estimate


def load(cfg, stage="sparse"):
    return step_estimate.load_of(cfg, stage)


def sizes_of(mesh):
    return tuple(mesh.size("ici", axis) for axis in mesh_search.SEARCHED)


def test_every_layout_of_a_slice_is_listed_once():
    found = [sizes_of(mesh) for mesh in mesh_search.meshes(topology.parse("v5p:2x2x1"))]
    # 4 = 2 x 2 on four axes: 4 ways for one axis, 6 for two
    assert len(found) == len(set(found)) == 10
    assert {(4, 1, 1, 1), (1, 1, 1, 4), (2, 1, 2, 1)} <= set(found)


def test_slices_hold_copies_or_shards_of_the_parameters():
    found = list(mesh_search.meshes(topology.parse("v6e:2x2@3")))
    assert {(mesh.dcn_data, mesh.dcn_fsdp) for mesh in found} == {(3, 1), (1, 3)}
    assert len(found) == 20


@pytest.fixture
def tiny(tiny_run):
    """Four rows of 16 tokens, 2 heads, 8 experts 8 wide."""
    return replace(
        tiny_run, dense=None, warmup=None, init_from="x", sparse=replace(tiny_run.sparse, microbatches=1)
    )  # fmt: skip


def test_meshes_that_do_not_divide_the_run_are_left_out(tiny, chips):
    target = topology.parse("v5p:2x2x2")
    found = mesh_search.search(tiny, load(tiny), target, chips((2, 2, 2)))
    # tensor cuts 2 heads, fsdp x expert 4 rows, and context x tensor 16 tokens: of 20 meshes of 8 devices
    expected = {(1, 1, 1, 8), (1, 1, 2, 4), (1, 2, 1, 4), (2, 1, 1, 4), (1, 2, 2, 2), (2, 1, 2, 2),
                (2, 2, 1, 2), (1, 4, 1, 2), (4, 1, 1, 2), (2, 2, 2, 1), (1, 4, 2, 1), (4, 1, 2, 1)}  # fmt: skip
    assert {sizes_of(one.mesh) for one in found} == expected
    assert len(found) == len(expected)
    for one in found:
        batch_shards = one.mesh.ici_fsdp * one.mesh.ici_expert
        assert 4 // one.microbatches % batch_shards == 0


def test_what_fits_comes_first_by_time_then_the_rest_by_memory(tiny, chips, monkeypatch):
    def estimate(model, load, mesh, chip):
        peak = chip.hbm_bytes * (0.85 if mesh.shape["context"] < 4 else 0.9 + mesh.shape["context"])
        return Estimate(0, 0, peak, Roofline(mesh.shape["expert"], mesh.shape["fsdp"], 0.0))

    monkeypatch.setattr(step_estimate, "estimate", estimate)
    found = mesh_search.search(tiny, load(tiny), topology.parse("v5p:2x2x2"), chips((2, 2, 2)))
    assert sum(one.fits for one in found) == 8
    times = [one.estimate.times.serial_s for one in found[:8]]
    assert times == sorted(times)
    assert [one.mesh.ici_context for one in found[8:]] == [4, 4, 4, 8]


def test_each_mesh_gets_the_microbatches_that_are_fastest_among_those_that_fit(tiny, chips, monkeypatch):  # fmt: skip
    def estimate(model, load, mesh, chip):
        parts = load.microbatches
        return Estimate(0, 0, chip.hbm_bytes * 1.5 / parts, Roofline(parts, 0.0, 0.0))

    monkeypatch.setattr(step_estimate, "estimate", estimate)
    found = mesh_search.search(tiny, load(tiny), topology.parse("v5p:2x2x2"), chips((2, 2, 2)))
    best = {sizes_of(one.mesh): one.microbatches for one in found}
    assert best[1, 1, 1, 8] == 2  # of 1, 2 and 4: one does not fit, four are slower
    assert best[4, 1, 2, 1] == 1  # four rows at once, and no choice


def test_the_released_models_warm_up_fits_a_pod_that_its_sparse_training_does_not(chips):
    target, devices = topology.parse("v5p:4x4x4"), chips((4, 4, 4))
    cfg = v32_671b_sparse.get_config()
    short = replace(cfg, sparse=replace(cfg.sparse, seq_len=4096, batch_size=64, microbatches=1))
    sparse = mesh_search.search(short, load(short), target, devices)
    assert sparse
    assert not any(one.fits for one in sparse)
    warmup = v32_671b_warmup.get_config()
    assert mesh_search.search(warmup, load(warmup, "warmup"), target, devices)[0].fits


def test_the_table_names_the_settings_of_the_best(tiny):
    target = topology.parse("v6e:2x2@2")
    mesh = next(m for m in mesh_search.meshes(target) if m.dcn_fsdp == 2 and m.ici_expert == 4)
    best = Candidate(mesh, 2, Estimate(2**30, 0, 2**31, Roofline(1.0, 2.0, 1.0)), 0.5)
    text = mesh_search.table(load(tiny), target, [best])
    settings = (
        "mesh.ici_fsdp=1 mesh.ici_expert=4 mesh.ici_tensor=1 mesh.ici_context=1 mesh.dcn_fsdp=2"
    )
    assert text.splitlines()[-1].strip() == f"{settings} sparse.microbatches=2"
    # 64 tokens in 4 s on 8 chips
    assert text.splitlines()[2].split()[-5:] == ["1", "2", "1", "4", "2"]
    assert "1 legal meshes, 1 leave 10%" in text
    assert "none: 8 devices must divide" in mesh_search.table(load(tiny), target, [])


def run(arguments, monkeypatch, tmp_path, tiny, devices):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(topology, "describe", lambda target: devices)
    monkeypatch.setattr(command.config_file, "load_config", lambda name: tiny)
    return command.run_command(
        pod_compile._run, ["--config", "tiny", "--workdir", "out", "--search", *arguments],
        about=pod_compile.ABOUT, add_options=pod_compile._add_options,
    )  # fmt: skip


def test_the_command_prints_and_saves_the_ranking(monkeypatch, tmp_path, tiny, chips, capsys):
    arguments = ["--topology", "v5p:2x2x2"]
    assert run(arguments, monkeypatch, tmp_path, tiny, chips((2, 2, 2))) == 0
    found = json.loads((tmp_path / "out" / "meshes.json").read_text())["sparse"]
    assert len(found) == 12
    assert found[0]["free"] > 0.99
    assert found[0]["peak_bytes"] > found[0]["arguments_bytes"] > 0
    out = capsys.readouterr().out
    assert "12 legal meshes" in out
    assert (tmp_path / "out" / "report.txt").read_text() in out


def test_meshes_are_ranked_for_grpo_with_its_own_options(monkeypatch, tmp_path, tiny, chips, capsys):  # fmt: skip
    arguments = ["--topology", "v5p:2x2x2", "--steps", "grpo", "--grpo-rows", "8", "--grpo-row-length", "16",
                 "--grpo-response-tokens", "4"]  # fmt: skip
    assert run(arguments, monkeypatch, tmp_path, tiny, chips((2, 2, 2))) == 0
    found = json.loads((tmp_path / "out" / "meshes.json").read_text())["grpo"]
    # tensor cuts 2 heads and fsdp x expert 8 rows; of 20 meshes of 8 devices those with tensor 4 or 8 are left out
    assert len(found) == 16
    out = capsys.readouterr().out
    assert "grpo on v5p:2x2x2, 8 rows of 16 tokens: 16 legal meshes" in out
    assert f"--grpo-microbatches {found[0]['microbatches']} mesh.ici_fsdp=" in out


def test_no_mesh_that_fits_is_status_1_and_decode_2(monkeypatch, tmp_path, tiny, chips, capsys):  # fmt: skip
    odd = replace(tiny, data=replace(tiny.data, batch_size=3, seq_len=15))
    assert run(["--topology", "v5p:2x2x2"], monkeypatch, tmp_path, odd, chips((2, 2, 2))) == 1
    arguments = ["--topology", "v5p:2x2x2", "--steps", "decode"]
    assert run(arguments, monkeypatch, tmp_path, tiny, chips((2, 2, 2))) == 2
    assert "--search ranks meshes for sparse, grpo, and not for decode" in capsys.readouterr().err
