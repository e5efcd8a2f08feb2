"""Dense base for the default run: ordinary pre-training of the real architecture at 1.2M parameters.

Command: python -m train.pretrain --config dense.py
Hardware: two CPU cores.
"""

from dsv32_jax import config
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import RunConfig, StageConfig
from train.step import LossConfig

STEPS = 700


def get_config() -> RunConfig:
    """Return the run."""
    return RunConfig(
        model=config.cpu_1m(),
        data=DataConfig(seq_len=256, batch_size=8, seed=0),
        checkpoint=CheckpointConfig(every_steps=350, keep_last=2, keep_best=0),
        dense=StageConfig(
            steps=STEPS,
            optimizer=OptimizerConfig(
                main=Schedule(peak=3e-3, warmup_steps=50, decay_steps=STEPS - 50, final=3e-4),
            ),
            loss=LossConfig(),
        ),
    )
