"""A line on the terminal that says where the work stands."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

TTY_SECONDS = 0.2  # Often enough to look alive, seldom enough to cost nothing.
CLEAR_TO_END = "\x1b[K"


@runtime_checkable
class TextStream(Protocol):
    """What a progress line needs of a stream: a file, a terminal, or text in memory."""

    def write(self, text: str, /) -> object:
        """Write a text."""

    def flush(self) -> object:
        """Pass on what was written."""

    def isatty(self) -> bool:
        """Say whether this is a terminal."""


class ProgressLine:
    """One line that is rewritten on a terminal; on anything else, a line every so many seconds."""

    def __init__(
        self, stream: TextStream, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing yet.

        Args:
          stream: where to write; whether it is a terminal decides the form.
          seconds: the time between two lines where it is none.
          clock: seconds.
        """
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._seconds = TTY_SECONDS if self._is_terminal else seconds
        self._clock = clock
        self._due = clock()

    def show(self, text: str, *, now: bool = False) -> None:
        """Show a text, unless another was shown just before.

        Args:
          text: one line, without its end.
          now: show it in any case.
        """
        if not now and self._clock() < self._due:
            return
        self._due = self._clock() + self._seconds
        line = f"\r{text}{CLEAR_TO_END}" if self._is_terminal else f"{text}\n"
        self._stream.write(line)
        self._stream.flush()

    def close(self) -> None:
        """End the line on a terminal, so that what follows begins on its own."""
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
