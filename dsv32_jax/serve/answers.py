"""The engine's tokens as the texts, deltas and log-probabilities of one choice."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from dsv32_jax.encoding import events, markup
from dsv32_jax.encoding.parser import StreamingParser
from dsv32_jax.generate.protocol import Event, FinishEvent
from dsv32_jax.generate.text import TextStream
from dsv32_jax.tokenizer import Tokenizer

# What the end of a text's reading always says where the text itself was cut off.
BY_CUT = {"missing_end", "missing_think_end", "unterminated_call", "unterminated_calls"}


class DrawnToken(NamedTuple):
    """A token that is part of a text.

    Attributes:
        text: What it decodes to by itself.
        log_p: Its log-probability under the distribution that it was drawn from.
    """

    text: str
    log_p: float


class TextAnswer:
    """A plain text. Its deltas, `{"text": ...}`, add up to it.

    Attributes:
        finish_reason: "stop" or "length" once the text is over, else None.
        was_stopped: Whether a stop string ended it, so that the engine must be told.
        ended: Whether a token that ends texts did.
        n_tokens: Tokens drawn for it, the one that ends it among them.
        text: The text so far.
        tokens: The tokens of the text, without the one that ends it; none unless they are kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ends: frozenset[int],
        stop: Sequence[str],
        keeps_tokens: bool,
    ):
        """Begin with no text.

        Args:
            tokenizer: Decodes the tokens.
            ends: Ids that end a text and are no part of it.
            stop: Strings that do.
            keeps_tokens: Whether `tokens` is wanted.
        """
        self.finish_reason: str | None = None
        self.was_stopped = self.ended = False
        self.n_tokens, self.text = 0, ""
        self.tokens: list[DrawnToken] = []
        self._tokenizer, self._ends, self._keeps_tokens = tokenizer, ends, keeps_tokens
        self._stream = TextStream(tokenizer, stop)

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Read what the engine reports.

        Args:
            event: Of this text; one after its end changes nothing.

        Returns:
            The deltas that this makes certain.
        """
        piece = self.take_piece(event)
        return [{"text": piece}] if piece else []

    def take_piece(self, event: Event) -> str:
        """Do as `take`, and return the text itself."""
        if self.finish_reason is not None:
            return ""
        if isinstance(event, FinishEvent):
            piece = self._stream.finish()
            # The server cancels what a stop string has ended, or what nobody reads on: one that failed or was left.
            assert event.reason != "cancelled", "a text was cancelled that is still read"
            self.finish_reason = event.reason
        else:
            piece = self._push(event.token, event.log_p)
        if self._stream.stopped:
            self.finish_reason, self.was_stopped = "stop", True
        self.text += piece
        return piece

    def _push(self, token: int, log_p: float) -> str:
        self.n_tokens += 1
        if token in self._ends:
            self.ended = True
            return ""
        if self._keeps_tokens:
            self.tokens.append(DrawnToken(self._tokenizer.decode([token]), log_p))
        return self._stream.push(token)


class ChatAnswer:
    """An assistant's message. Its deltas are those of OpenAI's chat chunks, and DeepSeek's `reasoning_content`."""

    def __init__(self, text: TextAnswer, *, thinking: bool):
        """Begin with no message.

        Args:
            text: The message's text.
            thinking: Whether it begins inside the reasoning.
        """
        self._text, self._thinking = text, thinking
        self._parser = StreamingParser("thinking" if thinking else "chat")
        self._reason: str | None = None
        self._ids: list[str] = []  # of each call that was begun
        self._whole: list[int] = []  # the calls of them that were completed

    @property
    def finish_reason(self) -> str | None:
        """Why the message is over: "stop", "length" or "tool_calls"; None before."""
        return self._reason

    @property
    def was_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._text.was_stopped

    @property
    def n_tokens(self) -> int:
        """Tokens drawn for it."""
        return self._text.n_tokens

    @property
    def tokens(self) -> list[DrawnToken]:
        """Tokens of it: of the reasoning, the calls and their tags too."""
        return self._text.tokens

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What the message's form lacks, such as a call that can not be read and is left out."""
        is_cut = not self._text.ended
        found = [p for p in self._parser.problems if not (is_cut and p.kind in BY_CUT)]
        return [asdict(problem) for problem in found]

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Read what the engine reports.

        Args:
            event: Of this message; one after its end changes nothing.

        Returns:
            The deltas that this makes certain.
        """
        if self._reason is not None:
            return []
        found = self._parser.feed(self._text.take_piece(event))
        if self._text.finish_reason is not None:
            if self._text.ended:
                found += self._parser.feed(markup.EOS)
            found += self._parser.finish()
        deltas = [self._delta(one) for one in found]
        return [delta for delta in deltas if delta is not None]

    def message(self) -> dict[str, Any]:
        """Return the message so far; a call that is not complete is left out."""
        whole = self._parser.message()
        calls = [
            {"id": self._ids[i], **call}
            for i, call in zip(self._whole, whole["tool_calls"], strict=True)
        ]
        message = {"role": "assistant", "content": whole["content"] or (None if calls else "")}
        if self._thinking:
            message["reasoning_content"] = whole["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, event: events.Event) -> dict[str, Any] | None:
        match event:
            case events.ReasoningDelta(text):
                return {"reasoning_content": text}
            case events.ContentDelta(text):
                return {"content": text}
            case events.CallStart(index, name):
                self._ids.append(f"call_{uuid.uuid4().hex}")
                function = {"name": name, "arguments": ""}
                head = {"index": index, "id": self._ids[index], "type": "function"}
                return {"tool_calls": [{**head, "function": function}]}
            case events.ArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case events.CallEnd(index):
                self._whole.append(index)
            case events.Finished(reason):
                is_stopped = reason == "length" and self._text.finish_reason == "stop"
                self._reason = "stop" if is_stopped else reason
        return None
