"""The default run of reinforcement learning: a small policy, cold-started, on generated tasks by GRPO.

The cold start shows the steps to the answer in six of ten examples and the answer alone in the others, so the policy
does now this, now that; reinforcement learning finds that thinking first pays.

Command: python -m train.grpo
Hardware: two CPU cores, under 15 minutes.
Expected: held-out accuracy from about 0.65 to about 0.9, most of it in ten steps (docs/grpo.md).
"""

from dataclasses import replace

from dsv32_jax import config
from train.checkpoint import CheckpointConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl.objective import ObjectiveConfig
from train.rl.problems import Family
from train.rl.rewards import RewardConfig
from train.rl.run_config import ColdStartConfig, GrpoConfig
from train.rl.settings import GateConfig, LearnerConfig, RlConfig, RolloutConfig
from train.rl.task_source import TaskConfig
from train.run_config import StageConfig

DENSE_STEPS, WARMUP_STEPS, SPARSE_STEPS = 4200, 80, 120
STEPS = 40


def get_config() -> GrpoConfig:
    """Return the run."""
    small = config.cpu_1m()
    return GrpoConfig(
        model=replace(small, mtp=False, init_std=0.08, indexer=replace(small.indexer, topk=32)),
        tasks=TaskConfig(
            families=(
                Family(
                    name="basic_arithmetic",
                    settings=(
                        ("min_terms", 3),
                        ("max_terms", 3),
                        ("min_digits", 1),
                        ("max_digits", 1),
                        ("operators", ("+", "-")),
                        ("allow_parentheses", False),
                        ("allow_negation", False),
                    ),
                ),
                Family(
                    name="chain_sum",
                    settings=(
                        ("min_terms", 3),
                        ("max_terms", 3),
                        ("min_digits", 1),
                        ("max_digits", 1),
                    ),
                ),
                Family(
                    name="simple_equations",
                    settings=(
                        ("min_terms", 1),
                        ("max_terms", 2),
                        ("min_value", 1),
                        ("max_value", 9),
                    ),
                ),
            ),
            held_out=32,
        ),
        rewards=RewardConfig(style="lines"),
        cold_start=ColdStartConfig(
            examples=120000,
            worked=0.6,
            masked=True,
            seq_len=256,
            batch_size=8,
            dense=StageConfig(
                steps=DENSE_STEPS,
                optimizer=OptimizerConfig(
                    main=Schedule(
                        peak=3e-3, warmup_steps=50, decay_steps=DENSE_STEPS - 50, final=3e-4
                    )
                ),
            ),
            warmup=StageConfig(
                steps=WARMUP_STEPS,
                optimizer=OptimizerConfig(indexer=Schedule(peak=5e-3, warmup_steps=10)),
            ),
            sparse=StageConfig(
                steps=SPARSE_STEPS,
                optimizer=OptimizerConfig(
                    main=Schedule(peak=5e-4, warmup_steps=10),
                    indexer=Schedule(peak=1e-3, warmup_steps=10),
                ),
            ),
        ),
        rl=RlConfig(
            steps=STEPS,
            rollouts=RolloutConfig(
                prompts=24, group_size=8, max_prompt_tokens=80, max_tokens=26, slots=64
            ),
            learner=LearnerConfig(
                objective=ObjectiveConfig(kl_strength=0.001, off_policy_delta=0.1),
                optimizer=OptimizerConfig(
                    main=Schedule(peak=5e-4, warmup_steps=5), adam=AdamConfig(weight_decay=0.0)
                ),
                minibatches=2,
                rows=8,
                row_length=512,
            ),
            gate=GateConfig(prompts=16, tolerance=1e-3),
            evaluate_every=10,
            evaluate_tasks=96,
        ),
        checkpoint=CheckpointConfig(every_steps=200, keep_last=2, keep_best=0),
    )
