"""Sparse training of the released 671B model: everything trains under the top-2048 selection.

Source: DeepSeek-V3.2 report, section 2.1: 15,000 steps of 480 sequences of 128K tokens (943.7B tokens), learning rate
7.3e-6, k = 2048. AdamW, clipping, lambda = 0.1 and alpha = 1e-4 are DeepSeek-V3's (section 4.2). Not published, and
chosen here: the indexer's rate (the same), its weight decay (none), gamma = 0.001, KL summed over layers with factor 1.
Command: python -m train.pretrain --config v32_671b_sparse.py init_from=DIR data.sources=TOKENS distributed=true
Hardware: a pod. Never run; builds and traces in the tests.
"""

from dataclasses import replace

from configs import v32_671b_warmup
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.run_config import RunConfig, StageConfig
from train.step import LossConfig


def get_config() -> RunConfig:
    """Return the run; `data.sources` and `init_from` are placeholders to be overridden."""
    rate = Schedule(peak=7.3e-6)
    return replace(
        v32_671b_warmup.get_config(),
        warmup=None,
        sparse=StageConfig(
            steps=15_000,
            optimizer=OptimizerConfig(
                main=rate, indexer=rate, adam=AdamConfig(mu_dtype="bfloat16")
            ),
            loss=LossConfig(mtp=0.1, balance=1e-4, bias_rate=1e-3),
            batch_size=480,
            microbatches=30,
        ),
    )
