"""What proposals of tasks are put together from."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from train.agents.synthesis.domains import Column, Entity
from train.agents.synthesis.sketch import Row, Sketch
from train.agents.synthesis.worlds import Change, Compare, Draft, Verifier

NUMBER = "Answer with the number alone."
NAME = "Answer with its name alone."
DONE = "Answer with: done"
LEAST = 20  # distinct values of a column that is asked for, so that guessing does not pay


def asked(kind: str, difficulty: int, prompt: str, source: Sequence[str], answer: object) -> Draft:
    """Make a task that asks for something and changes nothing."""
    return done(kind, difficulty, prompt, source, {}, str(answer))


def done(
    kind: str, difficulty: int, prompt: str, source: Sequence[str], changes: Mapping[str, Change],
    answer: str | None = None,
) -> Draft:  # fmt: skip
    """Make a task that changes something.

    Args:
        kind: Of task.
        difficulty: From 0.
        prompt: What is asked.
        source: The solution's lines; without an answer the last one is added.
        changes: Of each table.
        answer: The right one; None where any will do.

    Returns:
        The task.
    """
    lines = [*source, *(["return 'done'"] if answer is None else [])]
    compare: Compare = (
        "number" if answer is not None and answer.lstrip("-").isdecimal() else "exact"
    )
    return Draft(
        prompt=prompt[0].upper() + prompt[1:],
        solution="\n".join(["def solve(call):", *(f"    {line}" for line in lines)]) + "\n",
        verifier=Verifier(answer=answer, compare=compare, changes=dict(changes)),
        difficulty=difficulty,
        kind=kind,
    )


def wide(rng: Random, entity: Entity) -> str:
    """Draw a number's column that has many values."""
    return rng.choice(wides(entity))


def wides(entity: Entity) -> list[str]:
    """Return the numbers' columns that have many values."""
    return [c.name for c in entity.columns if _values(c) >= LEAST]


def _values(column: Column) -> int:
    return 0 if column.choices or column.ref else (column.high - column.low) // column.step + 1


def extreme(rows: Sequence[Row], column: str, *, most: bool) -> Row | None:
    """Return the row with most or least of something; None where two have it."""
    values = [row[column] for row in rows]
    edge = max(values) if most else min(values)
    return next(row for row in rows if row[column] == edge) if values.count(edge) == 1 else None


def filled(s: Sketch, phrase: str, **parts: object) -> str:
    """Fill a phrase in; where it names the kind of what a part describes already, once is enough."""
    text, name = phrase.format(**parts), s.domain.item.name
    for article in (f"the {name}", f"every {name}", "it"):
        text = text.replace(f"{name} {article}", article)
    return text


def joined(words: Sequence[str]) -> str:
    """Return conditions as one."""
    return ", and ".join(words) if words else "nothing else is asked for"


def best_of_group(s: Sketch, rng: Random) -> tuple[str, list[str], Row] | None:
    """Draw a group's best item: in words, as the lines that find it in `b`, and its row."""
    group, item = s.domain.group, s.domain.item
    key, column, most = rng.choice(list(s.rows[group.name])), wide(rng, item), rng.random() < 0.5
    rows = [row for row in s.rows[item.name].values() if row[group.name] == key]
    row = extreme(rows, column, most=most) if len(rows) >= 2 else None
    if row is None:
        return None
    words = f"the {item.name} of {group.name} {s.said(group, key)} with the {'most' if most else 'least'} {column}"
    source = [
        f"rows = {s.where(item, group.name, s.at(group, key))}",
        f"b = {'max' if most else 'min'}(rows, key=lambda r: r[{column!r}])",
    ]
    return words, source, row


def one_act(s: Sketch, rng: Random) -> tuple[str, str, Callable[[], None]] | None:
    """Draw something that may be done: in words, as a call, and as what happens."""
    item = s.domain.item
    if s.domain.link:
        h, i = rng.choice(list(s.rows[s.holder.name])), rng.choice(list(s.rows[item.name]))
        words = s.domain.phrase.format(holder=s.said(s.holder, h), item=s.said(item, i))
        call = s.do(s.at(s.holder, h), s.at(item, i))
        return (words, call, lambda: s.add(h, i)) if s.allows(h, i) else None
    a, b = rng.sample(list(s.rows[item.name]), 2)
    n = rng.randrange(5, 95)
    words = s.domain.phrase.format(amount=n, source=s.said(item, a), target=s.said(item, b))
    call = s.transfer(s.at(item, a), s.at(item, b), str(n))
    return (words, call, lambda: s.move(a, b, n)) if s.allows_move(a, b, n) else None
