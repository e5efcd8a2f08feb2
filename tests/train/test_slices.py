"""Between slices of a pod only gradients travel, summed within each slice before: shown in a compiled step's text."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILE_TEST = ROOT / "tests" / "train" / "test_compile.py"
IN_A_SLICE = 4  # devices, of each of two slices
MEGASCALE = r'_xla_(megascale_\w+|host_transfer_handler_name)="([^"]*)"'


def compile_and_tell(mesh):
    """Print what a training step of test_compile's small run sends, as JSON; run in a process of its own."""
    import jax

    from dsv32_jax import sharding
    from train import collectives, hlo, pod_steps, topology

    namespace = {}
    exec(runpy.run_path(str(COMPILE_TEST))["CONFIG"], namespace)
    cfg = namespace["get_config"]()
    cfg = dataclasses.replace(
        cfg,
        mesh=sharding.MeshConfig(**mesh),
        data=dataclasses.replace(cfg.data, batch_size=8),
        model=dataclasses.replace(cfg.model, kernels="reference"),
    )
    devices = topology.describe(topology.parse("v6e:2x2@2"))
    mesh = sharding.make_mesh(cfg.mesh, devices)
    step = pod_steps.build("sparse", cfg, mesh, pod_steps.ServingShape())
    with jax.set_mesh(mesh):
        lowered = step.jitted.trace(*step.arguments).lower()
    program = hlo.parse(lowered.compile().as_text())
    slices = [device.slice_index for device in mesh.devices.flat]
    found = [
        {
            "kind": one.kind,
            "slices": len({slices[place] for place in one.group}),
            "bytes": one.bytes,
        }
        for one in collectives.find(program)
    ]
    # What travels between slices is handed to the host, which brings it over the data-centre network.
    sends = []
    for instruction, times in program.runs():
        if instruction.opcode == "send":
            _, dims, _ = instruction.arrays[0]
            named = re.findall(MEGASCALE, instruction.attributes)
            sends.append(dict(named) | {"elements": times * math.prod(map(int, dims.split(",")))})
    sys.stdout.write(json.dumps({"collectives": found, "sends": sends}) + "\n")


def told(**mesh):
    script = f"import runpy; runpy.run_path({__file__!r})['compile_and_tell']({mesh!r})"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def parameter_count():
    return runpy.run_path(str(COMPILE_TEST))["parameter_count"]()


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


@pytest.mark.tpu_aot
@needs_libtpu
def test_slices_exchange_shards_of_gradients_and_nothing_else():
    step = told(dcn_data=2, ici_fsdp=2, ici_expert=2)

    assert {one["slices"] for one in step["collectives"]} == {1}
    assert any(one["kind"] == "reduce-scatter" for one in step["collectives"])
    sends = step["sends"]
    assert {send["host_transfer_handler_name"] for send in sends} == {"xla_megascale_runtime"}
    assert {send["megascale_transfer_type"] for send in sends} == {"ALL_REDUCE"}
    assert {send["megascale_reduce_operation"] for send in sends} == {"SUM"}
    # Every gradient once, a quarter on each device: what a slice's devices had, they have summed before. The rest is
    # norms, metrics and padding.
    assert sum(send["elements"] for send in sends) == pytest.approx(
        parameter_count() / IN_A_SLICE, rel=0.05
    )


@pytest.mark.tpu_aot
@needs_libtpu
def test_parameters_cut_across_slices_would_be_gathered_between_them():
    """What the test above would see if something else than gradients travelled."""
    step = told(dcn_fsdp=2, ici_fsdp=2, ici_expert=2)

    kinds = {send["megascale_transfer_type"] for send in step["sends"]}
    assert kinds - {"ALL_REDUCE"}
