"""The states of a parser: what it looks for, and what it does with the text on the way there."""

from collections.abc import Callable
from typing import NamedTuple

from dsv32_jax.encoding import markup
from dsv32_jax.encoding.events import Event, Problem, ProblemKind, Turn
from dsv32_jax.encoding.scanner import Scanner, Stops

SHOWN = 40  # code points of a text that a message quotes


class State(NamedTuple):
    """Where a parser is in the format.

    Attributes:
        stops: what ends the state.
        take: gets each stretch of text before that.
        leave: gets what ended the state, and returns the next state.
        end: is called if the text ends here.
    """

    stops: Stops
    take: Callable[[str], None]
    leave: Callable[[str], "State"]
    end: Callable[[], None]


class Reader:
    """Text in, events out; what to do with the text is the states' business.

    Attributes:
        turn: what the events add up to.
        events: those that nobody has fetched yet.
        entered: where the current state began.
    """

    def __init__(self) -> None:
        """Begin with no text."""
        self.turn = Turn()
        self.events: list[Event] = []
        self.entered = 0
        self._scanner = Scanner()

    @property
    def position(self) -> int:
        """Return how many code points the states have been given."""
        return self._scanner.position

    def read(self, piece: str, state: State, *, final: bool) -> State:
        """Give the states more text.

        Args:
            piece: the text.
            state: the current state.
            final: whether it is the last piece; then the last state's `end` is called.

        Returns:
            the state after the text.
        """
        self._scanner.feed(piece)
        while True:
            text, stop = self._scanner.advance(state.stops, final=final)
            if text:
                state.take(text)
            if stop is None:
                break
            state = state.leave(stop)
            self.entered = self.position
        if final:
            state.end()
        return state

    def emit(self, event: Event) -> None:
        """Say something.

        Args:
            event: what.
        """
        self.turn.add(event)
        self.events.append(event)

    def problem(self, kind: ProblemKind, message: str, position: int) -> None:
        """Say that something is wrong.

        Args:
            kind: what it is, for programs.
            message: what it is in words, without control tokens.
            position: where.
        """
        self.emit(Problem(kind, message, position))


def quote(text: str) -> str:
    """Quote the beginning of a text in a message.

    Args:
        text: any string.

    Returns:
        the quoted text. Control tokens are cut out of it: tokenised in a prompt they would be
        tokens again.
    """
    shown = text[: SHOWN + 1]
    for token in (*markup.CONTROL, markup.USER, markup.ASSISTANT):
        shown = shown.replace(token, "…")
    return repr(shown[:SHOWN] + "…" if len(text) > SHOWN else shown)
