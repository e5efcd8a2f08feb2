"""The JSON objects that completions are answered with."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv32_jax.generate.text import UNFINISHED
from dsv32_jax.serve.answers import ChatAnswer, DrawnToken, TextAnswer


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What all objects of one request share.

    Attributes:
        model: The model's name.
        chat: Whether they are of /v1/chat/completions.
        n_prompt: Tokens of the prompt.
        logprobs: Whether log-probabilities are wanted.
        include_usage: Whether a stream ends with the counts of tokens.
        id: The request's name.
        created: Unix time in seconds.
    """

    model: str
    chat: bool
    n_prompt: int
    logprobs: bool
    include_usage: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[TextAnswer | ChatAnswer]) -> dict[str, Any]:
        """Return the answer to a request without stream.

        Args:
            answers: The choices, all over.

        Returns:
            The object.
        """
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        return self._object("", choices) | {"usage": self.usage(answers)}

    def opening(self, n: int) -> list[dict[str, Any]]:
        """Return a stream's first chunks, which say who speaks; a plain text has none."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(i, {"delta": role}, None) for i in range(n)] if self.chat else []

    def chunk(
        self, i: int, delta: dict[str, Any], tokens: Sequence[DrawnToken], reason: str | None = None
    ) -> dict[str, Any]:
        """Return a piece of one choice.

        Args:
            i: Which choice.
            delta: What is new.
            tokens: Tokens since the last chunk.
            reason: Why the choice is over, in its last chunk.

        Returns:
            The chunk.
        """
        new = {"delta": delta} if self.chat else {"text": "", **delta}
        return self._chunk(i, {**new, "logprobs": self._logprobs(tokens)}, reason)

    def last(self, answers: Sequence[TextAnswer | ChatAnswer]) -> list[dict[str, Any]]:
        """Return what a stream ends with: the counts, where they are wanted."""
        if not self.include_usage:
            return []
        return [self._object(self._chunk_kind, []) | {"usage": self.usage(answers)}]

    def usage(self, answers: Sequence[TextAnswer | ChatAnswer]) -> dict[str, int]:
        """Return the counts of tokens."""
        drawn = sum(answer.n_tokens for answer in answers)
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": drawn,
            "total_tokens": self.n_prompt + drawn,
        }

    @property
    def _chunk_kind(self) -> str:
        return ".chunk" if self.chat else ""

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": f"chat.completion{kind}" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, i: int, new: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": i, "logprobs": None, **new, "finish_reason": reason}
        chunk = self._object(self._chunk_kind, [choice])
        return chunk | {"usage": None} if self.include_usage else chunk

    def _choice(self, i: int, answer: TextAnswer | ChatAnswer) -> dict[str, Any]:
        if isinstance(answer, TextAnswer):
            said: dict[str, Any] = {"text": answer.text}
        else:
            said = {"message": answer.message(), **problems(answer)}
        end = {"logprobs": self._logprobs(answer.tokens), "finish_reason": answer.finish_reason}
        return {"index": i, **said, **end}

    def _logprobs(self, tokens: Sequence[DrawnToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if not self.chat:
            return {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.log_p for token in tokens],
            }
        return {"content": [_chat_logprob(token) for token in tokens]}


def problems(answer: TextAnswer | ChatAnswer) -> dict[str, Any]:
    """Return the field that says what is wrong with a message; nothing where nothing is.

    Differs from OpenAI: the field is our own.
    """
    found = answer.problems if isinstance(answer, ChatAnswer) else []
    return {"problems": found} if found else {}


def _chat_logprob(token: DrawnToken) -> dict[str, Any]:
    known = None if UNFINISHED in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.log_p, "bytes": known, "top_logprobs": []}
