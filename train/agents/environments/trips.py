"""Trip planning, after the example of the DeepSeek-V3.2 report: hard to find a plan, easy to check one.

Boundaries that the report's wording leaves open, as settled here: a hotel at exactly the luxury price is luxury; at
exactly the middle price it is in the middle band; below the lowest band no rule holds. "Cost less than" excludes the
bound, "rated at least" includes it. A restaurant is repeated if its name stands twice among all six of the trip; each
kind of place is looked at for itself. The first day is spent in the city where the trip starts.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from train.agents.environment import Call, Grade, Split, Task
from train.agents.environments.drawing import draw_tasks, random_for
from train.agents.environments.trip_world import Rules, World, draw_rules
from train.agents.tools import Tool

KEYS = (
    "time", "city", "hotel", "afternoon_restaurant", "afternoon_attraction", "evening_restaurant",
)  # fmt: skip
PLACES = {
    "hotel": "hotel",
    "afternoon_restaurant": "restaurant",
    "evening_restaurant": "restaurant",
    "afternoon_attraction": "attraction",
}
HARDEST = 4
MAX_CHARS = 20_000  # of an answer
SYSTEM = "You plan trips. Look everything up with the tools; what you remember of real places does not hold here."

Day = Mapping[str, str]


class TripEpisode:
    """An attempt at one trip: a database of its own.

    Args:
        world: The database.

    Attributes:
        tools: The fifteen.
    """

    def __init__(self, world: World) -> None:
        """Keep the world."""
        self._world = world
        self.tools: Sequence[Tool] = world.tools()

    def grade(self, answer: str) -> Grade:
        """Judge what was handed in, or the answer where nothing was."""
        text = answer if self._world.submitted is None else self._world.submitted
        days = read_days(text)
        if days is None:
            return Grade(score=0.0, note=f"the answer is no JSON list of 3 objects with {KEYS}")
        parts = check_days(self._world, days)
        failed = [name for name, held in parts.items() if not held]
        note = f"broken: {', '.join(failed)}" if failed else ""
        shown = {name: float(held) for name, held in parts.items()}
        return Grade(score=float(not failed), parts=shown, note=note)


class Trips:
    """Trips of three days from a city, in worlds made from a seed."""

    name = "trips"
    summary = "plan three days in a made-up database of cities, by 15 tools, within rules of cost"

    def tasks(self, split: Split, seed: int = 0) -> Iterator[Task]:
        """Yield trips without end; their difficulty goes round."""
        return draw_tasks(self.name, split, seed, self._make)

    @contextlib.contextmanager
    def open(self, task: Task) -> Iterator[TripEpisode]:
        """Make the trip's database."""
        world = _world(task.name, task.difficulty)
        try:
            yield TripEpisode(world)
        finally:
            world.db.close()

    def solve(self, task: Task, call: Call) -> str:
        """Search all routes for a plan, the cheapest of each, and hand it in."""
        rules = Rules(**{**task.data, "dates": tuple(task.data["dates"])})  # JSON has lists alone
        return solve(rules, call)

    def _make(self, name: str, rng: Random) -> Task:
        difficulty = rng.randrange(HARDEST + 1)
        world = _world(name, difficulty)
        world.db.close()
        return Task(
            name=name,
            environment=self.name,
            prompt=prompt(world.rules),
            system=SYSTEM,
            data=vars(world.rules),
            difficulty=difficulty,
        )


def _world(name: str, difficulty: int) -> World:
    rng = random_for("trips", "world", name)
    return World(rng, draw_rules(rng, difficulty), cap=difficulty >= 3)


def prompt(rules: Rules) -> str:
    """Say rules in words.

    Args:
        rules: Of the trip.

    Returns:
        What the user asks for.
    """
    lines = [
        f"Please plan three days for me, {rules.dates[0]} to {rules.dates[2]}. I start from {rules.start} and spend the"
        " first day there; each day is in another city. No city, hotel, restaurant or attraction may come twice in the"
        " whole trip, and each day's hotel, two restaurants and attraction must be in that day's city."
    ]
    if rules.bands:
        lines += [
            "On the second day I watch what I spend:",
            f"- If its hotel costs {rules.luxury} CNY or more, its two restaurants together must cost less than"
            f" {rules.spend} CNY, both must be rated at least {rules.high_rating}, and the attraction's ticket"
            " must cost"
            f" less than {rules.luxury_ticket} CNY.",
            f"- If it costs {rules.middle} or more but less than {rules.luxury}, at least one of the"
            " restaurants must be"
            f" rated at least {rules.high_rating}, and the ticket must cost less than {rules.middle_ticket}.",
            f"- If it costs {rules.low} or more but less than {rules.middle}, at least one of the restaurants must be"
            f" rated at least {rules.low_rating}.",
            f"- Below {rules.low} anything will do.",
        ]
    if rules.direct:
        lines.append("From each day's city to the next day's there must be a train.")
    if rules.dry:
        lines.append("I do not want to be in a city on a day with rain there.")
    if rules.budget is not None:
        lines.append(
            f"All hotels, restaurants and tickets together may cost at most {rules.budget} CNY."
        )
    keys = ", ".join(json.dumps(key) for key in KEYS)
    lines.append(
        f"Answer with a JSON list of three objects, one a day in order, each with {keys}; time is the date."
    )
    return "\n".join(lines)


def read_days(text: str) -> list[Day] | None:
    """Read an answer.

    Args:
        text: A JSON list, between fences or not.

    Returns:
        Three days; None where it is something else.
    """
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        found = json.loads(text) if len(text) <= MAX_CHARS else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != 3:
        return None
    good = all(
        isinstance(day, dict)
        and set(day) == set(KEYS)
        and all(isinstance(value, str) for value in day.values())
        for day in found
    )
    return found if good else None


def check_days(world: World, days: Sequence[Day]) -> dict[str, bool]:
    """Hold a plan against a world's rules.

    Args:
        world: With its rules.
        days: The plan.

    Returns:
        Rule -> whether it is kept.
    """
    rules = world.rules
    rows = [{key: world.row(kind, day[key]) for key, kind in PLACES.items()} for day in days]
    located = all(
        row is not None and row["city"] == day["city"]
        for day, places in zip(days, rows, strict=True)
        for row in places.values()
    )
    parts = {
        "dates": tuple(day["time"] for day in days) == rules.dates,
        "start": days[0]["city"] == rules.start,
        "located": located,
        "no repeats": not _repeats(days),
    }
    if rules.bands:
        parts["second day"] = located and _keeps_bands(rules, rows[1])
    if rules.direct:
        parts["trains"] = all(
            world.has_train(a["city"], b["city"]) for a, b in itertools.pairwise(days)
        )
    if rules.dry:
        parts["no rain"] = all(
            world.sky(day["city"], day["time"]) not in ("rain", "") for day in days
        )
    if rules.budget is not None:
        parts["budget"] = located and sum(map(_cost, rows)) <= rules.budget
    return parts


def _repeats(days: Sequence[Day]) -> bool:
    kinds = (
        ("city",),
        ("hotel",),
        ("afternoon_restaurant", "evening_restaurant"),
        ("afternoon_attraction",),
    )
    names = ([day[key] for day in days for key in keys] for keys in kinds)
    return any(len(set(found)) < len(found) for found in names)


def _cost(places: Mapping[str, Any]) -> float:
    return sum(
        row["ticket" if key == "afternoon_attraction" else "price"] for key, row in places.items()
    )


def _keeps_bands(rules: Rules, places: Mapping[str, Any]) -> bool:
    meals = [places["afternoon_restaurant"], places["evening_restaurant"]]
    ratings = [meal["rating"] for meal in meals]
    ticket, price = places["afternoon_attraction"]["ticket"], places["hotel"]["price"]
    if price >= rules.luxury:
        spent = sum(meal["price"] for meal in meals)
        cheap = spent < rules.spend and ticket < rules.luxury_ticket
        return cheap and min(ratings) >= rules.high_rating
    if price >= rules.middle:
        return ticket < rules.middle_ticket and max(ratings) >= rules.high_rating
    return price < rules.low or max(ratings) >= rules.low_rating


def solve(rules: Rules, call: Call) -> str:
    """Find a plan by calls alone: for each route the cheapest day of each city that the rules allow.

    Args:
        rules: As the prompt says them.
        call: Calls a tool.

    Returns:
        The plan, handed in.
    """
    others = [city for city in call("get_all_cities") if city != rules.start]
    for middle, last in itertools.permutations(others, 2):
        route = (rules.start, middle, last)
        if rules.direct and not all(
            call("get_inter_city_transport", from_city=a, to_city=b)
            for a, b in itertools.pairwise(route)
        ):
            continue
        if rules.dry and any(
            call("get_weather_by_city_date", city=city, date=date)["sky"] == "rain"
            for city, date in zip(route, rules.dates, strict=True)
        ):
            continue
        days = [_cheapest_day(rules, city, call, is_second=city == middle) for city in route]
        if None in days:
            continue
        plans = [day for day in days if day is not None]
        if rules.budget is not None and sum(map(_cost, plans)) > rules.budget:
            continue
        answer = json.dumps([
            {"time": date, "city": city, **{key: row["name"] for key, row in day.items()}}
            for date, city, day in zip(rules.dates, route, plans, strict=True)
        ])  # fmt: skip
        call("submit_result", answer_text=answer)
        return answer
    raise AssertionError("every world has a plan by construction")


def _cheapest_day(
    rules: Rules, city: str, call: Call, *, is_second: bool
) -> dict[str, dict[str, Any]] | None:
    """Return the cheapest places of a city for one day; None where its rules allow none."""
    hotels = _places(call, city, "hotel", ["price"])
    restaurants = _places(call, city, "restaurant", ["price", "rating"])
    attractions = _places(call, city, "attraction", ["ticket"])
    best = None
    for hotel, attraction in itertools.product(hotels, attractions):
        for afternoon, evening in itertools.combinations(restaurants, 2):
            chosen = (hotel, afternoon, evening, attraction)
            day = dict(zip(PLACES, chosen, strict=True))
            allowed = not (is_second and rules.bands) or _keeps_bands(rules, day)
            if allowed and (best is None or _cost(day) < _cost(best)):
                best = day
    return best


def _places(call: Call, city: str, kind: str, keywords: list[str]) -> list[dict[str, Any]]:
    names = call(f"get_all_{kind}s_by_city", city=city)
    return [
        {"name": name, **call(f"get_infos_by_{kind}", info_keywords=keywords, **{kind: name})}
        for name in names
    ]
