"""What a parser says about a completion while it reads, and the message that this adds up to."""

from dataclasses import dataclass
from typing import Any, Literal

type ProblemKind = Literal[
    "missing_think_end",
    "missing_end",
    "control_text",
    "misplaced_calls",
    "layout",
    "unexpected_text",
    "bad_call",
    "bad_parameter",
    "duplicate_parameter",
    "unterminated_call",
    "unterminated_calls",
    "text_after_calls",
    "text_after_end",
]
type FinishReason = Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning.

    Attributes:
        text: what comes after the reasoning so far; never empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content.

    Attributes:
        text: what comes after the content so far; never empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call whose function is known.

    Attributes:
        index: how many calls were started before it.
        name: the function.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the current call's arguments.

    Attributes:
        index: the call.
        text: what comes after the JSON so far.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. One that is started and never ended was broken, and does not count.

    Attributes:
        index: the call.
    """

    index: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the strict format forbids.

    Attributes:
        kind: what it is, for programs.
        message: what it is in words, fit to be shown to the model: it spells no control token.
        position: where, in code points from the completion's start.
    """

    kind: ProblemKind
    message: str
    position: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The text is over.

    Attributes:
        reason: "length" if it was cut off before the turn's end, else "tool_calls" if there are
            complete calls, else "stop".
    """

    reason: FinishReason


type Event = (
    ReasoningDelta | ContentDelta | CallStart | ArgumentsDelta | CallEnd | Problem | Finished
)


class Turn:
    """An assistant's turn, as far as the events say.

    Attributes:
        problems: what was found so far.
        tool_calls: the complete calls so far.
    """

    def __init__(self) -> None:
        """Begin with an empty turn."""
        self.problems: list[Problem] = []
        self.tool_calls: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._name = ""
        self._arguments: list[str] = []

    def add(self, event: Event) -> None:
        """Take one event into account.

        Args:
            event: the next one.
        """
        match event:
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ContentDelta(text):
                self._content.append(text)
            case CallStart(_, name):
                self._name, self._arguments = name, []
            case ArgumentsDelta(_, text):
                self._arguments.append(text)
            case CallEnd():
                function = {"name": self._name, "arguments": "".join(self._arguments)}
                self.tool_calls.append({"type": "function", "function": function})
            case Problem():
                self.problems.append(event)

    def message(self) -> dict[str, Any]:
        """Return the assistant message.

        Returns:
            `role`, `content`, `reasoning_content` and `tool_calls`, all always there; calls have
            `type` and `function`, and no id.
        """
        return {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning),
            "tool_calls": list(self.tool_calls),
        }
