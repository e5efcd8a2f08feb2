"""The training stages and what each one runs."""

from typing import Literal

from dsv32_jax import flops
from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import AttentionMode

Stage = Literal["dense", "warmup", "sparse", "window", "rl", "rl_indexer"]

# dense: ordinary pre-training. warmup: attention exactly dense, only the indexers train. sparse: everything trains
# under the selection. window: a control, everything but the indexers trains under a last-k window. rl: reinforcement
# learning under the selection; the indexers and the MTP module stay as they are. rl_indexer: the same, but the indexers
# of the main layers train by their KL as in sparse, the policy's gradient never reaching them.
ATTENTION: dict[Stage, AttentionMode] = {
    "dense": "dense",
    "warmup": "dense",
    "sparse": "sparse",
    "window": "window",
    "rl": "sparse",
    "rl_indexer": "sparse",
}
INDEXER_TRAINS: frozenset[Stage] = frozenset({"warmup", "sparse", "rl_indexer"})
MAIN_TRAINS: frozenset[Stage] = frozenset({"dense", "sparse", "window", "rl", "rl_indexer"})
RL: frozenset[Stage] = frozenset({"rl", "rl_indexer"})


def train_flops(cfg: ModelConfig, seq_len: int, stage: Stage) -> float:
    """Count what a step of a stage costs a token: what trains goes forward and back, the rest forward only.

    In the warm-up the main model is frozen and its head is not run; in reinforcement learning the indexer is. Its
    target, which the mathematics reads off the main attention, is not counted.

    Args:
        cfg: The model.
        seq_len: Tokens of a document.
        stage: The stage.

    Returns:
        FLOPs per token, a mean over the document.
    """
    trains = stage in INDEXER_TRAINS
    count = flops.forward(cfg, seq_len, ATTENTION[stage], indexer_runs=trains or None)
    main = count.weights + count.attention
    if stage in MAIN_TRAINS:
        main = flops.BACKWARD_FACTOR * (main + count.head)
    return main + (flops.BACKWARD_FACTOR if trains else 1) * count.indexer
