"""Tasks in worlds in which holders have items: giving, taking back, changing, by the rules."""

import itertools
from collections.abc import Sequence
from random import Random

from train.agents.synthesis import drafting
from train.agents.synthesis.sketch import Sketch
from train.agents.synthesis.worlds import Draft


def undo(s: Sketch, rng: Random) -> Draft | None:
    """Have one link taken away."""
    if not s.links:
        return None
    h, i = rng.choice(sorted(s.links))
    with s.trying() as changes:
        s.drop(h, i)
    holder, item = s.holder, s.domain.item
    words = s.domain.undo_phrase.format(holder=s.said(holder, h), item=s.said(item, i))
    return drafting.done(
        "undo",
        1,
        f"Please {words}. {drafting.DONE}",
        [s.undo(s.at(holder, h), s.at(item, i))],
        changes,
    )


def allowed(s: Sketch, rng: Random) -> Draft | None:
    """Have the best of all items that the rules allow given to a holder."""
    options = itertools.product(s.rows[s.holder.name], drafting.wides(s.domain.item), (True, False))
    fit = [option for option in options if _deciding(s, *option) >= _conditions(s)]
    if not fit:
        return None
    h, column, most = rng.choice(fit)
    chosen = _best_allowed(s, h, column, most)
    assert chosen is not None
    item = (
        f"the {s.domain.item.name} with the {'most' if most else 'least'} {column} among those not theirs yet where"
        f" {drafting.joined([rule.spec.words for rule in s.item_rules])}"
    )
    words = drafting.filled(s, s.domain.phrase, holder=s.said(s.holder, h), item=item)
    start = f"h = {s.row(s.holder, s.at(s.holder, h))}"
    source = [start, *_give_best(s, column, most), "return b['name']"]
    with s.trying() as changes:
        s.add(h, chosen)
    name = s.said(s.domain.item, chosen)
    return drafting.done("allowed", 3, f"Please {words}. {drafting.NAME}", source, changes, name)


def replace(s: Sketch, rng: Random) -> Draft | None:
    """Have a holder's worst item changed for another."""
    item, holders = s.domain.item, [h for h in s.rows[s.holder.name] if len(s.held(h)) >= 2]
    if not holders:
        return None
    h, new = rng.choice(holders), rng.choice(list(s.rows[item.name]))
    column, most = drafting.wide(rng, item), rng.random() < 0.5
    old = drafting.extreme([s.rows[item.name][i] for i in s.held(h)], column, most=most)
    if old is None or new in s.held(h):
        return None
    with s.trying() as changes:
        s.drop(h, old[s.key])
        if not s.allows(h, new):
            return None
        s.add(h, new)
    worst = f"the {item.name} with the {'most' if most else 'least'} {column}"
    away = drafting.filled(s, s.domain.undo_phrase, holder=s.said(s.holder, h), item=worst)
    then = s.domain.phrase.format(holder=s.said(s.holder, h), item=s.said(item, new))
    name = drafting.NAME.replace("its", "the first one’s")
    prompt = f"First {away} (of the {item.plural} they have), then {then}. {name}"
    source = [
        f"h = {s.at(s.holder, h)}",
        f"b = {'max' if most else 'min'}([{s.row(item, 'i')} for i in {s.items_of('h')}], key=lambda i: i[{column!r}])",
        s.undo("h", s.field("b")),
        s.do("h", s.at(item, new)),
        "return b['name']",
    ]
    return drafting.done("replace", 3, prompt, source, changes, old["name"])


def clear(s: Sketch, rng: Random) -> Draft | None:
    """Have all links of an item, or of a group's items, taken away."""
    group, item = s.domain.group, s.domain.item
    key = rng.choice(list(s.rows[group.name]))
    gone = [(h, i) for h, i in s.links if s.rows[item.name][i][group.name] == key]
    if len(gone) < 2:
        return None
    with s.trying() as changes:
        for pair in gone:
            s.drop(*pair)
    every = f"every {item.name} of {group.name} {s.said(group, key)}"
    away = drafting.filled(s, s.domain.undo_phrase, holder="everybody", item=every)
    prompt = f"The {group.name} {s.said(group, key)} closes: {away}, all of them."
    prompt += f" How many were there? {drafting.NUMBER}"
    source = [
        "n = 0",
        f"for i in {s.where(item, group.name, s.at(group, key))}:",
        f"    for h in {s.holders_of(s.field('i'))}:",
        f"        {s.undo('h', s.field('i'))}",
        "        n = n + 1",
        "return n",
    ]
    return drafting.done("clear", 3, prompt, source, changes, str(len(gone)))


def give_each(s: Sketch, rng: Random) -> Draft | None:
    """Have several holders served in turn, each with the best that is allowed by then."""
    options = list(
        itertools.product(
            drafting.wides(s.domain.item), (True, False), drafting.wides(s.holder), (2, 3, 4)
        )
    )
    for column, most, measure, count in rng.sample(options, len(options)):
        rows = s.rows[s.holder.name]
        bound = sorted(row[measure] for row in rows.values())[-count]
        served = sorted(
            (k for k in rows if rows[k][measure] >= bound), key=lambda k: rows[k]["name"]
        )
        with s.trying() as changes:
            given = _serve(s, served, column, most)
        if given is not None:
            break
    else:
        return None
    rules = drafting.joined([rule.spec.words for rule in s.item_rules])
    prompt = (
        f"Take each {s.holder.name} whose {measure} is at least {bound} at the start, in the order of their"
        " names. Each gets,"
        f" counting what those before got, the {s.domain.item.name} with the {'most' if most else 'least'}"
        f" {column} among those"
        f" not theirs yet where {rules}: {_phrase(s)}. What do the"
        f" {column} of all"
        f" that were given add up to? {drafting.NUMBER}"
    )
    source = [
        "n = 0",
        f"some = [r for r in {s.all(s.holder)} if r[{measure!r}] >= {bound}]",
        "for h in sorted(some, key=lambda r: r['name']):",
        *(f"    {line}" for line in _give_best(s, column, most)),
        f"    n = n + b[{column!r}]",
        "return n",
    ]
    return drafting.done("give_each", 4, prompt, source, changes, str(given))


def _serve(s: Sketch, holders: Sequence[str], column: str, most: bool) -> int | None:
    """Serve holders in turn; return the sum, or None where one gets nothing or a condition decides nothing."""
    given, decided = 0, set[str]()
    for h in holders:
        decided |= _deciding(s, h, column, most)
        chosen = _best_allowed(s, h, column, most)
        if chosen is None:
            return None
        s.add(h, chosen)
        given += s.rows[s.domain.item.name][chosen][column]
    return given if decided >= _conditions(s) else None


def _best_allowed(s: Sketch, holder: str, column: str, most: bool) -> str | None:
    items = s.rows[s.domain.item.name]
    fit = [items[i] for i in items if s.allows(holder, i)]
    row = drafting.extreme(fit, column, most=most) if len(fit) >= 2 else None
    return None if row is None else str(row[s.key])


def _conditions(s: Sketch) -> set[str]:
    """Return what tells items apart: rules, and that an item is not theirs yet where that is no rule's doing."""
    kinds = {rule.spec.kind for rule in s.item_rules}
    return kinds if "single" in kinds else kinds | {"theirs"}


def _deciding(s: Sketch, holder: str, column: str, most: bool) -> set[str]:
    """Return the conditions that each alone keep a better item from being the best."""
    chosen = _best_allowed(s, holder, column, most)
    items = s.rows[s.domain.item.name]
    found = set()
    for key, row in items.items():
        broken = [rule.spec.kind for rule in s.breaks(holder, key)]
        if (holder, key) in s.links and "single" not in broken:
            broken.append("theirs")
        better = (
            chosen
            and (row[column] > items[chosen][column]) is most
            and row[column] != items[chosen][column]
        )
        if better and len(broken) == 1:
            found.add(broken[0])
    return found


def _give_best(s: Sketch, column: str, most: bool) -> list[str]:
    """Return the lines that give row `h` of a holder the best item, `b`, that the rules allow."""
    tests = [rule.source(s) for rule in s.item_rules]
    if "theirs" in _conditions(s):
        tests.insert(0, f"{s.field('i')} not in {s.items_of(s.field('h'))}")
    conditions = " and ".join(f"({test})" for test in tests)
    return [
        f"fit = [i for i in {s.all(s.domain.item)} if {conditions}]",
        f"b = {'max' if most else 'min'}(fit, key=lambda i: i[{column!r}])",
        s.do(s.field("h"), s.field("b")),
    ]


def _phrase(s: Sketch) -> str:
    return drafting.filled(s, s.domain.phrase, holder="them", item="it")
