"""Draws on their way from the sampler to the learner: those that wait, and the one that is drawn beside it."""

import collections
import time
from concurrent.futures import Future, ThreadPoolExecutor

from dsv32_jax.parameters import Parameters
from train.rl.settings import RolloutConfig
from train.rl.trainer import Drawn, Sampler


class Draws:
    """Hands a step the draw that is `staleness` steps old.

    Args:
        sampler: Draws.
        rollouts: How stale draws are, and whether they are drawn beside the learner.

    Attributes:
        waiting: Draws to be learned from, the oldest first; `collect` before they are read.
    """

    def __init__(self, sampler: Sampler, rollouts: RolloutConfig) -> None:
        """Begin with none."""
        self.waiting: collections.deque[Drawn] = collections.deque()
        self._sampler, self._rollouts = sampler, rollouts
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._drawing: Future[Drawn] | None = None

    def next(self, params: Parameters, step: int) -> Drawn:
        """Draw what is missing, and return the oldest draw.

        Args:
            params: The policy.
            step: Its number, which the sampler knows it by.

        Returns:
            The draw, with the seconds that the learner waited for one and that weights took to be pushed.
        """
        began = time.monotonic()
        self.collect()
        waited, syncing = time.monotonic() - began, 0.0
        missing = self._rollouts.staleness + 1 - len(self.waiting)
        for i in range(missing):
            began = time.monotonic()
            self._sampler.push(params, step)
            syncing += time.monotonic() - began
            if self._rollouts.overlap and i + 1 == missing:
                self._drawing = self._thread.submit(self._sampler.draw)
            else:
                self.waiting.append(self._sampler.draw())
        groups, figures = self.waiting.popleft()
        return Drawn(groups, figures | {"seconds/sync": syncing, "seconds/waiting": waited})

    def collect(self) -> None:
        """Wait for the draw that is under way and put it behind the others."""
        if self._drawing is not None:
            drawing, self._drawing = self._drawing, None
            self.waiting.append(drawing.result())
