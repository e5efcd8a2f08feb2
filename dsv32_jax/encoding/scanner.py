"""Find the first of some strings in a text that comes in pieces."""

import re


class Stops:
    """Strings to look for, none of which begins another.

    Args:
        *texts: the strings, none of them empty; with none at all nothing is ever found.
    """

    def __init__(self, *texts: str) -> None:
        """Prepare the search; the class docstring has the arguments."""
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._longest = max(map(len, texts), default=0)
        self._beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))

    def search(self, text: str, start: int, *, final: bool) -> tuple[int, str | None]:
        """Find the first of the strings, or how much of the text surely holds none.

        Args:
            text: where to search.
            start: where to begin.
            final: whether no more text will come.

        Returns:
            where a string begins, and that string; or where the shortest tail begins that more
            text could turn into one of the strings, and None.
        """
        found = self._pattern.search(text, start)
        tail = max(start, len(text) - self._longest + 1)
        if final or (found and found.start() < tail):
            certain = len(text)
        else:
            certain = next(
                (i for i in range(tail, len(text)) if text[i:] in self._beginnings), len(text)
            )
        # A longer string may begin before the one found and still be incomplete.
        if found and found.start() < certain:
            return found.start(), found.group()
        return certain, None


class Scanner:
    """Cuts a growing text at the strings that are looked for.

    Each piece is looked at once, apart from a tail shorter than the longest string, so the work is
    linear in the text however it is cut.

    Attributes:
        position: how many code points have been given out or passed.
    """

    def __init__(self) -> None:
        """Begin with no text."""
        self._text = ""
        self._start = 0
        self.position = 0

    def feed(self, piece: str) -> None:
        """Add text.

        Args:
            piece: any string.
        """
        self._text = self._text[self._start :] + piece
        self._start = 0

    def advance(self, stops: Stops, *, final: bool) -> tuple[str, str | None]:
        """Pass the text up to and including the next string that is looked for.

        Args:
            stops: the strings.
            final: whether no more text will come.

        Returns:
            the text before the string, and the string. If none is there yet: the text that surely
            is before it, and None.
        """
        end, stop = stops.search(self._text, self._start, final=final)
        before = self._text[self._start : end]
        self.position += len(before) + len(stop or "")
        self._start = end + len(stop or "")
        return before, stop
