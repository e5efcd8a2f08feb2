"""The report's search-agent pipeline: a builder's questions, several answerers, a verifier, and what is kept.

A question is kept only if its own answer is found right, every time, and every answerer's is found wrong, every
time: so neither one that is too easy nor one that has two right answers is.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from train.agents.environments import corpus as corpora
from train.agents.environments.corpus import Corpus
from train.agents.environments.drawing import random_for
from train.agents.environments.search import ask, read_fact
from train.agents.synthesis.database import is_same

Verdict = Literal["kept", "answer not found right", "a candidate not found wrong"]
PASSES = 3  # of the verifier over each answer
Answerer = Callable[[str], str]  # a question in, an answer out; "" for none
Check = Callable[[str, str, int], bool]  # question, answer, which pass -> whether it is found right


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a builder made.

    Attributes:
        text: What is asked.
        answer: The builder's own.
        hops: The first thing and the relations that lead from it to the answer, where the builder knows them.
    """

    text: str
    answer: str
    hops: tuple[str, ...] = ()


def judge(question: Question, answerers: Sequence[Answerer], check: Check) -> Verdict:
    """Decide about a question.

    Args:
        question: With its answer.
        answerers: Different checkpoints, prompts or seeds.
        check: The verifier.

    Returns:
        "kept", or why it is not.
    """

    def found_right(answer: str) -> list[bool]:
        return [check(question.text, answer, number) for number in range(PASSES)]

    if not all(found_right(question.answer)):
        return "answer not found right"
    candidates = [answerer(question.text) for answerer in answerers]
    if any(any(found_right(answer)) for answer in candidates if answer):
        return "a candidate not found wrong"
    return "kept"


def build_from_facts(corpus: Corpus, seed: int) -> Iterator[Question]:
    """Build questions that need no model: chains of a generated corpus' facts.

    Args:
        corpus: With facts.
        seed: Of the questions.

    Yields:
        Questions without end.
    """
    assert corpus.facts is not None
    number = 0
    while True:
        text, answer, hops = ask(corpus.facts, random_for("questions", seed, number))
        yield Question(text=text, answer=answer, hops=tuple(hops))
        number += 1


def check_in_documents(corpus: Corpus, questions: Mapping[str, Question]) -> Check:
    """Return a verifier that reads chains off the documents, not off the facts that these were written from.

    Args:
        corpus: That is searched.
        questions: By text.

    Returns:
        The verifier.
    """

    @functools.cache
    def read(text: str) -> str:
        name, *relations = questions[text].hops
        for relation in relations:
            name = read_fact(corpus, name, relation)
        return name

    return lambda text, answer, number: is_same(answer, read(text), "exact")


def filter_questions(
    questions: Sequence[Question], answerers: Sequence[Answerer], check: Check
) -> tuple[list[Question], Mapping[str, int]]:
    """Keep what is worth it.

    Args:
        questions: Of a builder.
        answerers: That try them.
        check: The verifier.

    Returns:
        The questions kept, each once, and how many came to each verdict.
    """
    verdicts = {question: judge(question, answerers, check) for question in questions}
    kept = [question for question, verdict in verdicts.items() if verdict == "kept"]
    return kept, collections.Counter(verdicts.values())


def first_hop(corpus: Corpus) -> Answerer:
    """Return an answerer that stops after one search: the best document's title for the whole question.

    Args:
        corpus: That is searched.

    Returns:
        The answerer.
    """

    def answer(text: str) -> str:
        found = corpus.search(text, 1)
        return str(found[0]["title"]) if found else ""

    return answer


def generated(name: str) -> Corpus:
    """Return the generated corpus of a name.

    Args:
        name: Any.

    Returns:
        The same for the same name.
    """
    return corpora.generate(random_for("questions", "corpus", name))
