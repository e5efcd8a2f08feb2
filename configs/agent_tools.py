"""Learn to use tools: a small policy, cold-started on solutions, on tasks that only tools can answer, by GRPO.

The cold start shows the calls in four of ten traces and the answer alone in the others; reinforcement learning finds
that calling pays. Tools with names that were never seen are evaluated beside, and stay out of reach.

Command: python -m train.grpo --config agent_tools.py
Hardware: two CPU cores, 16 minutes beside other work.
Expected: held-out success from about 0.33 to 0.9 in 20 steps (docs/agents.md).
"""

from dataclasses import replace

from configs import grpo
from dsv32_jax import config
from train.agents.attempt import Limits
from train.checkpoint import CheckpointConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl.agent_tasks import AgentConfig, EnvironmentShare
from train.rl.objective import ObjectiveConfig
from train.rl.run_config import GrpoConfig
from train.rl.settings import GateConfig, LearnerConfig, RlConfig, RolloutConfig

DENSE_STEPS, WARMUP_STEPS, SPARSE_STEPS = 500, 40, 40
STEPS = 40


def get_config() -> GrpoConfig:
    """Return the run."""
    base, small = grpo.get_config(), config.cpu_1m()
    assert base.cold_start is not None
    assert base.cold_start.dense.optimizer.main is not None
    dense = base.cold_start.dense.optimizer.main
    return GrpoConfig(
        model=replace(small, mtp=False, init_std=0.08, indexer=replace(small.indexer, topk=64)),
        agent=AgentConfig(
            environments=(EnvironmentShare(name="train.agents.keys:Keys"),),
            unseen=(EnvironmentShare(name="train.agents.keys:UnseenKeys"),),
            form="compact",
            limits=Limits(steps=4, tokens=48, result_chars=24),
            held_out=64,
        ),
        cold_start=replace(
            base.cold_start,
            examples=12000,
            worked=0.4,
            dense=replace(
                base.cold_start.dense,
                steps=DENSE_STEPS,
                optimizer=OptimizerConfig(
                    main=replace(dense, decay_steps=DENSE_STEPS - dense.warmup_steps)
                ),
            ),
            warmup=replace(base.cold_start.warmup, steps=WARMUP_STEPS),
            sparse=replace(base.cold_start.sparse, steps=SPARSE_STEPS),
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
