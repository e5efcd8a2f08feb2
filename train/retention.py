"""Which checkpoints stay: the newest, and those with the lowest metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def steps_to_keep(
    steps: Sequence[int], metrics: Mapping[int, float | None], *, keep_last: int, keep_best: int
) -> set[int]:
    """Choose the checkpoints that stay.

    Args:
      steps: those that exist.
      metrics: metric by step, lower being better; None, NaN and absent ones are never best.
      keep_last: how many of the newest stay.
      keep_best: how many of the lowest metric stay; the later step wins a tie.

    Returns:
      The steps to keep.
    """
    ranked = []
    for step in steps:
        metric = metrics.get(step)
        if metric is not None and not math.isnan(metric):
            ranked.append((metric, -step))
    best = {-negated for _, negated in sorted(ranked)[:keep_best]}
    return set(sorted(steps)[-keep_last:]) | best


class LastAndBest:
    """Orbax's preservation policy by `steps_to_keep`."""

    def __init__(
        self, metrics: Mapping[int, float | None], *, keep_last: int, keep_best: int
    ) -> None:
        """Rank by a table that the owner goes on filling.

        Args:
          metrics: metric by step, read anew at each decision.
          keep_last: as for `steps_to_keep`.
          keep_best: as for `steps_to_keep`.
        """
        self._metrics = metrics
        self._keep_last = keep_last
        self._keep_best = keep_best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Answer Orbax.

        Args:
          checkpoints: Orbax's descriptions, each with its `step`.
          context: unused; part of Orbax's protocol.

        Returns:
          One answer a checkpoint.
        """
        del context
        steps = [info.step for info in checkpoints]
        keep = steps_to_keep(
            steps, self._metrics, keep_last=self._keep_last, keep_best=self._keep_best
        )
        return [step in keep for step in steps]
