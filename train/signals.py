"""Stopping at a step's end when the scheduler or the person at the terminal asks."""

import signal
import types

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal:
    """Turn the first SIGTERM or SIGINT into a flag, inside a `with` block.

    The loop reads `requested` after each step, saves, and leaves. A second signal acts as if this
    class were not there: SIGINT raises KeyboardInterrupt, SIGTERM ends the process.

    Must be entered on the main thread, where Python handles signals.
    """

    def __init__(self) -> None:
        """Ask for nothing yet."""
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> int:
        """The number of the signal that has asked the loop to stop; 0 before one has."""
        return 0 if self._received is None else self._received.value

    def __enter__(self) -> "StopOnSignal":
        """Begin to listen.

        Returns:
          This object.
        """
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        """Put the handlers back that were there before.

        Args:
          *raised: the exception that leaves the block, if any; it goes on.
        """
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self._received = signal.Signals(number)
        # From here on a second signal takes its usual way.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
