"""The training stages and what each one runs."""

from typing import Literal

from dsv32_jax.mla import AttentionMode

Stage = Literal["dense", "warmup", "sparse", "window"]

# dense: ordinary pre-training. warmup: attention exactly dense, only the indexers train. sparse: everything trains
# under the selection. window: a control, everything but the indexers trains under a last-k window.
ATTENTION: dict[Stage, AttentionMode] = {
    "dense": "dense",
    "warmup": "dense",
    "sparse": "sparse",
    "window": "window",
}
INDEXER_TRAINS: frozenset[Stage] = frozenset({"warmup", "sparse"})
MAIN_TRAINS: frozenset[Stage] = frozenset({"dense", "sparse", "window"})
