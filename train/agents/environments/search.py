"""Questions that take several searches: chains of facts spread over documents, each answer unique and checked.

In a folder of one's own nothing is known of facts, so there the question is a sentence with a number left out.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments import corpus as corpora
from train.agents.environments.calling import describe
from train.agents.environments.corpus import NUMBERS, RELATIONS, Corpus, Facts
from train.agents.environments.drawing import random_for, split_of
from train.agents.environments.interpreter import grade_number
from train.agents.synthesis.database import is_same
from train.agents.tools import Tool, ToolError
from train.rl import answer as answers

SYSTEM = (
    "You answer questions from a collection of documents. Search it, open and read what you find."
)
PER_CORPUS = 60  # questions of one generated corpus
MOST_HOPS = 4
RESULTS = 8
PAGE = 4_000  # characters that `open` shows
GAP = "____"


class SearchEpisode:
    """An attempt at one question.

    Args:
        corpus: That is searched.
        answer: The reference.

    Attributes:
        tools: `search`, `open` and `find`.
    """

    def __init__(self, corpus: Corpus, answer: str) -> None:
        """Keep both."""
        self._corpus, self._answer = corpus, answer
        whole = {"type": "integer", "description": "The document's number."}
        self.tools: Sequence[Tool] = [
            describe(
                self._search, f"Search for words. Returns at most {RESULTS} documents: number, title and a snippet.",
                name="search", query="Words; documents with any of them are found, those with more first.",
            ),
            describe(
                self._open, f"Read a document from a character on, {PAGE} characters at a time.",
                name="open", optional=("start",), document=whole, start={"type": "integer", "description": "(0)"},
            ),
            describe(
                self._find, "List the sentences of a document that have a word or phrase.",
                name="find", document=whole, phrase="The word or phrase.",
            ),
        ]  # fmt: skip

    def grade(self, answer: str) -> Grade:
        """Compare with the reference: numbers by value, names without regard to case."""
        if self._answer.isdecimal():
            return grade_number(answer, self._answer, 0.0)
        final = answers.read(answer, "chat", cut=False).final
        right = final is not None and is_same(final, self._answer, "exact")
        return Grade(score=float(right), note="" if right else f"not {self._answer!r}")

    def _search(self, query: str) -> list[dict[str, object]]:
        return self._corpus.search(query, RESULTS)

    def _open(self, document: int, start: int = 0) -> dict[str, object]:
        title, text = self._document(document)
        if not 0 <= start <= len(text):
            raise ToolError(
                f"document {document} has {len(text)} characters; start={start} is not among them"
            )
        return {
            "title": title,
            "text": text[start : start + PAGE],
            "more": len(text) > start + PAGE,
        }

    def _find(self, document: int, phrase: str) -> list[str]:
        _, text = self._document(document)
        return [s for s in sentences(text) if phrase.casefold() in s.casefold()][:RESULTS]

    def _document(self, number: int) -> tuple[str, str]:
        found = self._corpus.document(number) if abs(number) < 2**62 else None
        if found is None:
            raise ToolError(f"there is no document {number}")
        return found


class Search:
    """Questions on generated documents, or on a folder of text.

    Args:
        folder: Of text files; None generates documents.
    """

    summary = "answer from documents by several searches: chains of facts, with full-text search, open and find"

    def __init__(self, folder: Path | None = None) -> None:
        """Index the folder."""
        self.name = "search" if folder is None else f"search:{folder}"
        self._own = None if folder is None else corpora.read_folder(folder)

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield questions: without end on generated documents, each sentence once on a folder's."""
        if self._own is not None:
            yield from self._gaps(split)
            return
        key = seed if split == "train" else 0
        for number in itertools.count():
            name = f"{split}-{key}-{number // PER_CORPUS}"
            rng = random_for("search", "question", split, key, number)
            corpus = _generated(name)
            assert corpus.facts is not None
            question, answer, hops = ask(corpus.facts, rng)
            if split_of(question) == split:
                yield Task(
                    name=f"{split}-{key}-{number}",
                    environment=self.name,
                    prompt=f"What is {question}? Answer with the {'number' if answer.isdecimal() else 'name'} alone.",
                    system=SYSTEM,
                    data={"corpus": name, "answer": answer, "hops": hops},
                    difficulty=len(hops) - 3,  # a thing and two relations are the least
                )

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[SearchEpisode]:
        """Open the question's documents."""
        corpus = self._own if self._own is not None else _generated(task.data["corpus"])
        yield SearchEpisode(corpus, task.data["answer"])

    def solve(self, task: Task, call: Call) -> str:
        """Follow the chain of facts, each read off a document that a search finds."""
        if "hops" not in task.data:
            before, _, after = task.data["sentence"].partition(GAP)
            for found in call("search", query=f"{before} {after}"):
                for sentence in call("find", document=found["document"], phrase=before):
                    if sentence.startswith(before) and sentence.endswith(after):
                        return sentence[len(before) : len(sentence) - len(after)]
            raise AssertionError("a sentence is found by its own words")
        first, *relations = task.data["hops"]
        name = first
        for relation in relations:
            name = _read(name, relation, call)
        return name

    def _gaps(self, split: Split) -> Iterator[Task]:
        """Yield sentences with one number, which occur once in all of the folder."""
        assert self._own is not None
        said = [s for _, text in self._own.documents() for s in sentences(text)]
        for sentence in dict.fromkeys(said):
            numbers = re.findall(r"(?<![\w.,-])\d{2,}(?![\w-])", sentence)
            gapped = re.sub(r"(?<![\w.,-])\d{2,}(?![\w-])", GAP, sentence)
            before = gapped.partition(GAP)[0]
            good = len(numbers) == 1 and len(before) > 10 and 40 <= len(sentence) <= 300
            if (
                good
                and GAP not in sentence
                and said.count(sentence) == 1
                and split_of(gapped) == split
            ):
                yield Task(
                    name=f"{split}-{random_for(gapped).getrandbits(48):012x}",
                    environment=self.name,
                    prompt="Which number is left out of this sentence of the documents? Answer with it"
                    f" alone.\n{gapped}",
                    system=SYSTEM,
                    data={"sentence": gapped, "answer": numbers[0]},
                )


@functools.lru_cache(maxsize=4)
def _generated(name: str) -> Corpus:
    return corpora.generate(random_for("search", "corpus", name))


def ask(facts: Facts, rng: Random) -> tuple[str, str, list[str]]:
    """Build a question on a chain of facts.

    Every relation gives one thing one other, so the answer is unique; it never stands in the question.

    Args:
        facts: Of the corpus.
        rng: Draws it.

    Returns:
        The question, its answer, and the first thing and the relations that lead from it to the answer.
    """
    while True:
        hops = [rng.choice(sorted(facts.kinds))]
        words, name = hops[0], hops[0]
        for place in range(depth := rng.randint(2, MOST_HOPS)):
            links = [r for r in RELATIONS if RELATIONS[r][0] == facts.kinds[name]]
            number = [r for r in NUMBERS if NUMBERS[r][0] == facts.kinds[name]]
            if place == depth - 1 and (rng.random() < 0.5 or not links):
                hops.append(number[0])
                return (
                    NUMBERS[number[0]][-1].format(a=words),
                    str(facts.numbers[name, number[0]]),
                    hops,
                )
            if not links:
                break
            hops.append(rng.choice(links))
            words = RELATIONS[hops[-1]][-1].format(a=words)
            name = facts.links[name, hops[-1]]
        if len(hops) == depth + 1 and name != hops[0]:
            return words, name, hops


def _read(name: str, relation: str, call: Call) -> str:
    """Find a thing's document, and read off what a relation gives it."""
    for found in call("search", query=name):
        if found["title"] == name:
            return _value(name, relation, call("open", document=found["document"])["text"])
    raise AssertionError(f"there is no document of {name}")


def read_fact(corpus: Corpus, name: str, relation: str) -> str:
    """Read off a thing's document what a relation gives it.

    Args:
        corpus: A generated one.
        name: Of the thing.
        relation: The relation.

    Returns:
        The other thing's name, or a number.
    """
    (text,) = (text for title, text in corpus.documents() if title == name)
    return _value(name, relation, text)


def _value(name: str, relation: str, text: str) -> str:
    ways = RELATIONS[relation][2] if relation in RELATIONS else NUMBERS[relation][3]
    for way in ways:
        pattern = re.escape(way).replace(r"\{a\}", re.escape(name))
        pattern = pattern.replace(r"\{b\}", "(.+)").replace(r"\{n\}", r"(\d+)")
        for sentence in sentences(text):
            if match := re.fullmatch(pattern, sentence):
                return match[1]
    raise AssertionError(f"the document of {name} says nothing of its {relation}")


def sentences(text: str) -> list[str]:
    """Return a text's sentences, white space between words made one blank."""
    return [
        s.strip()
        for s in re.split(r"(?<=[.!?])\s+(?=[\"'A-Z0-9])", " ".join(text.split()))
        if s.strip()
    ]
