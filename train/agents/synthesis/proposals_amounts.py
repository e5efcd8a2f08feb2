"""Tasks in worlds in which amounts move between items."""

from random import Random

from train.agents.synthesis import drafting
from train.agents.synthesis.sketch import Sketch
from train.agents.synthesis.worlds import Draft


def top_up(s: Sketch, rng: Random) -> Draft | None:
    """Have an item brought to an amount."""
    item, column = s.domain.item, s.domain.amount
    target, source_key = rng.sample(list(s.rows[item.name]), 2)
    goal = s.rows[item.name][target][column] + rng.randrange(7, 60)
    if not s.allows_move(source_key, target, goal - s.rows[item.name][target][column]):
        return None
    with s.trying() as changes:
        s.move(source_key, target, goal - s.rows[item.name][target][column])
    prompt = f"Bring the {column} of {item.name} {s.said(item, target)} to exactly {goal}, taking what is missing from"
    prompt += f" {item.name} {s.said(item, source_key)}. How much was missing? {drafting.NUMBER}"
    source = [
        f"t = {s.at(item, target)}",
        f"n = {goal} - {s.value(item, 't', column)}",
        s.transfer(s.at(item, source_key), "t", "n"),
        "return n",
    ]
    missing = goal - s.rows[item.name][target][column]
    return drafting.done("top_up", 2, prompt, source, changes, str(missing))


def top_up_all(s: Sketch, rng: Random) -> Draft | None:
    """Have all items of a kind brought to an amount, out of the one that has most."""
    item, column = s.domain.item, s.domain.amount
    choice = next(c for c in item.columns if c.choices)
    value = rng.choice(choice.choices)
    rows = [row for row in s.rows[item.name].values() if row[choice.name] == value]
    rich = drafting.extreme(rows, column, most=True) if rows else None
    if rich is None or len(rows) < 4:
        return None
    goal = sorted(row[column] for row in rows)[2]
    poor = [row[s.key] for row in rows if row[column] < goal]
    if len(poor) < 2:
        return None
    moved = 0
    with s.trying() as changes:
        for key in poor:
            amount = goal - s.rows[item.name][key][column]
            if not s.allows_move(rich[s.key], key, amount):
                return None
            s.move(rich[s.key], key, amount)
            moved += amount
    prompt = (
        f"Of the {item.plural} whose {choice.name} is {value}, bring each with a {column} below {goal} to"
        f" exactly {goal}, taking it from"
        f" the one of them that has most. How much was moved in all? {drafting.NUMBER}"
    )
    source = [
        "n = 0",
        f"rows = {s.where(item, choice.name, repr(value))}",
        f"b = max(rows, key=lambda r: r[{column!r}])",
        f"for r in [r for r in rows if r[{column!r}] < {goal}]:",
        f"    {s.transfer(s.field('b'), s.field('r'), f'{goal} - r[{column!r}]')}",
        f"    n = n + {goal} - r[{column!r}]",
        "return n",
    ]
    return drafting.done("top_up_all", 4, prompt, source, changes, str(moved))


def drain(s: Sketch, rng: Random) -> Draft | None:
    """Have a part of each of a group's items moved to one item."""
    group, item, column = s.domain.group, s.domain.item, s.domain.amount
    key, target = rng.choice(list(s.rows[group.name])), rng.choice(list(s.rows[item.name]))
    rows = [
        row for row in s.rows[item.name].values() if row[group.name] == key and row[s.key] != target
    ]
    bound = rng.randrange(30, 200, 10)
    full = [row for row in rows if row[column] > bound]
    if len(full) < 2 or s.rows[item.name][target][group.name] == key:
        return None
    with s.trying() as changes:
        for row in full:
            if not s.allows_move(row[s.key], target, row[column] // 2):
                return None
            s.move(row[s.key], target, row[column] // 2)
    moved = sum(row[column] // 2 for row in full)
    prompt = (
        f"From each {item.name} of {group.name} {s.said(group, key)} with a {column} above {bound}, move half"
        " of it, rounded down, to"
        f" {item.name} {s.said(item, target)}. How much was moved in all? {drafting.NUMBER}"
    )
    source = [
        "n = 0",
        f"t = {s.at(item, target)}",
        f"for r in {s.where(item, group.name, s.at(group, key))}:",
        f"    if r[{column!r}] > {bound}:",
        f"        {s.transfer(s.field('r'), 't', f'r[{column!r}] // 2')}",
        f"        n = n + r[{column!r}] // 2",
        "return n",
    ]
    return drafting.done("drain", 3, prompt, source, changes, str(moved))
