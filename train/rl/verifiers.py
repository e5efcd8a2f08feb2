"""Rules that judge a final answer: the answer and its task in, a number in [0, 1] out; 0 for whatever can not be read.

They are pure but for time and memory: an answer can ask a parser for more than there is of either, so they run in
`pool`, which ends them. A reference that can not be read raises, as no answer can then be right. Programs are judged in
a sandbox instead, see `code`.
"""

import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from train.rl import problems
from train.rl.tasks import Task, Verifier

MAX_CHARS = 1000  # of an answer to parse; longer ones are no final answers
REL_TOL = Fraction(1, 10**9)  # of numbers with a point or a unit: rounding alone

NUMBER = re.compile(
    r"""(?P<sign>[+-]?)\s*
    (?P<whole>\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?P<part>\.\d*)?
    (?:(?:[eE]|\s*(?:x|\*|×|\\times|\\cdot|·)\s*10\s*(?:\^|\*\*)\s*)
       (?P<brace>\{)?\(?(?P<exponent>[+-]?\d{1,3})\)?(?(brace)\}))?
    (?:\s*/\s*(?P<denominator>\d+))?""",
    re.VERBOSE | re.ASCII,
)
# Names with exponents of one digit: what the parser of units is given must not make it compute.
UNIT_NAME = r"(?:[^\W\d_]+|°[CF]?|%|\$)(?:\s*(?:\^|\*\*)\s*-?\d)?"
UNIT = re.compile(rf"{UNIT_NAME}(?:\s*[*/]\s*{UNIT_NAME}|\s+{UNIT_NAME})*")
SAME = {"−": "-", "–": "-", "·": "*", "⋅": "*", "²": "^2", "³": "^3", "⁻¹": "^-1", "⁻²": "^-2"}
# An answer that still has a sum or a product in it may be the question said again.
UNFINISHED = re.compile(r"(?<=[\w)}])\s*(?:[+*·×-]|\\times|\\cdot|\\div|÷)\s*(?!\s*10\s*\^)")


def exact(answer: str, task: Task) -> float:
    """Compare texts, white space and the composition of accents apart; `data.ignore_case` also ignores case."""
    return float(_plain(answer, task.data) == _plain(task.answer, task.data))


def _plain(text: str, data: Mapping[str, Any]) -> str:
    # NFC, not NFKC: the latter would make x² and x2 the same.
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if data.get("ignore_case") else text


def numeric(answer: str, task: Task) -> float:
    """Compare numbers, in whichever units: `1,500 m` is `1.5 km`, `50%` is `0.5`, `3/4` is `0.75`.

    `data.rel_tol` and `data.abs_tol` (in the reference's unit) say how far off an answer may be. Without them whole
    numbers without units are compared exactly and others to rounding. Where the reference has a unit an answer needs
    one of the same dimension; `data.unit` names what a bare number is in.

    Raises:
        ValueError: If the reference is no number.
    """
    reference = _quantity(task.answer, task.data.get("unit", ""))
    if reference is None:
        raise ValueError(f"the reference {task.answer!r} is no number with a unit")
    found = _quantity(answer, task.data.get("unit", ""))
    if found is None:
        return 0.0
    value, unit = found
    target, target_unit = reference
    if unit != target_unit:
        converted = _convert(value, unit, target_unit)
        if converted is None:
            return 0.0
        value = converted
    whole = not unit and not target_unit and value.denominator == target.denominator == 1
    rel = Fraction(task.data.get("rel_tol", 0 if whole else REL_TOL))
    allowed = max(rel * abs(target), Fraction(task.data.get("abs_tol", 0)))
    return float(abs(value - target) <= allowed)


def _quantity(text: str, default_unit: str) -> tuple[Fraction, str] | None:
    """Read a number and the text of its unit; None where it is no such thing."""
    text = text.strip().strip("$").strip()
    for old, new in SAME.items():
        text = text.replace(old, new)
    found = NUMBER.match(text)
    if len(text) > MAX_CHARS or not found:
        return None
    exponent = int(found["exponent"] or 0)
    denominator = int(found["denominator"] or 1)
    unit = text[found.end() :].strip() or default_unit
    readable = not unit or UNIT.fullmatch(unit.replace("(", "").replace(")", ""))
    if not readable or denominator == 0:
        return None
    digits = (found["whole"] or "0").replace(",", "") + (found["part"] or "")
    value = Fraction(digits) * Fraction(10) ** exponent / denominator
    return (-value if found["sign"] == "-" else value), unit


def _convert(value: Fraction, unit: str, target_unit: str) -> Fraction | None:
    """Return a value in another unit; None where there is no such unit, or it measures something else."""
    import pint

    registry = _units()
    try:
        quantity = registry.Quantity(float(value), registry.parse_units(unit))
        converted = quantity.to(registry.parse_units(target_unit)).magnitude
    except (pint.PintError, ValueError, OverflowError, SyntaxError, TypeError):
        return None
    return Fraction(converted) if math.isfinite(converted) else None


@functools.cache
def _units() -> Any:
    import pint

    return pint.UnitRegistry()


def math_equal(answer: str, task: Task) -> float:
    """Compare formulas in LaTeX or plain notation by math-verify: values, sets, intervals, matrices, equations.

    Where the reference is a number an answer with a sum or a product left in it is wrong: it may be the question again.

    Raises:
        ValueError: If the reference is no formula.
    """
    if len(answer) > MAX_CHARS:
        return 0.0
    if NUMBER.fullmatch(task.answer.strip().strip("$")) and UNFINISHED.search(answer):
        return 0.0
    reference = _parse_math(task.answer)
    if not reference:
        raise ValueError(f"the reference {task.answer!r} is no formula")
    import math_verify

    return float(math_verify.verify(reference, _parse_math(answer), timeout_seconds=None))


def _parse_math(text: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is ours
    inside = text.strip().strip("$")
    return math_verify.parse(f"\\boxed{{{inside}}}", parsing_timeout=None)


def reasoning_gym(answer: str, task: Task) -> float:
    """Score an answer as the family that made the problem does.

    Some families give parts of a point, and some evaluate the answer as Python: see `pool.without_side_effects`.
    """
    generator = problems.make_generator(task.data["family"], task.data["settings"])
    return float(generator.score_answer(answer, entry=task.data["entry"]))


VERIFIERS: Mapping[Verifier, Callable[[str, Task], float]] = {
    "exact": exact,
    "numeric": numeric,
    "math": math_equal,
    "reasoning_gym": reasoning_gym,
}


def verify(answer: str | None, task: Task) -> float:
    """Judge a final answer by its task's rule.

    Args:
        answer: As `answer.read` found it; None is wrong.
        task: With a verifier.

    Returns:
        Between 0 and 1; NaN or anything else that a rule returns is passed on, for the caller to refuse.

    Raises:
        ValueError: If the task's reference can not be read, or no rule here judges it.
    """
    if task.verifier is None or task.verifier not in VERIFIERS:
        raise ValueError(f"task {task.name} has no rule: verifier={task.verifier!r}")
    return 0.0 if answer is None else VERIFIERS[task.verifier](answer, task)
