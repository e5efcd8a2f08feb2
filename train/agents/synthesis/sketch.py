"""A world being composed: rows, rules and a style of tools drawn, and how a solution says things in that style."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from train.agents.synthesis import rules
from train.agents.synthesis.domains import Column, Domain, Entity
from train.agents.synthesis.worlds import Change, Guard, SqlTool, World

VERBS = (
    ("get", "list", "find"),
    ("show", "all", "search"),
    ("read", "index", "filter"),
    ("describe", "enumerate", "select"),
)
TEXT = {"type": "string"}
MOST_RULES = 3
HOLDER_RULES = ("quota", "status")  # say nothing of the item

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a world's tools tell what there is.

    Attributes:
        lookup: "row": names are listed, one tool gives a row; "find": and others find names by a column; "field": rows
            are listed, one tool gives one field; "table": rows are listed, and that is all.
        links: "sides": what a holder has, and who has an item; "all": one list of pairs.
        codes: Tools go by codes, people by names.
        verbs: That tools are named by.
    """

    lookup: Literal["row", "find", "field", "table"]
    links: Literal["sides", "all"]
    codes: bool
    verbs: tuple[str, str, str]


class Sketch:
    """A world being composed.

    Args:
        domain: Its category.
        rng: Draws all of it.

    Attributes:
        domain: The same.
        rows: Entity -> key -> row, as things stand.
        links: Pairs of holder's and item's keys.
        rules: That hold in it.
        key: The column that tools go by.
        tools: All that were asked for so far, by name.
    """

    def __init__(self, domain: Domain, rng: Random) -> None:
        """Draw style, rules and rows."""
        self.domain, self._rng = domain, rng
        self._style = Style(
            lookup=rng.choice(("row", "find", "field", "table")),
            links=rng.choice(("sides", "all")),
            codes=rng.random() < 0.4,
            verbs=rng.choice(VERBS),
        )
        self.key = "id" if self._style.codes else "name"
        specs = rng.sample(domain.rules, rng.randint(1, min(MOST_RULES, len(domain.rules))))
        self._specs = [spec for spec in domain.rules if spec in specs]
        self.rules = [rules.KINDS[spec.kind](spec) for spec in self._specs if domain.link]
        self.tools: dict[str, SqlTool] = {}
        self.rows: dict[str, dict[str, Row]] = {}
        self.links: set[tuple[str, str]] = set()
        for entity in self.entities:
            self._fill(entity)
        if domain.link:
            self._link()

    @property
    def entities(self) -> list[Entity]:
        """The kinds of things there are."""
        return [
            e for e in (self.domain.group, self.domain.item, self.domain.holder) if e is not None
        ]

    @property
    def holder(self) -> Entity:
        """Who holds items, where there are links."""
        assert self.domain.holder is not None
        return self.domain.holder

    @property
    def item_rules(self) -> list[rules.Rule]:
        """The rules that tell items apart."""
        return [rule for rule in self.rules if rule.spec.kind not in HOLDER_RULES]

    def _fill(self, entity: Entity) -> None:
        names = self._rng.sample(entity.names, self._rng.randint(*entity.count))
        rows = {}
        for number, name in enumerate(sorted(names)):
            code = f"{entity.name[0]}{11 + 7 * number}"
            row: Row = {"id": code} if self._style.codes else {}
            row["name"] = name
            row |= {column.name: self._value(column) for column in entity.columns}
            rows[row[self.key]] = row
        self.rows[entity.name] = rows

    def _value(self, column: Column) -> str | int:
        if column.ref:
            return self._rng.choice(list(self.rows[column.ref]))
        if column.choices:
            return self._rng.choice(column.choices)
        return self._rng.randrange(column.low, column.high + 1, column.step)

    def _link(self) -> None:
        """Put in links that the rules allow, and what they cost is not taken again."""
        pairs = [
            (h, i) for h in self.rows[self.holder.name] for i in self.rows[self.domain.item.name]
        ]
        for pair in self._rng.sample(pairs, min(len(pairs), 14)):
            if len(self.links) < 8 and self.allows(*pair):
                self.links.add(pair)

    # What happens, on the rows themselves.

    def held(self, holder: str) -> list[str]:
        """Return the keys of a holder's items."""
        return sorted(i for h, i in self.links if h == holder)

    def allows(self, holder: str, item: str) -> bool:
        """Say whether a holder may get an item now."""
        return (holder, item) not in self.links and not self.breaks(holder, item)

    def breaks(self, holder: str, item: str) -> list[rules.Rule]:
        """Return the rules that keep an item from a holder now."""
        h, i = self.rows[self.holder.name][holder], self.rows[self.domain.item.name][item]
        return [rule for rule in self.rules if not rule.holds(self, h, i)]

    def allows_move(self, source: str, target: str, amount: int) -> bool:
        """Say whether an amount may move between items now."""
        a, b = (self.rows[self.domain.item.name][key] for key in (source, target))
        floor, same = self._amount_rules()
        enough = a[self.domain.amount] - amount >= (a[floor] if floor else 0)
        return source != target and amount > 0 and enough and (not same or a[same] == b[same])

    def _amount_rules(self) -> tuple[str, str]:
        found = {spec.kind: spec.columns[0] for spec in self._specs}
        return found.get("floor", ""), found.get("same", "")

    def add(self, holder: str, item: str) -> None:
        """Give a holder an item."""
        assert self.allows(holder, item)
        self.links.add((holder, item))
        self._pay(holder, item, -1)

    def drop(self, holder: str, item: str) -> None:
        """Take an item from a holder."""
        self.links.remove((holder, item))
        self._pay(holder, item, 1)

    def _pay(self, holder: str, item: str, sign: int) -> None:
        if (columns := self._paid) is not None:
            price = self.rows[self.domain.item.name][item][columns[1]]
            self.rows[self.holder.name][holder][columns[0]] += sign * price

    @property
    def _paid(self) -> tuple[str, ...] | None:
        return next((rule.spec.columns for rule in self.rules if rule.spec.kind == "funds"), None)

    def move(self, source: str, target: str, amount: int) -> None:
        """Move an amount between items."""
        assert self.allows_move(source, target, amount)
        items = self.rows[self.domain.item.name]
        items[source][self.domain.amount] -= amount
        items[target][self.domain.amount] += amount

    @contextlib.contextmanager
    def trying(self) -> Iterator[dict[str, Change]]:
        """Let things happen in the block, then undo them.

        Yields:
            Filled at the end with what became of each table.
        """
        before = self._tables()
        kept = self.rows, self.links
        self.rows, self.links = copy.deepcopy(kept)
        changes: dict[str, Change] = {}
        try:
            yield changes
            for table, rows in self._tables().items():
                added = [row for row in rows if row not in before[table]]
                removed = [row for row in before[table] if row not in rows]
                if added or removed:
                    changes[table] = Change(added=added, removed=removed)
        finally:
            self.rows, self.links = kept

    def _tables(self) -> dict[str, list[list[Any]]]:
        tables = {
            name: [list(row.values()) for row in rows.values()] for name, rows in self.rows.items()
        }
        return tables | (
            {self.domain.link: sorted(map(list, self.links))} if self.domain.link else {}
        )

    # The world.

    def world(self, name: str, used: Sequence[str]) -> World:
        """Make the world.

        Args:
            name: Of it.
            used: Names of tools that it has.

        Returns:
            It, with the rows as they stand.
        """
        lines = []
        for entity in self.entities:
            kinds = [f"{'id TEXT PRIMARY KEY, ' if self._style.codes else ''}name TEXT"]
            kinds += [
                f"{c.name} {'TEXT' if c.ref or c.choices else 'INTEGER'}" for c in entity.columns
            ]
            lines.append(f"CREATE TABLE {entity.name} ({', '.join(kinds)});")
        if self.domain.link:
            pair = f"{self.holder.name}, {self.domain.item.name}"
            lines.append(f"CREATE TABLE {self.domain.link} ({pair}, PRIMARY KEY ({pair}));")
        for table, rows in self._tables().items():
            values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
            lines.append(f"INSERT INTO {table} VALUES {values};" if rows else "")
        return World(
            name=name,
            category=self.domain.name,
            script="\n".join(lines),
            tools=tuple(self.tools[tool] for tool in sorted(used)),
        )

    # How a solution says things, with the tools that it needs for that.

    def field(self, variable: str) -> str:
        """Return the key of a row that a variable of the solution holds."""
        return f"{variable}[{self.key!r}]"

    def said(self, entity: Entity, key: str) -> str:
        """Return what people call a thing."""
        return str(self.rows[entity.name][key]["name"])

    def at(self, entity: Entity, key: str) -> str:
        """Return how a solution finds the key of a thing that the prompt names."""
        name = self.said(entity, key)
        if not self._style.codes:
            return repr(name)
        if self._style.lookup in ("field", "table"):
            return f"[z['id'] for z in {self.all(entity)} if z['name'] == {name!r}][0]"
        tool = self._need(
            f"{self._style.verbs[2]}_{entity.name}_by_name",
            f"Tell the id of a {entity.name} by its name.",
            {"name": TEXT},
            result=f"SELECT id FROM {entity.name} WHERE name = :name",
        )
        return f"call({tool!r}, name={name!r})"

    def all(self, entity: Entity) -> str:
        """Return how a solution gets all rows."""
        listing = self._list(entity)
        if self._style.lookup in ("field", "table"):
            return f"call({listing!r})"
        return f"[{self.row(entity, 'k')} for k in call({listing!r})]"

    def where(self, entity: Entity, column: str, value: str) -> str:
        """Return how a solution gets the rows with a value; the value is source."""
        if self._style.lookup != "find":
            return f"[r for r in {self.all(entity)} if r[{column!r}] == {value}]"
        name = self._need(
            f"{self._style.verbs[2]}_{entity.plural}_by_{column}",
            f"List the {entity.plural} of a {column}, by {self.key}.",
            {column: TEXT},
            result=f"SELECT {self.key} FROM {entity.name} WHERE {column} = :{column} ORDER BY {self.key}",
            returns="column",
        )
        return f"[{self.row(entity, 'k')} for k in call({name!r}, {column}={value})]"

    def row(self, entity: Entity, key: str) -> str:
        """Return how a solution gets a row; the key is source."""
        if self._style.lookup in ("field", "table"):
            return f"[z for z in {self.all(entity)} if z[{self.key!r}] == {key}][0]"
        name = self._need(
            f"{self._style.verbs[0]}_{entity.name}",
            f"Tell all about a {entity.name}.",
            {entity.name: TEXT},
            guards=(self._exists(entity, entity.name),),
            result=f"SELECT * FROM {entity.name} WHERE {self.key} = :{entity.name}",
            returns="row",
        )
        return f"call({name!r}, {entity.name}={key})"

    def value(self, entity: Entity, key: str, column: str) -> str:
        """Return how a solution gets one field; the key is source."""
        if self._style.lookup == "table":
            return f"[z[{column!r}] for z in {self.all(entity)} if z[{self.key!r}] == {key}][0]"
        if self._style.lookup != "field":
            return f"{self.row(entity, key)}[{column!r}]"
        fields = [c.name for c in entity.columns]
        cases = " ".join(f"WHEN '{field}' THEN {field}" for field in fields)
        name = self._need(
            f"{self._style.verbs[0]}_{entity.name}_field",
            f"Tell one field of a {entity.name}.",
            {entity.name: TEXT, "field": {"type": "string", "enum": fields}},
            guards=(
                self._exists(entity, entity.name),
                Guard(
                    sql=f"SELECT :field IN {_tuple(fields)}",
                    error=f"field is one of {', '.join(fields)}",
                ),
            ),
            result=f"SELECT CASE :field {cases} END FROM {entity.name} WHERE {self.key} = :{entity.name}",
        )
        return f"call({name!r}, {entity.name}={key}, field={column!r})"

    def items_of(self, holder: str) -> str:
        """Return how a solution gets the keys of a holder's items; the holder's key is source."""
        return self._side(self.holder, self.domain.item, holder)

    def holders_of(self, item: str) -> str:
        """Return how a solution gets the keys of an item's holders; the item's key is source."""
        return self._side(self.domain.item, self.holder, item)

    def _side(self, one: Entity, other: Entity, key: str) -> str:
        link = self.domain.link
        if self._style.links == "all":
            name = self._need(
                f"{self._style.verbs[1]}_{link}s",
                f"List all {link}s: pairs of {self.holder.name} and {self.domain.item.name}.",
                {},
                result=f"SELECT * FROM {link} ORDER BY 1, 2",
                returns="rows",
            )
            return f"[p[{other.name!r}] for p in call({name!r}) if p[{one.name!r}] == {key}]"
        name = self._need(
            f"{self._style.verbs[1]}_{other.plural}_of_{one.name}",
            f"List the {other.plural} that a {one.name} has a {link} with, by {self.key}.",
            {one.name: TEXT},
            guards=(self._exists(one, one.name),),
            result=f"SELECT {other.name} FROM {link} WHERE {one.name} = :{one.name} ORDER BY 1",
            returns="column",
        )
        return f"call({name!r}, {one.name}={key})"

    def do(self, holder: str, item: str) -> str:
        """Return how a solution gives an item to a holder; both keys are source."""
        h, i, link = self.holder.name, self.domain.item.name, self.domain.link
        pair = f"FROM {h} h, {i} i WHERE h.{self.key} = :{h} AND i.{self.key} = :{i}"
        held = f"SELECT NOT EXISTS (SELECT * FROM {link} WHERE {h} = :{h} AND {i} = :{i})"
        guards = [self._exists(self.holder, h), self._exists(self.domain.item, i)]
        guards += [Guard(sql=held, error="that is so already")]
        guards += [
            Guard(
                sql=f"SELECT {rule.sql(self)} {pair}",
                error=f"refused, as it is not so that {rule.spec.words}",
            )
            for rule in self.rules
        ]
        rule_words = "; ".join(rule.spec.words for rule in self.rules)
        steps = (f"INSERT INTO {link} VALUES (:{h}, :{i})", *self._payment("-"))
        name = self._need(
            self.domain.do,
            f"{self.domain.phrase.format(holder=f'a {h}', item=f'a {i}').capitalize()}. Allowed where {rule_words}.",
            {h: TEXT, i: TEXT},
            guards=tuple(guards),
            steps=steps,
        )
        return f"call({name!r}, {h}={holder}, {i}={item})"

    def undo(self, holder: str, item: str) -> str:
        """Return how a solution takes an item from a holder; both keys are source."""
        h, i, link = self.holder.name, self.domain.item.name, self.domain.link
        held = f"SELECT EXISTS (SELECT * FROM {link} WHERE {h} = :{h} AND {i} = :{i})"
        name = self._need(
            self.domain.undo,
            f"{self.domain.undo_phrase.format(holder=f'a {h}', item=f'a {i}').capitalize()}.",
            {h: TEXT, i: TEXT},
            guards=(Guard(sql=held, error=f"there is no such {link}"),),
            steps=(f"DELETE FROM {link} WHERE {h} = :{h} AND {i} = :{i}", *self._payment("+")),
        )
        return f"call({name!r}, {h}={holder}, {i}={item})"

    def _payment(self, sign: str) -> list[str]:
        if self._paid is None:
            return []
        purse, price = self._paid
        h, i = self.holder.name, self.domain.item.name
        cost = f"(SELECT {price} FROM {i} WHERE {self.key} = :{i})"
        return [f"UPDATE {h} SET {purse} = {purse} {sign} {cost} WHERE {self.key} = :{h}"]

    def transfer(self, source: str, target: str, amount: str) -> str:
        """Return how a solution moves an amount; all three are source."""
        item, column = self.domain.item, self.domain.amount
        floor, same = self._amount_rules()
        a, b = (
            f"(SELECT {{}} FROM {item.name} WHERE {self.key} = :{side})"
            for side in ("source", "target")
        )
        left = f"{a.format(column)} - :amount >= {a.format(floor) if floor else 0}"
        guards = [self._exists(item, "source"), self._exists(item, "target")]
        guards += [
            Guard(
                sql="SELECT :amount > 0 AND :source <> :target", error="refused: nothing would move"
            ),
            Guard(sql=f"SELECT {left}", error=f"refused: too little would be left of its {column}"),
        ]
        if same:
            sql = f"SELECT {a.format(same)} = {b.format(same)}"
            guards.append(Guard(sql=sql, error=f"refused: both must have one {same}"))
        words = "; ".join(spec.words for spec in self._specs)
        name = self._need(
            self.domain.do,
            f"Move some of its {column} from one {item.name} to another. Allowed where {words}.",
            {"source": TEXT, "target": TEXT, "amount": {"type": "integer"}},
            guards=tuple(guards),
            steps=(
                f"UPDATE {item.name} SET {column} = {column} - :amount WHERE {self.key} = :source",
                f"UPDATE {item.name} SET {column} = {column} + :amount WHERE {self.key} = :target",
            ),
        )
        return f"call({name!r}, source={source}, target={target}, amount={amount})"

    def put(self, entity: Entity, key: str, column: str, value: str) -> str:
        """Return how a solution sets a field; key and value are source."""
        name = self._need(
            f"set_{entity.name}_{column}",
            f"Set the {column} of a {entity.name}.",
            {entity.name: TEXT, column: {"type": "integer"}},
            guards=(self._exists(entity, entity.name),),
            steps=(
                f"UPDATE {entity.name} SET {column} = :{column} WHERE {self.key} = :{entity.name}",
            ),
        )
        return f"call({name!r}, {entity.name}={key}, {column}={value})"

    def _list(self, entity: Entity) -> str:
        whole = self._style.lookup in ("field", "table")
        what = "*" if whole else self.key
        return self._need(
            f"{self._style.verbs[1]}_{entity.plural}",
            f"List all {entity.plural}"
            + (" with all their fields." if whole else f", by {self.key}."),
            {},
            result=f"SELECT {what} FROM {entity.name} ORDER BY {self.key}",
            returns="rows" if whole else "column",
        )

    def _exists(self, entity: Entity, argument: str) -> Guard:
        found = f"SELECT EXISTS (SELECT * FROM {entity.name} WHERE {self.key} = :{argument})"
        return Guard(sql=found, error=f"there is no such {entity.name}")

    def _need(self, name: str, description: str, parameters: dict[str, Any], **fields: Any) -> str:
        self.tools[name] = SqlTool(
            name=name, description=description, parameters=parameters, **fields
        )
        return name


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(map(_literal, values))})"
