"""The world that trips are planned in: a database made from a seed, and the tools that look things up in it."""

import datetime
import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from train.agents.environments.calling import describe
from train.agents.tools import Tool, ToolError

CITIES = (
    "Hangzhou", "Suzhou", "Nanjing", "Shanghai", "Ningbo", "Wuxi", "Yangzhou", "Shaoxing", "Hefei", "Xiamen",
    "Qingdao", "Chengdu", "Guilin", "Kunming", "Dali", "Xi'an", "Luoyang", "Wuhan", "Changsha", "Harbin",
)  # fmt: skip
FIRST = (
    "Amber", "Bamboo", "Cedar", "Crane", "Dawn", "Ember", "Fern", "Golden", "Harbour", "Ivory", "Jade", "Lantern",
    "Lotus", "Maple", "Misty", "Moon", "Orchid", "Pearl", "Pine", "Plum", "Quiet", "Red", "River", "Silver", "Spring",
    "Stone", "Swan", "Tea", "Willow", "Winter",
)  # fmt: skip
SECOND = {
    "hotel": ("Court Hotel", "Gate Inn", "Garden Hotel", "House", "Lodge", "Palace Hotel", "Tower Hotel"),
    "restaurant": ("Bowl", "Hearth", "Kitchen", "Noodle House", "Pavilion", "Table", "Teahouse", "Wok"),
    "attraction": ("Arboretum", "Bridge", "Gallery", "Hill", "Lake", "Museum", "Pagoda", "Temple", "Wall"),
}  # fmt: skip
SKIES = ("sunny", "cloudy", "windy", "rain")
COLUMNS = {
    "city": ("region", "population", "specialty"),
    "hotel": ("price", "rating", "stars"),
    "restaurant": ("price", "rating", "cuisine"),
    "attraction": ("ticket", "rating", "kind"),
}
SCHEMA = """
CREATE TABLE city (name TEXT PRIMARY KEY, region TEXT, population INTEGER, specialty TEXT, metro REAL, taxi REAL);
CREATE TABLE hotel (name TEXT PRIMARY KEY, city TEXT, price REAL, rating REAL, stars INTEGER);
CREATE TABLE restaurant (name TEXT PRIMARY KEY, city TEXT, price REAL, rating REAL, cuisine TEXT);
CREATE TABLE attraction (name TEXT PRIMARY KEY, city TEXT, ticket REAL, rating REAL, kind TEXT);
CREATE TABLE train (origin TEXT, destination TEXT, number TEXT, hours REAL, price REAL);
CREATE TABLE weather (city TEXT, date TEXT, sky TEXT, high INTEGER, low INTEGER);
"""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a trip must keep to beyond places that are in their day's city and never repeated.

    Attributes:
        start: City of the first day.
        dates: One a day, as 2025-10-01.
        bands: Whether the second day's hotel bounds its other costs, by the numbers below.
        luxury: Price of a hotel from which the strictest band holds: this price is in it.
        middle: From which the middle band holds, this price included, `luxury` excluded.
        low: From which the lowest band holds, this price included, `middle` excluded; below it there is no rule.
        spend: Both restaurants of a luxury day cost less together.
        high_rating: Of both restaurants then, and of one in the middle band, at least.
        luxury_ticket: The attraction costs less than this on a luxury day.
        middle_ticket: The same in the middle band.
        low_rating: Of one restaurant in the lowest band, at least.
        direct: Whether a train goes from each day's city to the next day's.
        dry: Whether no day's city may have rain on that day.
        budget: What hotels, restaurants and tickets may cost together; None leaves that open.
    """

    start: str
    dates: tuple[str, ...]
    bands: bool
    luxury: int = 800
    middle: int = 500
    low: int = 200
    spend: int = 350
    high_rating: float = 4.0
    luxury_ticket: int = 120
    middle_ticket: int = 180
    low_rating: float = 3.2
    direct: bool = False
    dry: bool = False
    budget: int | None = None


def draw_rules(rng: Random, difficulty: int) -> Rules:
    """Draw rules; from difficulty 2 on the numbers of the bands differ from trip to trip."""
    first = datetime.date(2025, 10, 1) + datetime.timedelta(days=rng.randrange(60))
    dates = tuple(str(first + datetime.timedelta(days=day)) for day in range(3))
    numbers: dict[str, Any] = {}
    if difficulty >= 2:
        numbers = {
            "luxury": rng.randrange(700, 1000, 50),
            "middle": rng.randrange(400, 600, 50),
            "spend": rng.randrange(260, 400, 10),
            "luxury_ticket": rng.randrange(90, 130, 10),
            "middle_ticket": rng.randrange(140, 200, 10),
        }
    return Rules(
        start=rng.choice(CITIES),
        dates=dates,
        bands=difficulty >= 1,
        direct=difficulty >= 2,
        dry=difficulty >= 4,
        **numbers,
    )


class World:
    """A database and its tools.

    Args:
        rng: Draws it.
        rules: That at least one trip in it keeps to.

    Attributes:
        rules: The same, with a budget if `cap` was asked for.
        submitted: What was submitted last; None if nothing was.
    """

    def __init__(self, rng: Random, rules: Rules, *, cap: bool = False) -> None:
        """Make it; `cap` adds a budget that the trip put in keeps to, with a tenth to spare."""
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(SCHEMA)
        self.submitted: str | None = None
        others = rng.sample([city for city in CITIES if city != rules.start], 7)
        route = (rules.start, *rng.sample(others, 2))
        names = {kind: _names(rng, kind) for kind in SECOND}
        cities = sorted((rules.start, *others))
        for city in cities:
            self._fill_city(rng, city, names)
        self._fill_roads(rng, cities, route)
        for city in cities:
            for date in rules.dates:
                planned = (city, date) in zip(route, rules.dates, strict=True)
                sky = rng.choice(SKIES[:-1] if planned else SKIES)
                high = rng.randrange(8, 32)
                self._insert("weather", city, date, sky, high, high - rng.randrange(4, 10))
        spent = sum(self._plant(rng, rules, city, names) for city in route)
        budget = round(1.1 * spent) if cap else None
        self.rules = Rules(**{**vars(rules), "budget": budget})

    def _insert(self, table: str, *values: str | int | float) -> None:
        marks = ", ".join("?" * len(values))
        self.db.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def _fill_city(self, rng: Random, city: str, names: dict[str, list[str]]) -> None:
        region = rng.choice(("north", "south", "east", "west"))
        specialty = rng.choice(("silk", "tea", "porcelain", "noodles", "fans", "paper"))
        population = rng.randrange(1, 25) * 1_000_000
        metro, taxi = rng.randrange(2, 9), rng.randrange(10, 60)
        self._insert("city", city, region, population, specialty, metro, taxi)
        for _ in range(5):
            price = rng.choice((150, 199, 200, 260, 340, 499, 500, 620, 750, 799, 800, 960, 1200))
            stars = 2 + (price >= 200) + (price >= 500) + (price >= 800)
            self._insert("hotel", names["hotel"].pop(), city, price, _rating(rng, 3.0, 4.9), stars)
        for _ in range(6):
            cuisine = rng.choice(("Hunan", "Cantonese", "Sichuan", "vegetarian", "seafood"))
            price, rating = rng.randrange(60, 320, 10), _rating(rng, 2.6, 4.6)
            self._insert("restaurant", names["restaurant"].pop(), city, price, rating, cuisine)
        for _ in range(4):
            kind = rng.choice(("nature", "history", "art"))
            ticket, rating = rng.randrange(60, 260, 10), _rating(rng, 3.0, 4.9)
            self._insert("attraction", names["attraction"].pop(), city, ticket, rating, kind)

    def _fill_roads(self, rng: Random, cities: Sequence[str], route: Sequence[str]) -> None:
        planned = list(itertools.pairwise(route))
        for origin in cities:
            for destination in cities:
                if (origin, destination) in planned or (
                    origin != destination and rng.random() < 0.3
                ):
                    number, hours = f"G{rng.randrange(100, 9999)}", rng.randrange(5, 80) / 10
                    price = rng.randrange(30, 400)
                    self._insert("train", origin, destination, number, hours, price)

    def _plant(self, rng: Random, rules: Rules, city: str, names: dict[str, list[str]]) -> float:
        """Put in a day that keeps to the strictest band; return what it costs."""
        price = rng.choice((rules.luxury, rules.middle, rules.low))
        ticket = min(rules.luxury_ticket, rules.middle_ticket) - 10
        meals = [rules.spend // 2 - 10 * rng.randrange(1, 4) for _ in range(2)]
        self._insert("hotel", names["hotel"].pop(), city, price, 4.5, 4)
        for meal in meals:
            self._insert(
                "restaurant", names["restaurant"].pop(), city, meal, rules.high_rating, "Hunan"
            )
        self._insert("attraction", names["attraction"].pop(), city, ticket, 4.0, "nature")
        return float(price + ticket + sum(meals))

    def row(self, kind: str, name: str) -> sqlite3.Row | None:
        """Return a place's row.

        Args:
            kind: A table with names.
            name: Of the place.

        Returns:
            The row; None where there is none.
        """
        return self.db.execute(f"SELECT * FROM {kind} WHERE name = ?", (name,)).fetchone()

    def has_train(self, origin: str, destination: str) -> bool:
        """Say whether a train goes from one city to another."""
        query = "SELECT 1 FROM train WHERE origin = ? AND destination = ?"
        return self.db.execute(query, (origin, destination)).fetchone() is not None

    def sky(self, city: str, date: str) -> str:
        """Return the weather of a city on a day; "" where nothing is known."""
        query = "SELECT sky FROM weather WHERE city = ? AND date = ?"
        found = self.db.execute(query, (city, date)).fetchone()
        return found["sky"] if found else ""

    def tools(self) -> list[Tool]:
        """Return the fifteen tools, named as in the DeepSeek-V3.2 report."""
        found = [
            describe(self._names_of("city"), "List all cities.", name="get_all_cities"),
            describe(
                self._city_transport, "Tell the costs of metro and taxi inside a city.",
                name="get_city_transport", city="Name of the city.",
            ),
            describe(
                self._trains, "List the trains from one city to another, with hours and price; none if there are none.",
                name="get_inter_city_transport", from_city="Where it starts.", to_city="Where it ends.",
            ),
            describe(
                self._weather, "Tell the weather of a city on a day.",
                name="get_weather_by_city_date", city="Name of the city.", date="Such as 2025-10-01.",
            ),
            describe(
                self._submit, "Hand in the final answer; the last one handed in counts.",
                name="submit_result", answer_text="The answer in the form asked for.",
            ),
        ]  # fmt: skip
        for kind, columns in COLUMNS.items():
            keywords: Any = {
                "type": "array",
                "items": {"type": "string", "enum": list(columns)},
                "description": f"What to tell: any of {', '.join(columns)}.",
            }
            arguments: dict[str, Any] = {"info_keywords": keywords, kind: f"Name of the {kind}."}
            found.append(
                describe(
                    self._infos_of(kind), f"Tell about one {kind}. Prices are in CNY.",
                    name=f"get_infos_by_{kind}", **arguments,
                )
            )  # fmt: skip
            if kind != "city":
                found += [
                    describe(
                        self._names_of(kind), f"List the names of all {kind}s in a city.",
                        name=f"get_all_{kind}s_by_city", city="Name of the city.",
                    ),
                    describe(
                        self._city_of(kind), f"Tell which city a {kind} is in.",
                        name=f"get_city_by_{kind}", **{kind: f"Name of the {kind}."},
                    ),
                ]  # fmt: skip
        return sorted(found, key=lambda tool: tool.name)

    def _need(self, kind: str, name: str) -> sqlite3.Row:
        row = self.row(kind, name)
        if row is None:
            raise ToolError(f"there is no {kind} {name!r}")
        return row

    def _names_of(self, kind: str) -> Any:
        def names(city: str | None = None) -> list[str]:
            if city is None:
                return [
                    row["name"] for row in self.db.execute("SELECT name FROM city ORDER BY name")
                ]
            self._need("city", city)
            query = f"SELECT name FROM {kind} WHERE city = ? ORDER BY name"
            return [row["name"] for row in self.db.execute(query, (city,))]

        return names

    def _city_of(self, kind: str) -> Any:
        return lambda **argument: self._need(kind, argument[kind])["city"]

    def _infos_of(self, kind: str) -> Any:
        def infos(info_keywords: list[str], **argument: str) -> dict[str, Any]:
            row = self._need(kind, argument[kind])
            for keyword in info_keywords:
                if keyword not in COLUMNS[kind]:
                    raise ToolError(
                        f"info_keywords may be {', '.join(COLUMNS[kind])}, not {keyword!r}"
                    )
            return {keyword: row[keyword] for keyword in info_keywords}

        return infos

    def _city_transport(self, city: str) -> dict[str, Any]:
        row = self._need("city", city)
        return {"metro": row["metro"], "taxi": row["taxi"]}

    def _trains(self, from_city: str, to_city: str) -> list[dict[str, Any]]:
        self._need("city", from_city)
        self._need("city", to_city)
        query = "SELECT number, hours, price FROM train WHERE origin = ? AND destination = ?"
        return [dict(row) for row in self.db.execute(query, (from_city, to_city))]

    def _weather(self, city: str, date: str) -> dict[str, Any]:
        self._need("city", city)
        query = "SELECT sky, high, low FROM weather WHERE city = ? AND date = ?"
        found = self.db.execute(query, (city, date)).fetchone()
        if found is None:
            raise ToolError(f"nothing is known of {city} on {date}")
        return dict(found)

    def _submit(self, answer_text: str) -> str:
        self.submitted = answer_text
        return "handed in"


def _names(rng: Random, kind: str) -> list[str]:
    """Return all names of a kind of place, in an order of their own."""
    found = [f"{first} {second}" for first in FIRST for second in SECOND[kind]]
    rng.shuffle(found)
    return found


def _rating(rng: Random, low: float, high: float) -> float:
    return round(rng.uniform(low, high), 1)
