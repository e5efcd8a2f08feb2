"""The default run of reinforcement learning over two devices, made small enough for seconds."""

import dataclasses

from configs import grpo as default
from dsv32_jax import config
from dsv32_jax.sharding import MeshConfig
from train.metrics import MetricsConfig
from train.rl.problems import Family
from train.rl.run_config import GrpoConfig
from train.rl.task_source import TaskConfig


def get_config() -> GrpoConfig:
    """Return the run."""
    base = default.get_config()
    assert base.cold_start is not None
    short = {
        name: dataclasses.replace(getattr(base.cold_start, name), steps=1)
        for name in ("dense", "warmup", "sparse")
    }
    cold = dataclasses.replace(base.cold_start, examples=40, seq_len=128, batch_size=4, **short)
    rollouts = dataclasses.replace(
        base.rl.rollouts, prompts=2, group_size=2, max_prompt_tokens=96, max_tokens=6, slots=4
    )
    rl = dataclasses.replace(
        base.rl,
        steps=2,
        rollouts=rollouts,
        learner=dataclasses.replace(base.rl.learner, rows=2, row_length=128),
        gate=dataclasses.replace(base.rl.gate, prompts=2),
        evaluate_every=2,
        evaluate_tasks=3,
    )
    return dataclasses.replace(
        base,
        model=dataclasses.replace(config.tiny(), vocab_size=264, mtp=False),
        tasks=TaskConfig(
            families=(Family(name="chain_sum", settings=(("max_terms", 2),)),), held_out=4
        ),
        cold_start=cold,
        rl=rl,
        rewards=dataclasses.replace(base.rewards, workers=1),
        metrics=MetricsConfig(tensorboard=False),
        mesh=MeshConfig(ici_fsdp=2),
    )
