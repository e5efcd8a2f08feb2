"""Indexer warm-up on the default dense base, which is made first in the same workdir.

Command: python -m train.pretrain --config warmup.py
Hardware: two CPU cores.
"""

from dataclasses import replace

from configs import dense
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import RunConfig, StageConfig

STEPS = 200


def get_config() -> RunConfig:
    """Return the run."""
    return replace(
        dense.get_config(),
        warmup=StageConfig(
            steps=STEPS,
            optimizer=OptimizerConfig(
                indexer=Schedule(peak=1e-2, warmup_steps=10, decay_steps=STEPS - 10, final=1e-3),
            ),
        ),
    )
