"""Reinforcement learning at GPU size: the default run with 100M parameters, harder tasks and more of them.

Command: python -m train.grpo --config grpo_gpu.py
Hardware: one GPU of 80 GB or more.
"""

from dataclasses import replace

from configs import grpo
from dsv32_jax import config
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl.problems import Family
from train.rl.run_config import ColdStartConfig, GrpoConfig
from train.rl.settings import GateConfig
from train.rl.task_source import TaskConfig
from train.run_config import StageConfig

FAMILIES = (
    Family(name="chain_sum", settings=(("max_terms", 4), ("max_digits", 2))),
    Family(name="products", settings=(("max_digits", 2),)),
    Family(name="spell_backward"),
    Family(name="letter_counting", settings=(("max_words", 6),)),
    Family(name="gcd", settings=(("max_value", 100),)),
    Family(name="count_bits", settings=(("max_n", 1000),)),
)
DENSE_STEPS, WARMUP_STEPS, SPARSE_STEPS = 1500, 100, 200


def get_config() -> GrpoConfig:
    """Return the run."""
    base = grpo.get_config()
    return replace(
        base,
        model=replace(config.gpu_100m(), mtp=False),
        tasks=TaskConfig(families=FAMILIES, held_out=64),
        cold_start=ColdStartConfig(
            examples=40_000,
            seq_len=1024,
            batch_size=32,
            dense=StageConfig(
                steps=DENSE_STEPS,
                optimizer=OptimizerConfig(main=Schedule(peak=1e-3, warmup_steps=100)),
            ),
            warmup=StageConfig(
                steps=WARMUP_STEPS,
                optimizer=OptimizerConfig(indexer=Schedule(peak=3e-3, warmup_steps=10)),
            ),
            sparse=StageConfig(
                steps=SPARSE_STEPS,
                optimizer=OptimizerConfig(
                    main=Schedule(peak=3e-4, warmup_steps=10),
                    indexer=Schedule(peak=1e-3, warmup_steps=10),
                ),
            ),
        ),
        rl=replace(
            base.rl,
            steps=300,
            rollouts=replace(
                base.rl.rollouts, prompts=64, group_size=16, max_prompt_tokens=256, slots=512
            ),
            learner=replace(
                base.rl.learner,
                optimizer=OptimizerConfig(
                    main=Schedule(peak=1e-4, warmup_steps=10), adam=AdamConfig(weight_decay=0.0)
                ),
                rows=32,
                row_length=1024,
            ),
            # bfloat16: a key or an expert at an edge may flip by rounding.
            gate=GateConfig(prompts=64, tolerance=0.1, share=0.02),
            evaluate_tasks=384,
        ),
    )
