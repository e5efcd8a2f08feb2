"""Dense warm-up of the released 671B model: attention dense, only the indexers train.

Source: DeepSeek-V3.2 report, section 2.1: 1000 steps of 16 sequences of 128K tokens (2.1B tokens), learning rate 1e-3.
Not published, and chosen here: AdamW betas and a constant rate, no weight decay, KL summed over layers with factor 1.
Command: python -m train.pretrain --config v32_671b_warmup.py init_from=DIR data.sources=TOKENS distributed=true
Hardware: a pod. Never run; builds and traces in the tests.
"""

from dsv32_jax import config
from dsv32_jax.sharding import MeshConfig
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig, Source
from train.optimizer import OptimizerConfig, Schedule
from train.run_config import RunConfig, StageConfig

SEQ_LEN = 128 * 1024


def get_config() -> RunConfig:
    """Return the run; `data.sources` and `init_from` are placeholders to be overridden."""
    return RunConfig(
        model=config.v32_671b(),
        data=DataConfig(
            sources=(Source(path="tokens/"),),
            tokenizer="tokenizer.json",
            seq_len=SEQ_LEN,
            batch_size=16,
            seed=0,
            prefetch=2,
        ),
        init_from="converted/",
        # A row of 16 for each expert shard, on any pod.
        mesh=MeshConfig(ici_fsdp=1, ici_expert=16, ici_context=-1),
        checkpoint=CheckpointConfig(every_steps=100, keep_last=2, keep_best=0, verify="size"),
        warmup=StageConfig(steps=1000, optimizer=OptimizerConfig(indexer=Schedule(peak=1e-3))),
    )
