"""Rules of who may hold what, each said three ways: as SQL for the tool, as calls for a solution, and on plain rows.

The three are written apart from each other on purpose: a task is kept only where they agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.agents.synthesis.domains import RuleSpec

if TYPE_CHECKING:
    from train.agents.synthesis.sketch import Sketch

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A rule of one world.

    Attributes:
        spec: Which, on which columns.
    """

    spec: RuleSpec

    def sql(self, s: "Sketch") -> str:
        """Return the condition on rows `h` and `i` of holder and item."""
        raise NotImplementedError

    def source(self, s: "Sketch") -> str:
        """Return the condition in Python on dicts `h` and `i`, by calls."""
        raise NotImplementedError

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Say whether it holds in the sketch's rows as they are now."""
        raise NotImplementedError


class Capacity(Rule):
    """An item has a number of places."""

    def sql(self, s: "Sketch") -> str:
        """Count links of the item."""
        taken = f"SELECT count(*) FROM {s.domain.link} x WHERE x.{s.domain.item.name} = i.{s.key}"
        return f"({taken}) < i.{self.spec.columns[0]}"

    def source(self, s: "Sketch") -> str:
        """Count its holders."""
        return f"len({s.holders_of(s.field('i'))}) < i[{self.spec.columns[0]!r}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Count pairs."""
        return sum(i == item[s.key] for _, i in s.links) < item[self.spec.columns[0]]


class Single(Rule):
    """An item has one place."""

    def sql(self, s: "Sketch") -> str:
        """Find no link of the item."""
        return f"i.{s.key} NOT IN (SELECT {s.domain.item.name} FROM {s.domain.link})"

    def source(self, s: "Sketch") -> str:
        """Find no holder."""
        return f"len({s.holders_of(s.field('i'))}) == 0"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Find no pair."""
        return all(i != item[s.key] for _, i in s.links)


class Quota(Rule):
    """A holder may have a number of items."""

    def sql(self, s: "Sketch") -> str:
        """Count links of the holder."""
        held = f"SELECT count(*) FROM {s.domain.link} x WHERE x.{s.holder.name} = h.{s.key}"
        return f"({held}) < h.{self.spec.columns[0]}"

    def source(self, s: "Sketch") -> str:
        """Count what is held."""
        return f"len({s.items_of(s.field('h'))}) < h[{self.spec.columns[0]!r}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Count pairs."""
        return len(s.held(holder[s.key])) < holder[self.spec.columns[0]]


class Status(Rule):
    """A holder must be in one state."""

    def sql(self, s: "Sketch") -> str:
        """Compare the state."""
        return f"h.{self.spec.columns[0]} = '{self.spec.values[0]}'"

    def source(self, s: "Sketch") -> str:
        """Compare the state."""
        return f"h[{self.spec.columns[0]!r}] == {self.spec.values[0]!r}"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Compare the state."""
        return holder[self.spec.columns[0]] == self.spec.values[0]


class Level(Rule):
    """An item asks for a level of its holder."""

    def sql(self, s: "Sketch") -> str:
        """Compare levels."""
        return f"h.{self.spec.columns[0]} >= i.{self.spec.columns[1]}"

    def source(self, s: "Sketch") -> str:
        """Compare levels."""
        return f"i[{self.spec.columns[1]!r}] <= h[{self.spec.columns[0]!r}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Compare levels."""
        return holder[self.spec.columns[0]] >= item[self.spec.columns[1]]


class Match(Rule):
    """What a holder needs is what the item's group offers."""

    def sql(self, s: "Sketch") -> str:
        """Look the group up."""
        group = s.domain.group.name
        offered = f"SELECT g.{self.spec.columns[1]} FROM {group} g WHERE g.{s.key} = i.{group}"
        return f"h.{self.spec.columns[0]} = ({offered})"

    def source(self, s: "Sketch") -> str:
        """Look the group up."""
        group = s.domain.group
        offered = s.value(group, f"i[{group.name!r}]", self.spec.columns[1])
        return f"h[{self.spec.columns[0]!r}] == {offered}"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Look the group up."""
        group = s.rows[s.domain.group.name][item[s.domain.group.name]]
        return holder[self.spec.columns[0]] == group[self.spec.columns[1]]


class Funds(Rule):
    """A holder pays for an item, and is paid back."""

    def sql(self, s: "Sketch") -> str:
        """Compare with what is there."""
        return f"i.{self.spec.columns[1]} <= h.{self.spec.columns[0]}"

    def source(self, s: "Sketch") -> str:
        """Compare with what is there."""
        return f"i[{self.spec.columns[1]!r}] <= h[{self.spec.columns[0]!r}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Compare with what is there."""
        return holder[self.spec.columns[0]] - item[self.spec.columns[1]] >= 0


class Apart(Rule):
    """A holder has no two items alike in a column."""

    def sql(self, s: "Sketch") -> str:
        """Look at all that is held."""
        item, column = s.domain.item.name, self.spec.columns[0]
        held = f"SELECT y.{column} FROM {s.domain.link} x JOIN {item} y ON y.{s.key} = x.{item}"
        return f"i.{column} NOT IN ({held} WHERE x.{s.holder.name} = h.{s.key})"

    def source(self, s: "Sketch") -> str:
        """Look at all that is held."""
        column = self.spec.columns[0]
        value = s.value(s.domain.item, "k", column)
        return f"i[{column!r}] not in [{value} for k in {s.items_of(s.field('h'))}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Look at all that is held."""
        column, items = self.spec.columns[0], s.rows[s.domain.item.name]
        return all(items[key][column] != item[column] for key in s.held(holder[s.key]))


class Load(Rule):
    """What a holder's items add up to is bounded."""

    def sql(self, s: "Sketch") -> str:
        """Add up what is held."""
        item, column = s.domain.item.name, self.spec.columns[1]
        held = f"SELECT coalesce(sum(y.{column}), 0) FROM {s.domain.link} x JOIN {item} y ON y.{s.key} = x.{item}"
        return (
            f"({held} WHERE x.{s.holder.name} = h.{s.key}) + i.{column} <= h.{self.spec.columns[0]}"
        )

    def source(self, s: "Sketch") -> str:
        """Add up what is held."""
        bound, column = self.spec.columns
        held = f"sum({s.value(s.domain.item, 'k', column)} for k in {s.items_of(s.field('h'))})"
        return f"{held} + i[{column!r}] <= h[{bound!r}]"

    def holds(self, s: "Sketch", holder: Row, item: Row) -> bool:
        """Add up what is held."""
        bound, column = self.spec.columns
        items = s.rows[s.domain.item.name]
        held = [items[key][column] for key in s.held(holder[s.key])]
        return sum([*held, item[column]]) <= holder[bound]


KINDS: Mapping[str, type[Rule]] = {
    "capacity": Capacity,
    "single": Single,
    "quota": Quota,
    "status": Status,
    "level": Level,
    "match": Match,
    "funds": Funds,
    "apart": Apart,
    "load": Load,
}
