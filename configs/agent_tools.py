"""Learn to use tools: a small policy, cold-started on solutions, on tasks that only tools can answer, by GRPO.

The cold start shows the calls in four of ten traces and the answer alone in the others; reinforcement learning finds
that calling pays. Tools with names that were never seen are evaluated beside, and stay out of reach.

Command: python -m train.grpo --config agent_tools.py
Hardware: two CPU cores, 16 minutes beside other work.
Expected: held-out success from about 0.33 to 0.9 in 20 steps (docs/agents.md).
"""

from dataclasses import replace

from dsv32_jax import config
from train.agents.attempt import Limits
from train.checkpoint import CheckpointConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl.agent_tasks import AgentConfig, EnvironmentShare
from train.rl.objective import ObjectiveConfig
from train.rl.run_config import ColdStartConfig, GrpoConfig
from train.rl.settings import GateConfig, LearnerConfig, RlConfig, RolloutConfig
from train.run_config import StageConfig

DENSE_STEPS, WARMUP_STEPS, SPARSE_STEPS = 500, 40, 40
STEPS = 40


def get_config() -> GrpoConfig:
    """Return the run."""
    small = config.cpu_1m()
    return GrpoConfig(
        model=replace(small, mtp=False, init_std=0.08, indexer=replace(small.indexer, topk=64)),
        agent=AgentConfig(
            environments=(EnvironmentShare(name="train.agents.keys:Keys"),),
            unseen=(EnvironmentShare(name="train.agents.keys:UnseenKeys"),),
            form="compact",
            limits=Limits(steps=4, tokens=48, result_chars=24),
            held_out=64,
        ),
        cold_start=ColdStartConfig(
            examples=12000,
            worked=0.4,
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
                prompts=16, group_size=8, max_prompt_tokens=48, max_tokens=80, slots=64
            ),
            learner=LearnerConfig(
                objective=ObjectiveConfig(kl_strength=0.0, off_policy_delta=0.1),
                optimizer=OptimizerConfig(
                    main=Schedule(peak=3e-4, warmup_steps=3), adam=AdamConfig(weight_decay=0.0)
                ),
                minibatches=2,
                rows=8,
                row_length=256,
            ),
            gate=GateConfig(prompts=16, tolerance=1e-3),
            evaluate_every=10,
            evaluate_tasks=128,
        ),
        checkpoint=CheckpointConfig(every_steps=20, keep_last=2, keep_best=0),
    )
