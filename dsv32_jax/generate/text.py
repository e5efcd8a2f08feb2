"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from dsv32_jax.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder makes of a character's first bytes
MAX_PENDING = 8  # tokens that one character may need; more are no character


class TextStream:
    """Turns one sequence's tokens into text.

    The pieces together are `decode(tokens)` up to the first stop string.

    Attributes:
        stopped: Whether a stop string was found; nothing more is given out then.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Begin a text.

        Args:
            tokenizer: Decodes the tokens.
            stop: Strings that end the text and are not part of it.

        Raises:
            ValueError: If a stop string is empty.
        """
        if "" in stop:
            raise ValueError("stop='' would end every text before its first character")
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._begin = self._done = (
            0  # tokens before `begin` are out of sight, those before `done` are decoded
        )
        self._held = ""

    def push(self, token: int) -> str:
        """Take a token.

        Args:
            token: Its id.

        Returns:
            The text that is now certain, maybe none.
        """
        self._ids.append(int(token))
        # The tokens just before are decoded along, as a word's first token may drop the space before it.
        known = self._tokenizer.decode(self._ids[self._begin : self._done])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if text.endswith(UNFINISHED) and len(self._ids) - self._done < MAX_PENDING:
            return ""
        self._begin, self._done = self._done, len(self._ids)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """End the text.

        Returns:
            What was held back.
        """
        known = self._tokenizer.decode(self._ids[self._begin : self._done])
        text = self._tokenizer.decode(self._ids[self._begin :])
        self._done = len(self._ids)
        out = self._release(text[len(known) :])
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _release(self, piece: str) -> str:
        """Return the text before a stop string, or all but what may become one."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many of the text's last characters begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
