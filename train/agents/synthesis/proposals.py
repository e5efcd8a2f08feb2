"""Tasks in a sketched world, from one call to loops over what the rules allow, each with its solution and verifier.

What a task should come to is worked out here on the sketch's rows; its solution only calls tools. None where the rows
hold no such task.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from train.agents.synthesis import drafting, proposals_amounts, proposals_links
from train.agents.synthesis.sketch import Sketch
from train.agents.synthesis.worlds import Draft

Proposal = Callable[[Sketch, Random], Draft | None]


def lookup(s: Sketch, rng: Random) -> Draft | None:
    """Ask for a field."""
    entity = rng.choice(s.entities)
    column, key = drafting.wide(rng, entity), rng.choice(list(s.rows[entity.name]))
    prompt = f"What is the {column} of {entity.name} {s.said(entity, key)}? {drafting.NUMBER}"
    source = [f"return {s.value(entity, s.at(entity, key), column)}"]
    return drafting.asked("lookup", 0, prompt, source, s.rows[entity.name][key][column])


def chain(s: Sketch, rng: Random) -> Draft | None:
    """Ask for a field of the group that an item belongs to."""
    group, item = s.domain.group, s.domain.item
    column, key = drafting.wide(rng, group), rng.choice(list(s.rows[item.name]))
    prompt = f"What is the {column} of the {group.name} of {item.name} {s.said(item, key)}? {drafting.NUMBER}"
    source = [
        f"g = {s.value(item, s.at(item, key), group.name)}",
        f"return {s.value(group, 'g', column)}",
    ]
    owner = s.rows[item.name][key][group.name]
    return drafting.asked("chain", 1, prompt, source, s.rows[group.name][owner][column])


def total(s: Sketch, rng: Random) -> Draft | None:
    """Ask for a sum over what a group or a holder has."""
    group, item = s.domain.group, s.domain.item
    column = drafting.wide(rng, item)
    owner = s.holder if s.domain.link and rng.random() < 0.6 else group
    key = rng.choice(list(s.rows[owner.name]))
    if owner is group:
        rows = [row for row in s.rows[item.name].values() if row[group.name] == key]
        source = [f"rows = {s.where(item, group.name, s.at(group, key))}"]
        whose = f"of {group.name} {s.said(group, key)}"
    else:
        rows = [s.rows[item.name][i] for i in s.held(key)]
        source = [f"rows = [{s.row(item, 'i')} for i in {s.items_of(s.at(owner, key))}]"]
        whose = f"that {owner.name} {s.said(owner, key)} has a {s.domain.link} with"
    if len(rows) < 2:
        return None
    prompt = f"Add up the {column} of all {item.plural} {whose}. {drafting.NUMBER}"
    source.append(f"return sum(r[{column!r}] for r in rows)")
    return drafting.asked("total", 1, prompt, source, sum(row[column] for row in rows))


def best(s: Sketch, rng: Random) -> Draft | None:
    """Ask which of a group's items has most or least of something."""
    found = drafting.best_of_group(s, rng)
    if found is None:
        return None
    words, source, row = found
    return drafting.asked(
        "best", 2, f"Which is {words}? {drafting.NAME}", [*source, "return b['name']"], row["name"]
    )


def set_field(s: Sketch, rng: Random) -> Draft | None:
    """Have a field set."""
    which, column = s.domain.settable
    entity = getattr(s.domain, which)
    key = rng.choice(list(s.rows[entity.name]))
    value = rng.randrange(1, 1000)
    if s.rows[entity.name][key][column] == value:
        return None
    prompt = f"Set the {column} of {entity.name} {s.said(entity, key)} to {value}. {drafting.DONE}"
    with s.trying() as changes:
        s.rows[entity.name][key][column] = value
    return drafting.done(
        "set", 0, prompt, [s.put(entity, s.at(entity, key), column, str(value))], changes
    )


def act(s: Sketch, rng: Random) -> Draft | None:
    """Have one thing done."""
    found = drafting.one_act(s, rng)
    if found is None:
        return None
    words, call, happen = found
    with s.trying() as changes:
        happen()
    return drafting.done("act", 0, f"Please {words}. {drafting.DONE}", [call], changes)


def pick(s: Sketch, rng: Random) -> Draft | None:
    """Have something done with a group's best item."""
    found = drafting.best_of_group(s, rng)
    if found is None:
        return None
    words, source, row = found
    picked = row[s.key]
    if s.domain.link:
        h = rng.choice(list(s.rows[s.holder.name]))
        if not s.allows(h, picked):
            return None
        phrase = drafting.filled(s, s.domain.phrase, holder=s.said(s.holder, h), item=words)
        call = s.do(s.at(s.holder, h), s.field("b"))
    else:
        target = rng.choice(list(s.rows[s.domain.item.name]))
        amount = rng.randrange(10, 60, 5)
        if not s.allows_move(picked, target, amount):
            return None
        named = s.said(s.domain.item, target)
        phrase = drafting.filled(s, s.domain.phrase, amount=amount, source=words, target=named)
        call = s.transfer(s.field("b"), s.at(s.domain.item, target), str(amount))
    with s.trying() as changes:
        s.add(h, picked) if s.domain.link else s.move(picked, target, amount)
    return drafting.done(
        "pick",
        2,
        f"Please {phrase}. {drafting.NAME}",
        [*source, call, "return b['name']"],
        changes,
        row["name"],
    )


def either(s: Sketch, rng: Random) -> Draft | None:
    """Have one of two things done, by a field."""
    entity = rng.choice(s.entities)
    column, key = drafting.wide(rng, entity), rng.choice(list(s.rows[entity.name]))
    value = s.rows[entity.name][key][column]
    bound = max(1, value + rng.choice((-3, -2, -1, 0, 1, 2, 3)))
    one, other = drafting.one_act(s, rng), drafting.one_act(s, rng)
    if one is None or other is None or one[0] == other[0]:
        return None
    with s.trying() as changes:
        (one if value >= bound else other)[2]()
    prompt = (
        f"If the {column} of {entity.name} {s.said(entity, key)} is at least {bound}, {one[0]};"
    )
    prompt += f" otherwise {other[0]}. {drafting.DONE}"
    test = s.value(entity, s.at(entity, key), column)
    source = [f"if {test} >= {bound}:", f"    {one[1]}", "else:", f"    {other[1]}"]
    return drafting.done("either", 3, prompt, source, changes)


def compound(s: Sketch, rng: Random) -> Draft | None:
    """Have something done between the best of one kind and the best of the group that another thing belongs to."""
    group, item = s.domain.group, s.domain.item
    pointer, column, most = (
        rng.choice(list(s.rows[item.name])),
        drafting.wide(rng, item),
        rng.random() < 0.5,
    )
    key = s.rows[item.name][pointer][group.name]
    rows = [row for row in s.rows[item.name].values() if row[group.name] == key]
    first = drafting.extreme(rows, column, most=most) if len(rows) >= 2 else None
    if first is None:
        return None
    words = f"the {item.name} with the {'most' if most else 'least'} {column}"
    words += f" of the {group.name} of {item.name} {s.said(item, pointer)}"
    source = [
        f"g = {s.value(item, s.at(item, pointer), group.name)}",
        f"b = {'max' if most else 'min'}({s.where(item, group.name, 'g')}, key=lambda r: r[{column!r}])",
    ]
    with s.trying() as changes:
        if s.domain.link:
            measure = drafting.wide(rng, s.holder)
            h = drafting.extreme(list(s.rows[s.holder.name].values()), measure, most=True)
            if h is None or not s.allows(h[s.key], first[s.key]):
                return None
            s.add(h[s.key], first[s.key])
            who = f"the {s.holder.name} with the most {measure}"
            phrase = drafting.filled(s, s.domain.phrase, holder=who, item=words)
            source.append(f"h = max({s.all(s.holder)}, key=lambda r: r[{measure!r}])")
            source.append(s.do(s.field("h"), s.field("b")))
        else:
            amount, other = rng.randrange(5, 95), s.domain.amount
            target = drafting.extreme(list(s.rows[item.name].values()), other, most=False)
            if target is None or not s.allows_move(first[s.key], target[s.key], amount):
                return None
            s.move(first[s.key], target[s.key], amount)
            what = f"the {item.name} with the least {other} of all"
            phrase = drafting.filled(s, s.domain.phrase, amount=amount, source=words, target=what)
            source.append(f"t = min({s.all(item)}, key=lambda r: r[{other!r}])")
            source.append(s.transfer(s.field("b"), s.field("t"), str(amount)))
    prompt = f"Please {phrase}. {drafting.NAME.replace('its', f'that first {item.name}’s')}"
    return drafting.done(
        "compound", 4, prompt, [*source, "return b['name']"], changes, first["name"]
    )


COMMON: Mapping[int, tuple[Proposal, ...]] = {
    0: (lookup, set_field, act),
    1: (chain, total),
    2: (best, pick),
}
WITH_LINKS: Mapping[int, tuple[Proposal, ...]] = {
    1: (proposals_links.undo,),
    3: (proposals_links.allowed, either, proposals_links.replace, proposals_links.clear),
    4: (proposals_links.give_each, compound),
}
WITH_AMOUNTS: Mapping[int, tuple[Proposal, ...]] = {
    2: (proposals_amounts.top_up,),
    3: (either, proposals_amounts.drain),
    4: (proposals_amounts.top_up_all, compound),
}
HARDEST = 4


def proposals_at(s: Sketch, difficulty: int) -> Sequence[Proposal]:
    """Return the sorts of tasks of a difficulty that a world can have.

    Args:
        s: The world.
        difficulty: 0 to `HARDEST`.

    Returns:
        Functions that propose one.
    """
    own = WITH_LINKS if s.domain.link else WITH_AMOUNTS
    return (*COMMON.get(difficulty, ()), *own.get(difficulty, ()))
