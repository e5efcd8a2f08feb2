"""What can be thought before an answer: the steps to it, for families of problems that are solved in steps."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from train.rl.tasks import Task

TERM = re.compile(r"([+-]?)(\d*)\*?([a-z]?)")


def working(task: Task) -> str | None:
    """Write out the steps from a question to its answer, one operation a step.

    Sums, from left to right: `4 - 1 - 7` is `4-1=3 3-7=-4`. Equations with one unknown, the constant first, then the
    factor: `8*t - 9 = 23` is `23+9=32 32/8=4`.

    Args:
        task: Any task.

    Returns:
        The steps, a blank between them; None where they are not known, or there are none.
    """
    entry = task.data.get("entry")
    write = WORKINGS.get(task.data.get("family", ""))
    return write(entry["metadata"]) if entry and write else None


def _sum(metadata: Mapping[str, Any]) -> str | None:
    """Return partial sums; None where other operations than plus and minus come in."""
    terms = _terms(metadata["expression"])
    if terms is None or any(name for _, name in terms):
        return None
    total, steps = terms[0][0], []
    for number, _ in terms[1:]:
        steps.append(f"{total}{number:+d}={total + number}")
        total += number
    return " ".join(steps) or None


def _equation(metadata: Mapping[str, Any]) -> str | None:
    """Return the steps to the unknown; None where it stands alone, or more than once."""
    left, right = metadata["equation"].split("=")
    terms, other = _terms(left), _terms(right)
    if terms is None or other is None or len(other) > 1 or other[0][1]:
        return None
    factors = [number for number, name in terms if name]
    constants = [number for number, name in terms if not name]
    if len(factors) != 1 or len(constants) > 1:
        return None
    (factor,), constant, value = factors, sum(constants), other[0][0]
    start, taken = (value, constant) if factor > 0 else (constant, value)
    steps = [f"{start}{-taken:+d}={start - taken}"] if constants else []
    if abs(factor) > 1:
        steps.append(f"{start - taken}/{abs(factor)}={(start - taken) // abs(factor)}")
    return " ".join(steps) or None


def _terms(text: str) -> list[tuple[int, str]] | None:
    """Return each term of a sum as its number and its unknown, "" for none; None where it is no plain sum."""
    found = []
    for part in re.findall(r"[+-]?[^+-]+", text.replace(" ", "")):
        term = TERM.fullmatch(part)
        if term is None or not (term[2] or term[3]):
            return None
        found.append((int(f"{term[1]}{term[2] or 1}"), term[3]))
    return found or None


WORKINGS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "basic_arithmetic": _sum,
    "chain_sum": _sum,
    "simple_equations": _equation,
}
