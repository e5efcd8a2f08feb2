import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train import command, pod_report
from train import compile as pod_compile
from train.collectives import Collective
from train.pod_report import StepReport
from train.roofline import Roofline

ROOT = Path(__file__).parents[2]
# Whole tiles, as the released model has: libtpu's compiler does not survive some of the widths of cpu_1m.
CONFIG = """
from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from dsv32_jax.sharding import MeshConfig
from train.data.config import DataConfig
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import RunConfig, StageConfig

def get_config():
    model = ModelConfig(
        vocab_size=512, dim=256, n_layers=2, n_dense_layers=1, ffn_dim=512, mtp=False,
        mla=MLAConfig(n_heads=4, q_lora_rank=128, kv_lora_rank=128, nope_dim=128, rope_dim=64, v_dim=128),
        indexer=IndexerConfig(n_heads=4, head_dim=128, topk=128),
        moe=MoEConfig(n_experts=8, n_active=2, n_groups=2, n_active_groups=1, expert_dim=256),
        dtype="bfloat16", remat="full",
    )
    rate = Schedule(peak=1e-4)
    return RunConfig(
        model=model, data=DataConfig(seq_len=384, batch_size=4, seed=0), init_from="somewhere",
        mesh=MeshConfig(ici_fsdp=2, ici_expert=2),
        sparse=StageConfig(steps=1, optimizer=OptimizerConfig(main=rate, indexer=rate)),
    )
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "pod.py"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v5p:8x8"], "a slice of v5p has 3 dimensions"),
        (["--topology", "v5p:2x2x1", "--steps", "sparse,ppo"], "step 'ppo' must be one of sparse, grpo,"),
        (["--topology", "v5p:2x2x1", "--slots", "0"], "slots=0 must be at least 1"),
        ([], "--topology"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(arguments, said, config_file, capsys, monkeypatch, tmp_path):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    status = command.run_command(
        pod_compile._run,
        ["--config", str(config_file), *arguments],
        about=pod_compile.ABOUT,
        add_options=pod_compile._add_options,
    )
    err = capsys.readouterr().err
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.tpu_aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_small_run_compiles_for_a_pod_and_fits(config_file, tmp_path, kernels):
    run = subprocess.run(
        [sys.executable, "-m", "train.compile", "--config", str(config_file), "--topology", "v5p:2x2x1",
         "--workdir", str(tmp_path / "out"), f"model.kernels={kernels}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    figures = json.loads((tmp_path / "out" / "summary.json").read_text())
    report = json.loads((tmp_path / "out" / "steps.json").read_text())["sparse"]
    assert figures["sparse/status"] == "fits"
    assert 0 < figures["sparse/arguments_gib"] < figures["sparse/peak_gib"] < figures["sparse/limit_gib"]  # fmt: skip
    # float32 parameters and two moments of what trains, over the devices; router bias and batch are small
    assert report["arguments_bytes"] == pytest.approx(12 * parameter_count() / 4, rel=0.05)
    assert report["executed_flops"] > report["model_flops"] > 0
    assert {"all-gather", "reduce-scatter"} <= report["collectives"].keys()
    assert report["live_bytes"] == pytest.approx(report["peak_bytes"] - report["arguments_bytes"], rel=0.5)  # fmt: skip
    # The masked form's selection, one byte a pair; everything else is cut into blocks of queries. Those of the loss on
    # kernels are larger than this small run's square.
    square = [found for found in report["findings"] if "pred[" not in found and "s8[" not in found]
    assert not square or kernels == "auto"
    assert "smallest pod v5p:2x2x1" in run.stdout


INDEXERS = 2 * (128 * 4 * 128 + 256 * 128 + 256 * 4)


def parameter_count():
    """Count by hand from the sizes in CONFIG."""
    attention = 256 * 128 + 128 * 4 * 192 + 256 * 192 + 128 * 4 * 256 + 4 * 128 * 256
    dense, experts = 3 * 256 * 512, 9 * 3 * 256 * 256 + 256 * 8
    return 2 * attention + INDEXERS + dense + experts + 2 * 512 * 256


@pytest.mark.tpu_aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("kept", [0, 1000])
def test_grpos_update_compiles_for_a_pod_and_fits(config_file, tmp_path, kept):
    run = subprocess.run(
        [sys.executable, "-m", "train.compile", "--config", str(config_file), "--topology", "v5p:2x2x1",
         "--workdir", str(tmp_path / "out"), "--steps", "grpo", "--grpo-rows", "8", "--grpo-row-length", "384",
         "--grpo-microbatches", "2", "--grpo-responses", "2", "--grpo-response-tokens", "128",
         "--grpo-kept-tokens", str(kept)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads((tmp_path / "out" / "steps.json").read_text())["grpo"]
    # float32 policy and reference, and two moments of all but the indexers
    whole = 4 * 2 * parameter_count() + 8 * (parameter_count() - INDEXERS)
    assert report["arguments_bytes"] == pytest.approx(whole / 4, rel=0.05)
    assert report["tokens"] == 8 * 384
    assert report["executed_flops"] > report["model_flops"] > 0
    # Each of two microbatches reduces the gradients of its layers.
    assert report["collectives"]["reduce-scatter"]["runs"] >= 2


def report(**changes):
    values = {"step": "sparse", "topology": "v5p:2x2x1", "mesh": {"fsdp": 4}}
    values |= {"limit_bytes": 100.0} | changes
    return StepReport(**values)


def test_the_exit_status_follows_what_fits(monkeypatch, tmp_path, config_file, mesh):
    from train import config_file as config_files
    from train import topology

    cfg = config_files.load_config(str(config_file))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(topology, "describe", lambda target: [])
    monkeypatch.setattr(pod_compile.sharding, "make_mesh", lambda cfg, devices: mesh)
    for status, expected in (("fits", 0), ("tight", 0), ("does not fit", 1), ("not compiled", 1)):
        monkeypatch.setattr(
            pod_compile, "_in_a_process", lambda *a, s=status: report(status=s, peak_bytes=50)
        )
        found = pod_compile.main(
            cfg, tmp_path, topology_name="v5p:2x2x1", steps=None, shapes=pod_compile.Shapes()
        )
        assert found == expected
    assert json.loads((tmp_path / "summary.json").read_text())["sparse/status"] == "not compiled"


def test_a_compiler_that_ends_its_process_is_reported(monkeypatch, tmp_path, config_file):
    from train import config_file as config_files
    from train import topology

    monkeypatch.setattr(
        pod_compile, "_compile_and_send", os._exit
    )  # of a Connection: it ends at once
    target = topology.parse("v5p:2x2x1")
    found = pod_compile._in_a_process(
        config_files.load_config(str(config_file)),
        target, "sparse", pod_compile.Shapes(), tmp_path / "sparse.log",
    )  # fmt: skip
    assert found.status == "not compiled"
    assert "the compiler's process ended" in found.message
    assert "sparse.log" in found.message


@pytest.mark.parametrize(
    ("names", "sizes", "said"),
    [
        (["decode"], {"fsdp": 8}, "slots=12 is not a multiple of the 8 shards"),
        (["prefill"], {"expert": 8}, "slots=12 is not a multiple of the 8 shards"),
        (["grpo"], {"fsdp": 8}, "grpo rows / microbatches=4 is not a multiple of the 8 shards"),
        (["grpo"], {"context": 8}, "grpo tokens of a row=100 is not a multiple of the 8 shards"),
        (["sparse"], {"fsdp": 8}, "sparse batch_size / microbatches=4 is not a multiple of the 8"),
        (["grpo"], {"tensor": 8}, "model.mla.n_heads=4 is not a multiple of the 8 shards"),
        (["decode"], {"expert": 3}, "model.moe.n_experts=8 is not a multiple of the 3 shards"),
    ],
)
def test_a_mesh_that_does_not_divide_what_a_step_cuts_is_refused(
    names, sizes, said, config_file, torus
):
    from train import config_file as config_files
    from train.pod_steps import GrpoShape, ServingShape

    grpo = GrpoShape(rows=8, microbatches=2, row_length=100, response_tokens=8)
    shapes = pod_compile.Shapes(ServingShape(slots=12), grpo)
    shape = (3, 1, 1) if 3 in sizes.values() else (2, 2, 2)
    with pytest.raises(ValueError, match=said):
        pod_compile._check_mesh(
            config_files.load_config(str(config_file)), names, shapes, torus(shape, **sizes)
        )


HANGS = """
import signal
import sys
import time
from pathlib import Path
from dsv32_jax import command_line
from train import compile as pod_compile
from train import topology

def hang(*arguments):
    Path(sys.argv[1]).write_text("there")
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs behind a shell
    pod_compile._compile_and_send = hang
    target = topology.parse("v5p:2x2x1")
    with command_line.Boundary() as boundary:
        pod_compile._in_a_process(None, target, "sparse", pod_compile.Shapes(), Path("log"))
    sys.exit(boundary.status)
"""


def test_ctrl_c_ends_the_compiling_process_too_and_is_one_line(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "hangs.py"), str(tmp_path / "there")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "there").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130


def test_the_smallest_pod_spreads_arguments_and_gradients_and_keeps_the_rest():
    from train import topology

    target = topology.parse("v5p:4x4x8")  # 128 chips; 10 bytes of arguments and 40 of the rest
    found = report(status="fits", arguments_bytes=10, peak_bytes=50)
    # 64 chips: 20 + 40 <= 90; 32 chips: 40 + 40 <= 90; 16 chips: 80 + 40 > 90
    assert pod_report.smallest_pod(found, target, topology.smaller(target)) == "v5p:2x4x4"
    # the same with 5 bytes of gradients: 64 chips: 30 + 35 <= 90; 32 chips: 60 + 35 > 90
    trained = report(status="fits", arguments_bytes=10, gradient_bytes=5.0, peak_bytes=50)
    assert pod_report.smallest_pod(trained, target, topology.smaller(target)) == "v5p:4x4x4"
    full = report(status="tight", arguments_bytes=55, peak_bytes=95)
    assert pod_report.smallest_pod(full, target, topology.smaller(target)) == ""


def test_the_compilers_refusal_is_read():
    message = "total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G)."
    assert pod_report.bytes_asked_for(message) == round(20.5 * 2**30)
    assert pod_report.bytes_asked_for("something else") == 0


def test_the_text_says_what_does_not_fit_and_what_to_try():
    from train import topology

    lacking = report(
        status="does not fit", peak_bytes=120, arguments_bytes=60, model_flops=1.0,
        times=Roofline(1.0, 2.0, 3.0), tokens=8,
        collectives={"all-gather": {"count": 1, "runs": 58, "bytes": 2**30}},
    )  # fmt: skip
    text = pod_report.text(lacking, topology.parse("v5p:2x2x1"), "")
    assert "does not fit" in text
    assert "-20% free" in text
    assert "58 runs" in text
    assert "mesh.ici_fsdp" in text
    assert "sparse.microbatches" in text
    assert "3 s if all overlaps" in text
    assert "6 s if nothing does" in text


@pytest.mark.parametrize(
    ("step", "expected"),
    [("grpo", "--grpo-microbatches N"), ("warmup", "warmup.microbatches=N"), ("decode", "--slots")],
)
def test_what_to_try_are_the_settings_of_that_step(step, expected):
    found = pod_report.suggestions(report(step=step, status="tight", peak_bytes=95))
    assert found[0].startswith(expected)
    others = {"--grpo-microbatches", "warmup.microbatches", "--slots"} - {
        expected.split("=")[0].split()[0]
    }
    assert not any(other in line for other in others for line in found)


def test_lines_are_added_up_by_source_and_kind():
    parts = [("a.py:1", 5, "all-gather f32[4]", 2), ("a.py:1", 3, "all-gather f32[2]", 1)]
    parts.append(("a.py:1", 9, "all-reduce f32[9]", 1))
    found = pod_report._lines(parts, by_kind=True)
    assert [(line.bytes, line.what, line.count) for line in found] == [
        (9, "all-reduce f32[9]", 1),
        (8, "all-gather f32[4]", 3),
    ]


def test_a_gather_of_every_layers_weights_is_found():
    def gather(shape, kind="all-gather"):
        return Collective(kind, 1, 1, (0, 1), None, shape)

    found = [gather("bf16[58,7168,1536]"), gather("bf16[1,7168,1536]"), gather("bf16[58]")]
    found.append(gather("f32[58,224,2048]", "reduce-scatter"))
    lines = pod_report.stack_gathers(found, 58)
    assert lines == ["a gather of all layers at once, bf16[58,7168,1536]"]
    assert pod_report.stack_gathers([gather("bf16[1,7168,1536]")], 1) == []


def test_a_buffer_of_queries_by_keys_is_found_and_one_in_blocks_is_not():
    from train import hlo

    def line(dims):
        return (
            f"ENTRY %main (x: f32[1]) -> f32[1] {{\n"
            f"  ROOT %x = f32[{dims}]{{1,0:T(8,128)}} parameter(0)\n}}\n"
        )

    found = pod_report.square_buffers(hlo.parse(line("512,8192")), 8192, 512)
    assert len(found) == 1
    assert "f32[512,8192]" in found[0]
    assert pod_report.square_buffers(hlo.parse(line("128,8192")), 8192, 512) == []
    assert pod_report.square_buffers(hlo.parse(line("8192,8192")), 8192, 8192) != []
    assert pod_report.square_buffers(hlo.parse(line("4,128,8192")), 8192, 512) != []
    # tokens by 64 heads of 128 dims
    assert pod_report.square_buffers(hlo.parse(line("8192,64,128")), 8192, 8192) == []
    assert pod_report.square_buffers(hlo.parse(line("8192,4")), 8192, 8192) == []
