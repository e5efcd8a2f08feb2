import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import config, expert_travel, gate, sharding

HERE = pathlib.Path(__file__).parent
FLOAT32_TOL = 1e-6  # sums of about a hundred products in another order
BFLOAT16_TOL = 2e-2  # two roundings of 2^-8, at another place in the gate's product
CASES = {
    "even": {"kind": "even"},
    "even, by the ragged definition": {"kind": "even", "ragged": True},
    "groups, bfloat16": {"kind": "groups", "dtype": "bfloat16"},
    "all tokens on one device": {"kind": "one device"},
    "one sender, little room": {"kind": "one sender", "slack": 0.25, "ragged": True},
    "three devices": {"kind": "even", "devices": 3, "experts": 15},
    "five devices, by the ragged definition": {"kind": "even", "devices": 5, "experts": 15, "ragged": True},
    "one token a device": {"kind": "even", "tokens": 1},
    "one token on one of seven devices": {"kind": "even", "devices": 7, "experts": 14, "tokens": 1, "ragged": True},
    "experts that nobody chose": {"kind": "nowhere"},
}  # fmt: skip


EIGHT_CPUS = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}


def run(cases, environment):
    env = os.environ | environment | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "travelling_experts.py"), json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def results():
    lines = run(list(CASES.values()), EIGHT_CPUS)
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_travelling_tokens_have_the_outputs_of_one_device_to_the_bit_and_its_gradients(
    results, name
):
    found = results[name]
    tolerance = BFLOAT16_TOL if "bfloat16" in name else FLOAT32_TOL
    assert found["out"] == 0
    assert max(found[a] for a in ("x", "gates", "w1", "w3", "w2")) < tolerance


def test_a_token_goes_once_to_each_device_that_holds_one_of_its_experts(results):
    for found in results.values():
        assert found["rows"] == found["places"]
    # 8 devices, 4 choices in 2 groups of one device each
    assert results["groups, bfloat16"]["most"] == results["groups, bfloat16"]["reach"] == 2
    assert results["groups, bfloat16"]["rows"] == 2 * 8 * 24


def test_what_one_round_does_not_hold_comes_in_the_next(results):
    assert results["even"]["rounds"] == 1
    # Four choices of each of 8 x 24 tokens in two devices' queues, 384 in each; 1.5 x 24 x 4 are taken at a time.
    assert results["all tokens on one device"]["rounds"] == 3
    # Two choices of 7 x 24 tokens on each of two devices, 24 taken at a time.
    assert results["one sender, little room"]["rounds"] == 14


def test_a_ragged_and_a_padded_exchange_give_the_same_bits(results):
    plain, ragged = results["even"], results["even, by the ragged definition"]
    assert plain["digest"] == ragged["digest"]


@pytest.mark.gpu
def test_two_gpus_exchange_by_the_real_primitive_as_by_the_padded_one():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = {"kind": "even", "devices": 2, "dtype": "bfloat16", "slack": 0.7}
    plain, ragged = run([case, case | {"ragged": True}], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    assert ragged["digest"] == plain["digest"]
    assert ragged["rounds"] > 1
    assert ragged["x"] < BFLOAT16_TOL


@pytest.mark.parametrize(
    ("n_devices", "expected"),
    [
        (1, 1),
        (2, 2),
        (4, 4),
        (8, 4),  # a group a device, 4 groups
        (16, 8),  # two devices a group
        (64, 8),  # 32 devices in 4 groups, but 8 choices
    ],
)
def test_groups_limit_the_devices_of_a_token(rng, n_devices, expected):
    moe = config.v32_671b().moe
    assert expert_travel.reach(moe, n_devices) == expected
    scores = jnp.asarray(rng.uniform(size=(1, 300, 256)), jnp.float32)
    devices = np.asarray(gate.select_experts(scores, moe))[0] // (256 // n_devices)
    assert max(len(set(row)) for row in devices.tolist()) <= expected
    if n_devices >= 8:  # and to the neighbours that hold the groups
        parts = devices // (n_devices // 8)
        assert max(len(set(row)) for row in parts.tolist()) == 4


def test_groups_that_devices_cut_across_are_counted_where_they_lie():
    moe = config.MoEConfig(
        n_experts=24, n_active=6, n_groups=4, n_active_groups=1, expert_dim=8
    )  # groups of 6, devices of 4: experts 0-5 lie on devices 0 and 1
    assert expert_travel.reach(moe, 6) == 2


@pytest.mark.tpu_aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("axes", [{"ici_expert": 16}, {"ici_expert": 16, "ici_context": 32}])
def test_a_group_lies_on_neighbouring_chips_of_a_pod(axes):
    from train import topology

    pod = topology.describe(topology.parse("v5p:8x8x8"))
    mesh = sharding.make_mesh(sharding.MeshConfig(**axes), pod)
    line = np.moveaxis(mesh.devices, mesh.axis_names.index("expert"), 0).reshape(16, -1)
    for first, second in zip(line[::2].flat, line[1::2].flat, strict=True):
        steps = [abs(a - b) for a, b in zip(first.coords, second.coords, strict=True)]
        assert sum(min(step, 8 - step) for step in steps) == 1
