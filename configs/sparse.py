"""The main job: dense base, indexer warm-up, sparse training, two controls, and the evidence.

Command: python -m train.pretrain --config sparse.py
Hardware: two CPU cores.
"""

from dataclasses import replace

from configs import warmup
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import EvidenceConfig, RunConfig, StageConfig
from train.step import LossConfig

STEPS = 100

CAVEAT = """\
What this does not show. A base this small, trained on this few tokens, is local: most of its attention lies on the last
few tokens, so a last-k window is a strong rival and no claim about long-range retrieval follows. The untrained row only
says that a random choice is bad. Attention mass is what the indexer is trained on, not what the loss needs: right after
the warm-up a window can have the lower loss though the indexer keeps more mass. One seed; the errors are over held-out
rows, not over seeds."""


def get_config() -> RunConfig:
    """Return the run."""
    return replace(
        warmup.get_config(),
        sparse=StageConfig(
            steps=STEPS,
            optimizer=OptimizerConfig(
                main=Schedule(peak=5e-4, warmup_steps=10, decay_steps=STEPS - 10, final=5e-5),
                indexer=Schedule(peak=1e-3, warmup_steps=10, decay_steps=STEPS - 10, final=1e-4),
            ),
            loss=LossConfig(),
        ),
        evidence=EvidenceConfig(rows=128, rows_per_batch=16, caveat=CAVEAT),
    )
