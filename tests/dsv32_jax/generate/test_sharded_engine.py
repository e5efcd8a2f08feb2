import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
# Pieces of 8 tokens read selected rows, of 16 run as masked attention: one prompt's, whose tokens 4 batch shards cut.
CASES = [({"fsdp": 2, "expert": 2, "tensor": 2}, False, 16)]
SLOW_CASES = [
    ({"fsdp": 2, "expert": 2, "tensor": 2}, False, 8),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, True, 16),
    ({"data": 4}, False, 10),  # which cuts no piece of 10
    ({"tensor": 2}, True, 8),
    ({"expert": 4}, False, 8),
    ({"fsdp": 4}, True, 8),
]


def run(cases):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(HERE.parents[2]),
    }
    command = [sys.executable, str(HERE / "sharded_engine.py"), json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(cases):
    for (sizes, *_), result in zip(cases, run(cases), strict=True):
        assert [len(tokens) for tokens in result["found"]["tokens"]] == [8, 8, 8]
        assert [len(layers[0]) for layers in result["found"]["selections"]] == [11, 25, 18]
        assert result["found"] == result["expected"], sizes
        shards = sizes.get("data", 1) * sizes.get("fsdp", 1) * sizes.get("expert", 1)
        assert result["spread"] == shards, sizes


def test_a_mesh_draws_the_tokens_of_one_device_selects_its_keys_and_spreads_the_cache():
    check(CASES)


@pytest.mark.slow
def test_each_axis_alone_draws_the_tokens_of_one_device():
    check(SLOW_CASES)
