"""A cold start: a small sparse base is fine-tuned on solved tasks, by the loss of the answers alone.

Command: python -m train.sft
Hardware: two CPU cores.
"""

from dataclasses import replace

from configs import grpo, sparse
from train.data.config import DataConfig
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import StageConfig
from train.sft_config import BaseConfig, SftConfig, SolvedConfig

BASE_STEPS, WARMUP_STEPS, STEPS = 200, 40, 200


def get_config() -> SftConfig:
    """Return the run."""
    rl, text = grpo.get_config(), sparse.get_config()
    assert rl.tasks is not None, "the default run has tasks"
    return SftConfig(
        model=rl.model,
        data=DataConfig(seq_len=256, batch_size=8, seed=0, examples=True),
        training=StageConfig(
            steps=STEPS,
            optimizer=OptimizerConfig(
                main=Schedule(peak=3e-3, warmup_steps=20, decay_steps=STEPS - 20, final=3e-4),
                indexer=Schedule(peak=1e-3, warmup_steps=10),
            ),
        ),
        base=BaseConfig(
            data=text.data,
            dense=StageConfig(
                steps=BASE_STEPS,
                optimizer=OptimizerConfig(main=Schedule(peak=3e-3, warmup_steps=50)),
            ),
            warmup=StageConfig(
                steps=WARMUP_STEPS,
                optimizer=OptimizerConfig(indexer=Schedule(peak=5e-3, warmup_steps=10)),
            ),
        ),
        solved=SolvedConfig(
            tasks=rl.tasks, examples=8000, rewards=rl.rewards, measured=96, max_tokens=8
        ),
        held_out_rows=16,
        checkpoint=replace(rl.checkpoint, every_steps=100),
    )
