"""Who owns which page of the cache, and which pages still hold the beginning of a text."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

ROOT = b""  # what comes before a text's first page


class PagePool:
    """Hands out pages, and finds those that already hold a prompt's beginning.

    A page is held by any number of sequences. A full page whose content is known stays findable after its last holder
    has let go of it, until the page is needed for something else; the one unused longest goes first.

    A page's name is a hash of all tokens up to its end, so equal names mean equal rows. With `lookahead` the token
    after the page counts too: the MTP module's last row of a page depends on it.
    """

    def __init__(self, n_pages: int, page_size: int, *, lookahead: bool):
        """Start with every page free.

        Args:
            n_pages: Pages there are.
            page_size: Tokens of a page.
            lookahead: Name pages by the token after them too.
        """
        self.page_size = page_size
        self._lookahead = int(lookahead)
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, not held; oldest first

    @property
    def n_available(self) -> int:
        """Pages that can be taken, remembered ones included."""
        return len(self._free) + len(self._idle)

    def take(self) -> int | None:
        """Return a page for new rows, or None where every page is held."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._named[self._names.pop(page)]
        else:
            return None
        self._holders[page] = 1
        return page

    def let_go(self, page: int) -> None:
        """Give up one hold on a page."""
        assert self._holders[page] > 0, f"page {page} is held by nobody"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._names:
            self._idle[page] = None
        else:
            self._free.append(page)

    def find(self, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Hold and return the pages that have the longest beginning of a text.

        Args:
            tokens: The text; its last token is never found, as somebody wants its logits.

        Returns:
            (pages in order, now held once more; the name of the last one, ROOT where there is none).
        """
        found: list[int] = []
        last_name = ROOT
        for first in range(0, len(tokens) - self.page_size, self.page_size):
            name = self._name(last_name, tokens, first)
            if name not in self._named:
                break
            found.append(self._named[name])
            last_name = name
        for page in found:
            self._holders[page] += 1
            self._idle.pop(page, None)
        return found, last_name

    def remember(self, tokens: Sequence[int], index: int, page: int, before: bytes) -> bytes:
        """Name a full page, so that it can be found.

        Args:
            tokens: The text that the page is part of, up to `lookahead` tokens past the page at least.
            index: Which page of the text it is.
            page: The page.
            before: The name of the text's page before, ROOT for the first.

        Returns:
            The name.
        """
        name = self._name(before, tokens, index * self.page_size)
        # Another sequence may have written the same rows into a page of its own; one of them is enough.
        if name not in self._named and page not in self._names:
            self._named[name] = page
            self._names[page] = name
        return name

    def _name(self, before: bytes, tokens: Sequence[int], first: int) -> bytes:
        part = tokens[first : first + self.page_size + self._lookahead]
        content = np.asarray(part, np.int64).tobytes()
        return hashlib.blake2b(before + content, digest_size=16).digest()
