"""Whether a response stays in its prompt's language, told by scripts."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping

# Language -> scripts that its words are written in, as the first word of a character's Unicode name.
SCRIPTS: Mapping[str, frozenset[str]] = {
    "latin": frozenset({"LATIN", "FULLWIDTH"}),
    "chinese": frozenset({"CJK"}),
    "japanese": frozenset({"HIRAGANA", "KATAKANA", "CJK", "HALFWIDTH"}),
    "korean": frozenset({"HANGUL"}),
    "cyrillic": frozenset({"CYRILLIC"}),
    "greek": frozenset({"GREEK"}),
    "arabic": frozenset({"ARABIC"}),
    "hebrew": frozenset({"HEBREW"}),
    "devanagari": frozenset({"DEVANAGARI"}),
    "bengali": frozenset({"BENGALI"}),
    "tamil": frozenset({"TAMIL"}),
    "thai": frozenset({"THAI"}),
    "georgian": frozenset({"GEORGIAN"}),
    "armenian": frozenset({"ARMENIAN"}),
}
KANA = frozenset({"HIRAGANA", "KATAKANA", "HALFWIDTH"})
WITHOUT_SPACES = KANA | {"CJK", "THAI", "LAO", "KHMER", "MYANMAR"}  # a letter counts as a word

# What belongs to no language: code, formulas, LaTeX commands, tags, addresses.
NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[A-Za-z]+|</?\w+>|https?://\S+",
    re.DOTALL,
)
WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|[\u0300-\u036f\u0900-\u0dff'’])*")


def share(text: str, target: str) -> float:
    """Return the share of a text's words that are in a language's script.

    A run of letters of one script is a word; in scripts without spaces each letter is one. Code, formulas, addresses
    and single Latin letters count for nothing. In Japanese a line of Chinese characters alone is not Japanese.

    Args:
        text: The response, thinking included.
        target: A language of `SCRIPTS`. Languages that share a script are not told apart: "latin" is all of them.

    Returns:
        Between 0 and 1; 1 where there is no word, as in a bare number.
    """
    allowed = SCRIPTS[target]
    right = total = 0
    for line in re.split(r"[\n。！？]", NO_PROSE.sub(" ", text)):
        counts = _count(line)
        total += counts.total()
        if target != "japanese" or any(counts[script] for script in KANA):
            right += sum(counts[script] for script in allowed)
    return right / total if total else 1.0


def detect(text: str) -> str | None:
    """Return the language of `SCRIPTS` that most of a text's words are in; None where it has no such words.

    Args:
        text: A prompt.

    Returns:
        The language. Chinese characters beside at least a tenth as many kana are Japanese.
    """
    counts = _count(NO_PROSE.sub(" ", text))
    kana = sum(counts[script] for script in KANA)
    by_language = {
        name: sum(counts[script] for script in scripts)
        for name, scripts in SCRIPTS.items()
        if name != "japanese" or kana >= 0.1 * counts["CJK"]
    }
    # Where Chinese and Japanese are equal there are no kana.
    best = max(by_language, key=by_language.__getitem__)
    return best if by_language[best] else None


def _count(text: str) -> Counter[str]:
    """Count words by script."""
    counts: Counter[str] = Counter()
    for word in WORD.findall(text):
        for script, length in _runs(word):
            if script in WITHOUT_SPACES:
                counts[script] += length
            elif length > 1 or script != "LATIN":
                counts[script] += 1
    return counts


def _runs(word: str) -> Iterator[tuple[str, int]]:
    """Split a run of letters where the script changes: (script, letters)."""
    script, length = "", 0
    for letter in word:
        if not letter.isalpha():
            continue  # accents and apostrophes go with the letter before
        name = unicodedata.name(letter, "UNKNOWN").partition(" ")[0].partition("-")[0]
        if name != script and length:
            yield script, length
            length = 0
        script, length = name, length + 1
    if length:
        yield script, length
