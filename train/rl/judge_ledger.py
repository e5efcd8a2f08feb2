"""What a judge has said and what it cost, kept so that nothing is paid for twice."""

import threading

from dsv32_jax import json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError, WorkFailedError


class Ledger:
    """Replies on disk: what they said, and what they cost; threads may share it.

    Args:
        path: A file of JSON lines; need not exist. One in a bucket is written once a minute and at the end.
        cap: Tokens that all replies may cost, earlier starts of the run included; None has no cap.

    Attributes:
        scores: Of each question that has one.
        spent: Tokens.

    Raises:
        UsageError: If it is no such file.
    """

    def __init__(self, path: Location, cap: int | None) -> None:
        """Read what earlier starts wrote."""
        self._cap = cap
        self._reserved = 0
        self._changed = threading.Condition()
        try:
            rows = json_files.read_lines(path)
            self.scores = {row["key"]: row["score"] for row in rows if row["score"] is not None}
            self.spent = sum(row["tokens"] for row in rows)
            # A line that a crash has torn goes, or the next would be written behind it.
            json_files.replace_text(path, "".join(map(json_files.line_of, rows)))
            self._lines = json_files.LineWriter(path)
        except (OSError, KeyError, TypeError) as error:
            raise UsageError(
                f"the judge's ledger {path} can not be read: {type(error).__name__}: {error}"
            ) from error

    def add(self, key: str, score: float | None, tokens: int, **more: str | int) -> None:
        """Write a reply down."""
        row = {"key": key, "score": score, "tokens": tokens, **more}
        with self._changed:
            self._lines.write(json_files.line_of(row))
            if score is not None:
                self.scores[key] = score

    def reserve(self, tokens: int) -> None:
        """Set tokens aside for a request, waiting for what others turn out not to need.

        Args:
            tokens: The most that it can cost.

        Raises:
            WorkFailedError: If the cap has no room.
        """
        if self._cap is None:
            return
        with self._changed:
            while self.spent + self._reserved + tokens > self._cap:
                if self._reserved == 0:
                    raise WorkFailedError(
                        f"the judge's cap of {self._cap} tokens leaves no room for a request:"
                        f" {self.spent} are spent; raise max_total_tokens to go on"
                    )
                self._changed.wait()
            self._reserved += tokens

    def release(self, tokens: int, *, spent: int) -> None:
        """Put back what was set aside, and count what was spent."""
        with self._changed:
            self.spent += spent
            self._reserved -= tokens if self._cap is not None else 0
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file."""
        with self._changed:
            self._lines.close()
