import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from dsv32_jax import sharding
from dsv32_jax.sharding import MeshConfig

# float32 sums in another order, relative to the largest gradient of the same weight; "gathered" is compared with the
# masked form on one device, whose products differ too
FLOAT32_TOL = 5e-5
HERE = pathlib.Path(__file__).parent
# Each mode once, each axis at least once; everything else is compiled in the slow run.
CASES = [
    ("sparse", {"expert": 2, "tensor": 2, "context": 2}, "travel", "rounds"),
    ("gathered", {"fsdp": 2, "tensor": 2, "context": 2}),
    ("warmup", {"data": 2, "context": 2}),
    ("sparse", {"fsdp": 2, "expert": 2, "tensor": 2}, "untyped"),
    ("sparse", {"fsdp": 2, "expert": 2, "context": 2}, "pieces"),
]
SLOW_CASES = [
    (case, {axis: 2}) for case in ("dense", "sparse", "gathered") for axis in sharding.AXES
] + [
    (case, sizes)
    for case in ("warmup", "sparse", "gathered")
    for sizes in (
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "context": 2},
        {"context": 4},
    )
]
SLOW_CASES += [("sparse", {"expert": 2, "tensor": 2, "context": 2})]
SLOW_CASES += [
    ("sparse", sizes, "travel", *words)
    for sizes, *words in (
        ({"data": 2, "expert": 2, "tensor": 2}, "pieces"),
        ({"data": 2, "expert": 2, "context": 2}, "pieces", "rounds", "untyped"),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, "rounds"),
        ({"expert": 4, "context": 2}, "untyped"),
        ({"expert": 4, "tensor": 2},),
        ({"expert": 4, "fsdp": 1}, "rounds"),
    )
]


def name_of(case):
    stage, sizes, *words = case
    return "-".join([stage, *(f"{axis}{n}" for axis, n in sizes.items()), *words])


def compare_with_one_device(cases):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(HERE / "sharded_gradients.py"), json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # XLA's words for an array that it could only move by giving every device all of it: not the embedding's rows.
    full_copies = [line for line in done.stderr.splitlines() if "Involuntary full remat" in line]
    assert not [line for line in full_copies if "gather(" in line], full_copies
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name_of(case): line for case, line in zip(cases, lines, strict=True)}


def check(result):
    assert result["n"] > 0
    assert result["error"] < FLOAT32_TOL, result["worst"]
    assert result["load"] == 0


@pytest.fixture(scope="module")
def meshes():
    return compare_with_one_device(CASES)


@pytest.mark.parametrize("case", [name_of(case) for case in CASES])
def test_a_mesh_has_the_gradients_of_one_device(meshes, case):
    check(meshes[case])


@pytest.fixture(scope="module")
def slow_meshes():
    return compare_with_one_device(SLOW_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name_of(case) for case in SLOW_CASES])
def test_every_axis_alone_and_combined_has_the_gradients_of_one_device(slow_meshes, case):
    check(slow_meshes[case])


def test_one_device_makes_a_mesh_of_every_axis():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "expert", "tensor", "context")
    assert dict(mesh.shape) == dict.fromkeys(mesh.axis_names, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ici_tensor": 2},
            r"mesh.ici_\* axes \(data=1, fsdp=-1, expert=1, tensor=2, context=1\) do not make the 1 "
            "devices: 2 must divide it",
        ),
        ({"ici_fsdp": 1, "ici_data": 4}, "do not make the 1 devices: 4 must equal it"),
        ({"dcn_data": 2}, r"mesh.dcn_\* axes .* do not make the 1 slices: 2 must equal it"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(MeshConfig(**fields), jax.devices()[:1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ici_data": 0}, "ici_data=0 must be -1 or at least 1"),
        ({"dcn_context": -2}, "dcn_context=-2 must be -1 or at least 1"),
        ({"ici_data": -1}, r"at most one ici axis may be -1, got \['data', 'fsdp'\]"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


def mesh_of(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in sharding.AXES)
    return AbstractMesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * len(shape))


def test_a_dimension_is_cut_along_the_first_of_its_axes_that_divide_it():
    mesh = mesh_of(fsdp=2, context=2, tensor=4)
    tree = {"a": jax.ShapeDtypeStruct((8, 12), jnp.float32)}
    tree["b"] = jax.ShapeDtypeStruct((6, 12), jnp.float32)
    tree["c"] = jax.ShapeDtypeStruct((7, 6), jnp.float32)
    axes = dict.fromkeys(tree, ("embed", "heads"))

    out = sharding.parameter_shardings(mesh, tree, axes)

    assert out["a"].spec == P(("fsdp", "context", "expert"), "tensor")
    assert out["b"].spec == P("fsdp", "tensor")
    assert out["c"].spec == P(None, None)


def test_specs_follow_the_table():
    assert sharding.spec("batch", None, "heads") == P(("data", "fsdp", "expert"), None, ("tensor",))
    assert sharding.spec("batch", "rows") == P(("data", "fsdp", "expert"), ("context", "tensor"))


@pytest.mark.parametrize(
    ("shape", "logical", "expected"),
    [
        ((8, 16), ("batch", "sequence"), P(sharding.BATCH_AXES, ("context",))),
        ((1, 16, 2), ("batch", "sequence", "heads"), P(None, (*sharding.BATCH_AXES, "context"), ("tensor",))),
        ((1, 16), ("batch", "rows"), P(None, (*sharding.BATCH_AXES, "context", "tensor"))),
        ((1, 12), ("batch", "rows"), P(None, None)),  # 16 shards
        ((1, 12), ("batch", None), P(None, None)),
        ((1, 16), ("vocab", None), P(("tensor",), None)),
    ],
)  # fmt: skip
def test_a_batch_of_too_few_rows_has_its_tokens_cut(shape, logical, expected):
    with jax.sharding.use_abstract_mesh(mesh_of(fsdp=2, expert=2, context=2, tensor=2)):
        assert sharding.fitted(shape, *logical) == expected


def test_without_a_mesh_nothing_is_constrained_or_mapped():
    x = jnp.ones(3)
    assert sharding.axis_size("data", "tensor") == 1
    assert sharding.constrain(x, "batch") is x
    assert sharding.shard_map(np.sum, None, None) is np.sum


def test_a_mesh_is_read_off_a_command_line():
    assert sharding.parse_mesh("tensor=4, expert=2") == MeshConfig(
        ici_fsdp=1, ici_tensor=4, ici_expert=2
    )
    assert sharding.parse_mesh("data=-1").ici_data == -1


@pytest.mark.parametrize(
    "text", ["", "tensor", "tensor=", "tensor=x", "heads=2", "tensor=2,tensor=2", "tensor=0"]
)
def test_a_mesh_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"mesh|ici_tensor=0"):
        sharding.parse_mesh(text)
