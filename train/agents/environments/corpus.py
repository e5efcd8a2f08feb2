"""What is searched: documents generated from linked facts, or a folder's text files, in a full-text index."""

import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dsv32_jax.errors import UsageError

SYLLABLES = (
    "ba",
    "cor",
    "del",
    "fen",
    "gar",
    "hol",
    "ir",
    "jas",
    "kel",
    "lum",
    "mor",
    "nev",
    "or",
    "pel",
    "quin",
    "ras",
    "sel",
    "tor",
    "ul",
    "ven",
    "wel",
    "yar",
    "zin",
)
ENDS: Mapping[str, tuple[str, ...]] = {
    "person": ("a", "o", "is", "en"),
    "firm": (" Works", " & Sons", " Mills", " Company"),
    "town": ("ford", "bury", "stad", "mouth"),
    "river": (" Water", " Brook", " River"),
    "device": ("graph", "scope", "meter", "phone"),
    "festival": (" Fair", " Week", " Festival"),
}
COUNTS = {"person": 40, "firm": 24, "town": 18, "river": 8, "device": 24, "festival": 14}
# Relation -> the kinds that it joins, ways to write it down, and how a question says it.
RELATIONS: Mapping[str, tuple[str, str, tuple[str, ...], str]] = {
    "birthplace": (
        "person",
        "town",
        ("{a} was born in {b}.", "{b} is where {a} was born."),
        "the birthplace of {a}",
    ),
    "employer": (
        "person",
        "firm",
        ("{a} spent a working life at {b}.", "Most of {a}'s career was with {b}."),
        "the employer of {a}",
    ),
    "founder": (
        "firm",
        "person",
        ("{a} was founded by {b}.", "{b} set up {a}."),
        "the founder of {a}",
    ),
    "seat": (
        "firm",
        "town",
        ("{a} has its seat in {b}.", "The offices of {a} stand in {b}."),
        "the seat of {a}",
    ),
    "water": ("town", "river", ("{a} lies on {b}.", "{b} runs through {a}."), "the river at {a}"),
    "mayor": (
        "town",
        "person",
        ("The mayor of {a} is {b}.", "{a} elected {b} as its mayor."),
        "the mayor of {a}",
    ),
    "inventor": (
        "device",
        "person",
        ("The {a} was invented by {b}.", "{b} devised the {a}."),
        "the inventor of {a}",
    ),
    "maker": (
        "device",
        "firm",
        ("The {a} is made by {b}.", "{b} builds the {a}."),
        "the maker of {a}",
    ),
    "place": (
        "festival",
        "town",
        ("{a} takes place in {b}.", "Every year {b} hosts {a}."),
        "the place of {a}",
    ),
    "patron": (
        "festival",
        "firm",
        ("{a} is paid for by {b}.", "{b} sponsors {a}."),
        "the patron of {a}",
    ),
}
NUMBERS: Mapping[str, tuple[str, int, int, tuple[str, ...], str]] = {
    "birth": (
        "person",
        1820,
        1975,
        ("{a} came into the world in {n}.", "The year of birth of {a} is {n}."),
        "the year of birth of {a}",
    ),
    "staff": (
        "firm",
        12,
        9400,
        ("{a} employs {n} people.", "{n} people work for {a}."),
        "the number of people whom {a} employs",
    ),
    "residents": (
        "town",
        800,
        96000,
        ("{a} has {n} residents.", "{n} people live in {a}."),
        "the number of residents of {a}",
    ),
    "length": (
        "river",
        14,
        870,
        ("{a} is {n} km long.", "From source to mouth {a} measures {n} km."),
        "the length in km of {a}",
    ),
    "weight": (
        "device",
        3,
        940,
        ("The {a} weighs {n} kg.", "A weight of {n} kg is given for the {a}."),
        "the weight in kg of {a}",
    ),
    "visitors": (
        "festival",
        300,
        88000,
        ("{a} draws {n} visitors.", "{n} visitors come to {a}."),
        "the number of visitors of {a}",
    ),
}
FILLER = (
    "Little else is recorded before that time.",
    "A portrait hangs in the town hall.",
    "Opinions on this differ.",
    "The archives were damaged by a flood.",
    "Local schools tell the story still.",
    "A plaque marks the spot.",
    "Several letters mention it in passing.",
    "Later accounts repeat this without a source.",
)
SNIPPET_WORDS = 24
MOST_BYTES = 2**21  # of a file


@dataclass(frozen=True)
class Facts:
    """What a generated corpus says.

    Attributes:
        kinds: Name -> kind.
        links: (name, relation) -> name.
        numbers: (name, relation) -> number.
    """

    kinds: Mapping[str, str]
    links: Mapping[tuple[str, str], str]
    numbers: Mapping[tuple[str, str], int]


class Corpus:
    """Documents in a full-text index; threads may share it.

    Args:
        documents: Title and text of each.
        facts: What they say, where that is known.
    """

    def __init__(self, documents: Iterable[tuple[str, str]], facts: Facts | None = None) -> None:
        """Index them."""
        self.facts = facts
        self._lock = threading.Lock()
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute(
            "CREATE VIRTUAL TABLE page USING fts5(title, body, tokenize = 'porter unicode61')"
        )
        self._db.executemany("INSERT INTO page VALUES (?, ?)", documents)

    def search(self, query: str, limit: int) -> list[dict[str, object]]:
        """Return the documents that fit a query best.

        Args:
            query: Words, any of which may be there.
            limit: Of documents.

        Returns:
            Number, title and a snippet of each; the best first.
        """
        words = re.findall(r"\w+", query)
        if not words:
            return []
        query = (
            f"SELECT rowid, title, snippet(page, 1, '', '', '...', {SNIPPET_WORDS}) FROM page"
            " WHERE page MATCH ? ORDER BY bm25(page, 4.0, 1.0), rowid LIMIT ?"
        )
        rows = self._rows(query, " OR ".join(f'"{word}"' for word in words), limit)
        return [dict(zip(("document", "title", "snippet"), row, strict=True)) for row in rows]

    def document(self, number: int) -> tuple[str, str] | None:
        """Return a document's title and text; None where there is none of that number."""
        return next(iter(self._rows("SELECT title, body FROM page WHERE rowid = ?", number)), None)

    def documents(self) -> list[tuple[str, str]]:
        """Return all, in order."""
        return self._rows("SELECT title, body FROM page ORDER BY rowid")

    def _rows(self, query: str, *values: str | int) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def generate(rng: Random) -> Corpus:
    """Write a corpus: a document for each thing, with its facts, and what others' facts say of it left to them.

    Args:
        rng: Draws it.

    Returns:
        The corpus, with its facts.
    """
    names = _names(rng)
    links, numbers, lines = {}, {}, {name: [] for kind in names for name in names[kind]}  # type: ignore[var-annotated]
    for relation, (kind, other, ways, _) in RELATIONS.items():
        for name in names[kind]:
            links[name, relation] = rng.choice([n for n in names[other] if n != name])
            lines[name].append(rng.choice(ways).format(a=name, b=links[name, relation]))
    for relation, (kind, low, high, ways, _) in NUMBERS.items():
        for name in names[kind]:
            numbers[name, relation] = rng.randrange(low, high)
            lines[name].append(rng.choice(ways).format(a=name, n=numbers[name, relation]))
    kinds = {name: kind for kind in names for name in names[kind]}
    documents = []
    for name, said in lines.items():
        said += rng.sample(FILLER, 2)
        rng.shuffle(said)
        documents.append((name, f"{name} is a {kinds[name]}. {' '.join(said)}"))
    rng.shuffle(documents)
    return Corpus(documents, Facts(kinds, links, numbers))


def _names(rng: Random) -> dict[str, list[str]]:
    taken: set[str] = set()
    found: dict[str, list[str]] = {}
    for kind, count in COUNTS.items():
        found[kind] = []
        while len(found[kind]) < count:
            stem = "".join(rng.sample(SYLLABLES, 2))
            name = (stem + rng.choice(ENDS[kind])).capitalize()
            name = name if kind in ("person", "town", "device") else name.title()
            if kind == "person":
                name += f" {''.join(rng.sample(SYLLABLES, 2)).capitalize()}"
            if name not in taken:
                taken.add(name)
                found[kind].append(name)
    return found


def read_folder(folder: Path) -> Corpus:
    """Index a folder's text files, those in its folders too.

    Args:
        folder: With files that end in .txt, .md, .rst or .py.

    Returns:
        The corpus, a document a file.

    Raises:
        UsageError: If there is no such file.
    """
    paths = sorted(
        p for p in folder.rglob("*") if p.suffix in (".txt", ".md", ".rst", ".py") and p.is_file()
    )
    documents = [
        (str(path.relative_to(folder)), path.read_text(encoding="utf-8", errors="replace"))
        for path in paths
        if path.stat().st_size <= MOST_BYTES
    ]
    if not documents:
        raise UsageError(
            f"{folder} has no text files (.txt, .md, .rst, .py of at most {MOST_BYTES} bytes)"
        )
    return Corpus(documents)
