"""Read a completion: at once and strictly, at once and tolerantly, or as it comes.

All three are one parser. The strict one accepts what the tolerant one finds no problem in.
"""

from typing import Any

from dsv32_jax.encoding import markup
from dsv32_jax.encoding.calls_states import CallsStates
from dsv32_jax.encoding.errors import EncodingError
from dsv32_jax.encoding.events import (
    ContentDelta,
    Event,
    Finished,
    FinishReason,
    Problem,
    ProblemKind,
    ReasoningDelta,
)
from dsv32_jax.encoding.messages import check_thinking_mode
from dsv32_jax.encoding.reader import Reader, State
from dsv32_jax.encoding.scanner import Stops

CALLS_START = f"\n\n{markup.CALLS}"
# What a message may call them without spelling them.
CONTROL_NAMES = {
    markup.BOS: "the token that begins a text",
    markup.THINK_START: "the think tag",
    markup.THINK_END: "the closing think tag",
    markup.DSML: "the marker of call tags",
}

IN_PROSE = Stops(CALLS_START, markup.CALLS, *markup.CONTROL)
AFTER_CALLS = Stops(markup.EOS)
NOTHING = Stops()


class StreamingParser:
    """Reads a completion in pieces of any size and says what it means as soon as it is certain.

    However the text is cut, the events say the same: joined deltas, calls, problems and positions
    are equal, and equal to `parse_completion_tolerant` of the whole text. What may turn out to
    belong to a tag is held back until that is decided.

    Control tokens in reasoning or content are problems and are left out of the text. A broken call
    is a problem; it has no `CallEnd` and is no part of the message.

    Args:
        thinking_mode: "thinking" if the prompt ended by opening the reasoning, else "chat".

    Raises:
        EncodingError: an unknown mode.
    """

    def __init__(self, thinking_mode: str) -> None:
        """Begin before the completion; the class docstring has the arguments."""
        check_thinking_mode(thinking_mode)
        self._reader = Reader()
        self._is_cut = True
        self._is_over = False
        self._reasoning = State(
            IN_PROSE, self._take_reasoning, self._leave_reasoning, self._end_in_reasoning
        )
        self._content = State(IN_PROSE, self._take_content, self._leave_content, self._end_early)
        self._calls = CallsStates(self._reader, done=self._end_calls, cut=self._end_turn)
        self._state = self._reasoning if thinking_mode == "thinking" else self._content

    @property
    def problems(self) -> list[Problem]:
        """Return what was found so far."""
        return list(self._reader.turn.problems)

    def message(self) -> dict[str, Any]:
        """Return the assistant message so far.

        Returns:
            as `parse_completion`.
        """
        return self._reader.turn.message()

    def feed(self, piece: str) -> list[Event]:
        """Read more of the completion.

        Args:
            piece: the text after the last piece; may be empty.

        Returns:
            what has become certain, in order.

        Raises:
            ValueError: the completion was finished.
        """
        return self._read(piece, final=False)

    def finish(self) -> list[Event]:
        """End the completion.

        Returns:
            what was held back, and `Finished`.

        Raises:
            ValueError: the completion was finished before.
        """
        return self._read("", final=True)

    def _read(self, piece: str, *, final: bool) -> list[Event]:
        if self._is_over:
            raise ValueError("the completion is finished; a new one needs a new parser")
        reader = self._reader
        self._state = reader.read(piece, self._state, final=final)
        if final:
            self._is_over = True
            reader.emit(Finished(self._finish_reason()))
        events, reader.events = reader.events, []
        return events

    def _finish_reason(self) -> FinishReason:
        if self._is_cut:
            return "length"
        return "tool_calls" if self._reader.turn.tool_calls else "stop"

    def _take_reasoning(self, text: str) -> None:
        self._reader.emit(ReasoningDelta(text))

    def _take_content(self, text: str) -> None:
        self._reader.emit(ContentDelta(text))

    def _leave_reasoning(self, stop: str) -> State:
        at = self._reader.position - len(stop)
        if stop == markup.THINK_END:
            return self._content
        if stop == markup.EOS:
            self._reader.problem("missing_think_end", "the turn ends in the reasoning", at)
            return self._end_turn()
        if stop in (CALLS_START, markup.CALLS):
            message = "calls begin before the reasoning is closed"
            self._reader.problem("missing_think_end", message, at)
            return self._calls.start
        self._report_control(stop, "the reasoning")
        return self._reasoning

    def _leave_content(self, stop: str) -> State:
        if stop == markup.EOS:
            return self._end_turn()
        if stop == CALLS_START:
            return self._calls.start
        if stop == markup.CALLS:
            message = "a block of calls must follow an empty line"
            at = self._reader.position - len(stop)
            self._reader.problem("misplaced_calls", message, at)
            return self._calls.start
        self._report_control(stop, "the content")
        return self._content

    def _report_control(self, token: str, where: str) -> None:
        at = self._reader.position - len(token)
        self._reader.problem("control_text", f"{CONTROL_NAMES[token]} stands in {where}", at)

    def _end_in_reasoning(self) -> None:
        message = "the text ends in the reasoning"
        self._reader.problem("missing_think_end", message, self._reader.position)

    def _end_early(self) -> None:
        message = "the text ends without the token that ends a turn"
        self._reader.problem("missing_end", message, self._reader.position)

    def _end_calls(self) -> State:
        self._is_cut = False
        return self._rest(AFTER_CALLS, "text_after_calls", "the block of calls")

    def _end_turn(self, stop: str = markup.EOS) -> State:
        del stop
        self._is_cut = False
        return self._rest(NOTHING, "text_after_end", "the end of the turn")

    def _rest(self, stops: Stops, kind: ProblemKind, what: str) -> State:
        """Return a state in which any text is wrong, and is reported once and left out."""
        reported = False

        def take(text: str) -> None:
            del text
            nonlocal reported
            if not reported:
                self._reader.problem(kind, f"text follows {what}", self._reader.entered)
            reported = True

        return State(stops, take, self._end_turn, lambda: None)


def parse_completion(text: str, *, thinking_mode: str) -> dict[str, Any]:
    """Read a completion as the official parser does: strictly, repairing nothing.

    Differs from DeepSeek: a block of calls must be closed. The official parser also accepts a text
    that was cut right behind some of the block's tags.

    Args:
        text: what the model wrote after the prompt, with the token that ends the turn; after
            calls that may be missing. In thinking mode it begins inside the reasoning.
        thinking_mode: "chat" or "thinking".

    Returns:
        the assistant message: `role`, `content`, `reasoning_content` ("" in chat mode) and
        `tool_calls`, each with `type` and `function`, and no id. The arguments are a JSON text
        put together from the values as they stand: one that is marked as JSON is not checked.

    Raises:
        EncodingError: an unknown mode, or the text is not in the format.
    """
    message, problems = parse_completion_tolerant(text, thinking_mode=thinking_mode)
    if problems:
        first = problems[0]
        raise EncodingError(f"{first.message} (at code point {first.position})")
    return message


def parse_completion_tolerant(
    text: str, *, thinking_mode: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Read whatever a model wrote, and say what is wrong with it.

    Reasoning and content are kept without the control tokens that the strict parser refuses in them (the tokens of
    the other roles are text to both). A call is kept if it is
    certain what it says, and left out if not; calls around a broken one are kept.

    Args:
        text: as for `parse_completion`, but any string is fine.
        thinking_mode: "chat" or "thinking".

    Returns:
        the assistant message, as `parse_completion`, and the problems, in order. There is none
        exactly if `parse_completion` accepts the text, and then the message is the same.

    Raises:
        EncodingError: an unknown mode.
    """
    parser = StreamingParser(thinking_mode)
    parser.feed(text)
    parser.finish()
    return parser.message(), parser.problems
