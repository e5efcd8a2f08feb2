"""A step of the learner in two processes, each of which holds its own rows of every microbatch, is a step in one.

Run by itself with three arguments, a port, how many processes and which, this file does the work of one process.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
RTOL = 2e-4  # float32 sums over devices in another order
# (prompt, response) tokens of the two rollouts of row 0 and of row 1 of each of two microbatches: row 1's are more and
# longer, so that a process of its own would take larger arrays.
LENGTHS = [[[(3, 2)], [(2, 6), (3, 9), (1, 5)]], [[(4, 3)], [(5, 11), (2, 7)]]]
ROW = 32


def draw(cfg, number, n_prompt, n_drawn):
    """Make up a rollout, the same wherever it is asked for."""
    from train.rl.rollout import KeptSets, Rollout

    rng = np.random.default_rng(number)
    tokens = rng.integers(0, cfg.vocab_size - 1, size=n_prompt + n_drawn, dtype=np.int32)
    experts = np.stack([rng.permutation(8)[:2] for _ in tokens])[None].astype(np.int32)
    pairs = np.stack([tokens[n_prompt:], tokens[n_prompt:] + 1], axis=1)
    return Rollout(
        tokens=tokens, n_prompt=n_prompt, log_p=-rng.uniform(size=n_drawn).astype(np.float32),
        kept=KeptSets(pairs.ravel(), 2 * np.arange(1, n_drawn + 1)), experts=experts, temperature=1.0,
        reason="stop", version=0,
    )  # fmt: skip


def step(mesh, own_rows):
    """Take a step from a drawn model; return the sums and the norm, as numbers."""
    from dsv32_jax import parameters
    from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
    from train import state as states
    from train.optimizer import AdamConfig, Rates, make_optimizer
    from train.rl import learner, packing
    from train.rl.learner import Targets, Work
    from train.rl.objective import ObjectiveConfig

    cfg = ModelConfig(
        vocab_size=24, dim=16, n_layers=1, n_dense_layers=0, ffn_dim=16, mtp=False, init_std=0.2,
        mla=MLAConfig(n_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_dim=4, rope_dim=4, v_dim=4),
        indexer=IndexerConfig(n_heads=2, head_dim=8, topk=4),
        moe=MoEConfig(n_experts=8, n_active=2, n_groups=2, n_active_groups=1, expert_dim=8),
    )  # fmt: skip
    rollouts, rows = [], []
    for micro, lengths_of_rows in enumerate(LENGTHS):
        for row in own_rows:
            first = len(rollouts)
            numbers = enumerate(lengths_of_rows[row])
            rollouts += [draw(cfg, 100 * micro + 10 * row + i, *n) for i, n in numbers]
            rows.append(list(range(first, len(rollouts))))
    with jax.set_mesh(mesh):
        packed = packing.pack(rollouts, rows, n_rows=len(rows), row_length=ROW)
        packed = packing.stack(packed, 2)
        told = [np.asarray([scale * r.n_drawn for r in rollouts]) for scale in (0.3, 0.05, 1.0)]
        told = [learner.place_by_rollout(x, packed) for x in told]
        told = [packing.place_by_axes(x, 2, None, "batch", None) for x in told]
        packed = packing.on_mesh(packed, 2)
        assert len(packed.tokens.addressable_shards) == jax.local_device_count()
        adam = AdamConfig()
        layout = states.shardings(cfg, make_optimizer(adam), "rl", mesh)
        state = states.create(
            parameters.initialise(cfg, 0, mesh), make_optimizer(adam), "rl", layout
        )
        reference = parameters.initialise(cfg, 1, mesh)
        objective = ObjectiveConfig(kl_strength=0.1, off_policy_delta=None)
        work = Work(packed, Targets(packed.log_p, None, *told), np.int32(2))
        rates = Rates(np.float32(1e-3), np.float32(0))
        run = learner.make_step(cfg, objective, adam)
        _, sums, norm = run(state, reference, work, rates)
    return [float(x) for x in jax.tree.leaves((sums, norm.whole))]


def test_two_processes_with_parts_of_the_rows_step_as_one_with_all(mesh, compilation_cache):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": compilation_cache,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(port), "2", str(i)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    expected = step(mesh, (0, 1))

    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert json.loads(out.splitlines()[-1]) == pytest.approx(expected, rel=RTOL, abs=1e-5)
    assert expected[-1] > 0


if __name__ == "__main__":
    from dsv32_jax import sharding
    from dsv32_jax.sharding import MeshConfig

    PORT, N, PROCESS = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{PORT}", int(N), int(PROCESS))
    # Rows lie over the processes, tokens over the devices of each.
    two_by_two = sharding.make_mesh(MeshConfig(ici_fsdp=2, ici_context=2))
    sys.stdout.write(json.dumps(step(two_by_two, (int(PROCESS),))) + "\n")
