"""Noticing from the loss alone that a run has gone wrong."""

import collections
import math
import statistics
from dataclasses import dataclass
from typing import Any

from dsv32_jax import errors


class DivergedError(errors.WorkFailedError):
    """The loss is no longer a number, or stays far above what it was."""


@dataclass(frozen=True, kw_only=True)
class LossGuardConfig:
    """What counts as divergence.

    Attributes:
      window: over how many of the latest normal losses the median is taken; spikes are looked for
        once there are that many.
      factor: a loss above this many times the median is a spike.
      patience: how many spikes in a row are divergence; fewer are forgiven.
    """

    window: int = 100
    factor: float = 3.0
    patience: int = 20

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        if not self.factor > 1:
            raise ValueError(f"factor={self.factor} must be above 1")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1")


class LossGuard:
    """Watches one loss; spikes are looked for only while its running median is positive."""

    def __init__(self, cfg: LossGuardConfig) -> None:
        """Watch from now on.

        Args:
          cfg: what counts as divergence.
        """
        self._cfg = cfg
        self._normal: collections.deque[float] = collections.deque(maxlen=cfg.window)
        self._spikes = 0

    def check(self, step: int, loss: float) -> None:
        """Take note of a step's loss.

        Args:
          step: for the message.
          loss: the step's loss.

        Raises:
          DivergedError: the loss is not finite, or it is the last of `patience` spikes in a row.
        """
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} at step {step}")
        median = statistics.median(self._normal) if self._is_full() else 0.0
        if not 0 < median < loss / self._cfg.factor:
            self._normal.append(loss)
            self._spikes = 0
            return
        # A spike stays out of the window, or a long one would become the new normal.
        self._spikes += 1
        if self._spikes >= self._cfg.patience:
            raise DivergedError(
                f"the loss is {loss:.4g} at step {step}, and for {self._spikes} checks in a row it "
                f"was over {self._cfg.factor:g} times the running median {median:.4g}"
            )

    def state(self) -> dict[str, Any]:
        """Return what the next losses are judged by, for a checkpoint.

        Returns:
          JSON: `normal`, the latest normal losses, and `spikes`, how many followed them.
        """
        return {"normal": list(self._normal), "spikes": self._spikes}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state.

        Args:
          state: what `state` returned; a longer window's is cut to this one's.
        """
        self._normal.clear()
        self._normal.extend(state["normal"])
        self._spikes = state["spikes"]

    def _is_full(self) -> bool:
        return len(self._normal) == self._cfg.window
