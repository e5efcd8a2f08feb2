import json

import pytest

from train.agents.environment import Task
from train.agents.environments import trips
from train.agents.environments.calling import caller, grade_answer, solve_and_grade
from train.agents.environments.drawing import random_for
from train.agents.environments.trip_world import Rules, World
from train.agents.environments.trips import Trips
from train.agents.tools import ToolError

REPORT_TOOLS = {
    "get_all_attractions_by_city": ["city"],
    "get_all_cities": [],
    "get_all_hotels_by_city": ["city"],
    "get_all_restaurants_by_city": ["city"],
    "get_city_by_attraction": ["attraction"],
    "get_city_by_hotel": ["hotel"],
    "get_city_by_restaurant": ["restaurant"],
    "get_city_transport": ["city"],
    "get_infos_by_attraction": ["info_keywords", "attraction"],
    "get_infos_by_city": ["info_keywords", "city"],
    "get_infos_by_hotel": ["info_keywords", "hotel"],
    "get_infos_by_restaurant": ["info_keywords", "restaurant"],
    "get_inter_city_transport": ["from_city", "to_city"],
    "get_weather_by_city_date": ["city", "date"],
    "submit_result": ["answer_text"],
}
DATES = ("2025-10-01", "2025-10-02", "2025-10-03")


def test_the_tools_are_the_reports(first):
    environment = Trips()
    with environment.open(first(environment, "train", 1)[0]) as episode:
        found = {tool.name: list(tool.parameters["properties"]) for tool in episode.tools}

    assert found == REPORT_TOOLS


def test_solutions_pass_and_no_answer_does_not(first):
    environment = Trips()
    tasks = first(environment, "train", 25) + first(environment, "held_out", 5)
    assert {task.difficulty for task in tasks} == {0, 1, 2, 3, 4}
    for task in tasks:
        answer, grade = solve_and_grade(environment, task)
        assert (grade.score, grade.note) == (1, "")
        assert grade_answer(environment, task, answer).score == 1
        for wrong in ("", "[]", "null", answer.replace("20", "19", 1), answer[:-1]):
            assert grade_answer(environment, task, wrong).score == 0


def test_another_trips_answer_is_wrong(first):
    environment = Trips()
    one, other = first(environment, "train", 2)

    answer, _ = solve_and_grade(environment, one)

    assert grade_answer(environment, other, answer).score == 0


def test_splits_share_no_prompt_and_processes_agree(first, in_another_process, in_this_process):
    environment = Trips()
    train, held_out = (
        {task.prompt for task in first(environment, split, 150)} for split in ("train", "held_out")
    )

    assert not train & held_out
    assert in_another_process("trips") == in_this_process(environment)


def world(hotel, meals, ticket, **rules):
    """A world with one city a day, of which the second day's prices are given: meals are (price, rating)."""
    made = World(random_for("trip"), Rules(start="Wuxi", dates=DATES, bands=True, **rules))
    for city in ("Alpha", "Beta"):
        made.db.execute("INSERT INTO city VALUES (?, 'east', 1, 'tea', 1, 1)", (city,))
    for city, price in (("Wuxi", 100), ("Alpha", hotel), ("Beta", 100)):
        made.db.execute(f"INSERT INTO hotel VALUES ('{city} H', '{city}', ?, 4, 3)", (price,))
        for n, (cost, rating) in enumerate(meals if city == "Alpha" else [(90, 3.0)] * 2):
            made.db.execute(
                f"INSERT INTO restaurant VALUES ('{city} R{n}', '{city}', ?, ?, '')", (cost, rating)
            )
        made.db.execute(
            f"INSERT INTO attraction VALUES ('{city} A', '{city}', ?, 4, '')", (ticket,)
        )
    return made


def plan():
    return [
        {
            "time": date,
            "city": city,
            "hotel": f"{city} H",
            "afternoon_restaurant": f"{city} R0",
            "afternoon_attraction": f"{city} A",
            "evening_restaurant": f"{city} R1",
        }
        for date, city in zip(DATES, ("Wuxi", "Alpha", "Beta"), strict=True)
    ]


GOOD, POOR = (100, 4.0), (100, 3.1)


@pytest.mark.parametrize(
    ("hotel", "meals", "ticket", "holds"),
    [
        (800, (GOOD, GOOD), 119, True),  # exactly 800 is luxury
        (800, (GOOD, (100, 3.9)), 119, False),
        (800, (GOOD, GOOD), 120, False),  # "less than" leaves the bound out
        (800, ((175, 4.0), (175, 4.0)), 100, False),
        (800, ((175, 4.0), (174, 4.0)), 100, True),
        (799, (GOOD, POOR), 179, True),
        (799, (GOOD, POOR), 180, False),
        (500, (GOOD, POOR), 179, True),  # exactly 500 is the middle band
        (500, ((300, 3.9), (300, 3.9)), 100, False),
        (499, ((300, 3.2), (300, 1.0)), 900, True),
        (499, (POOR, POOR), 10, False),
        (200, (POOR, POOR), 10, False),  # exactly 200 is the lowest band
        (199, (POOR, POOR), 900, True),  # below it nothing is asked for
    ],
)
def test_the_second_days_bands(hotel, meals, ticket, holds):
    parts = trips.check_days(world(hotel, meals, ticket), plan())

    assert parts["second day"] is holds
    assert all(parts[name] for name in ("dates", "start", "located", "no repeats"))


@pytest.mark.parametrize(
    ("day", "key", "value", "part"),
    [
        (1, "city", "Beta", "located"),
        (2, "city", "Wuxi", "no repeats"),
        (1, "hotel", "Beta H", "located"),
        (
            0,
            "evening_restaurant",
            "Wuxi R0",
            "no repeats",
        ),  # afternoon and evening count as one kind
        (2, "afternoon_restaurant", "Alpha R1", "no repeats"),
        (0, "city", "Beta", "start"),
        (1, "time", "2025-10-04", "dates"),
        (1, "hotel", "Nowhere", "located"),
    ],
)
def test_one_thing_wrong_is_seen(day, key, value, part):
    days = plan()
    days[day][key] = value

    assert trips.check_days(world(300, (GOOD, GOOD), 50), days)[part] is False


def test_trains_rain_and_budget_are_looked_at():
    made = world(300, (GOOD, GOOD), 50, direct=True, dry=True)
    made.rules = Rules(**{**vars(made.rules), "budget": 100 + 300 + 100 + 3 * 50 + 4 * 90 + 200})
    for city, date in zip(("Wuxi", "Alpha", "Beta"), DATES, strict=True):
        made.db.execute("INSERT INTO weather VALUES (?, ?, 'sunny', 20, 10)", (city, date))
    for pair in (("Wuxi", "Alpha"), ("Alpha", "Beta")):
        made.db.execute("INSERT INTO train VALUES (?, ?, 'G1', 1, 1)", pair)
    assert all(trips.check_days(made, plan()).values())

    made.db.execute("DELETE FROM train WHERE origin = 'Alpha'")
    made.db.execute("UPDATE weather SET sky = 'rain' WHERE city = 'Beta'")
    made.db.execute("UPDATE hotel SET price = 301 WHERE name = 'Alpha H'")

    parts = trips.check_days(made, plan())
    assert [name for name, held in parts.items() if not held] == ["trains", "no rain", "budget"]


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "{}", "[" * 9000, json.dumps([{"time": 1}] * 3), "x" * 30_000]
)
def test_what_is_no_plan_is_graded_0(text, first):
    environment = Trips()

    assert grade_answer(environment, first(environment, "train", 1)[0], text).score == 0


def test_what_was_submitted_last_counts(first):
    environment = Trips()
    task = first(environment, "train", 1)[0]
    answer, _ = solve_and_grade(environment, task)
    with environment.open(task) as episode:
        call = caller(episode.tools)
        call("submit_result", answer_text="[]")
        assert episode.grade(answer).score == 0
        call("submit_result", answer_text=answer)
        assert episode.grade("").score == 1


def test_names_that_are_not_there_are_told(first):
    environment = Trips()
    with environment.open(first(environment, "train", 1)[0]) as episode:
        call = caller(episode.tools)
        with pytest.raises(ToolError, match="there is no city 'Atlantis'"):
            call("get_all_hotels_by_city", city="Atlantis")
        city = call("get_all_cities")[0]
        hotel = call("get_all_hotels_by_city", city=city)[0]
        assert call("get_city_by_hotel", hotel=hotel) == city
        with pytest.raises(
            ToolError, match="info_keywords may be price, rating, stars, not 'colour'"
        ):
            call("get_infos_by_hotel", info_keywords=["colour"], hotel=hotel)


def test_a_task_survives_json(first):
    environment = Trips()
    task = first(environment, "train", 1)[0]
    again = Task(**{**vars(task), "data": json.loads(json.dumps(task.data))})

    assert solve_and_grade(environment, again)[1].score == 1
