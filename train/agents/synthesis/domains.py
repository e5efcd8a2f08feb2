"""Categories of worlds: what there is in them, what can be done, and which rules may hold. Data, no code."""

from dataclasses import dataclass
from typing import Literal

PEOPLE = (
    "Ana",
    "Boris",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pablo",
    "Quinn",
    "Rosa",
    "Sven",
    "Tara",
    "Umar",
    "Vera",
    "Wanda",
    "Yusuf",
    "Zoe",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TOWNS = ("Arden", "Belmont", "Corby", "Dunley", "Elmstead", "Farrow")


@dataclass(frozen=True)
class Column:
    """A property of an entity.

    Attributes:
        name: Of the column, which words are made of too.
        choices: Values it may have; () for a number.
        low: Of a number.
        high: Of a number, included.
        step: Between numbers.
        ref: The entity whose key it holds; "" for none.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    step: int = 1
    ref: str = ""


@dataclass(frozen=True)
class Entity:
    """A kind of thing.

    Attributes:
        name: One.
        plural: Many.
        names: That they are called.
        columns: Beside the name.
        count: How few and how many a world has.
    """

    name: str
    plural: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    count: tuple[int, int] = (6, 9)


@dataclass(frozen=True)
class RuleSpec:
    """A rule that a world of the category may have.

    Attributes:
        kind: As `rules.KINDS` names it.
        columns: That it goes by.
        words: For the prompt: when is one of the second entity allowed to one of the first?
        values: That the rule compares with.
    """

    kind: str
    columns: tuple[str, ...]
    words: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Domain:
    """A category.

    Attributes:
        name: Of the category.
        group: What the things of `item` belong to.
        item: What is lent, booked or moved; has a column of the group's name.
        holder: Who holds items; None where amounts move between items.
        link: The table that says who holds what; "" where amounts move.
        do: The tool that adds a link, or moves an amount.
        undo: The tool that takes a link away.
        phrase: `do` in words, of {holder} and {item}, or {amount}, {source} and {target}.
        undo_phrase: `undo` in words.
        rules: Of which a world has some.
        amount: The column of `item` that moves; "" where links are made.
        settable: Entity and column that a tool may set.
    """

    name: str
    group: Entity
    item: Entity
    holder: Entity | None
    link: str
    do: str
    undo: str
    phrase: str
    undo_phrase: str
    rules: tuple[RuleSpec, ...]
    amount: str = ""
    settable: tuple[Literal["group", "item", "holder"], str] = ("item", "")


def _numbered(prefix: str, numbers: range) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in numbers)


LIBRARY = Domain(
    name="library",
    group=Entity(
        "branch",
        "branches",
        TOWNS,
        (Column("floors", low=2, high=14), Column("shelves", low=20, high=900)),
        (5, 6),
    ),
    item=Entity(
        "book",
        "books",
        (
            "Amber Tide",
            "Blue Furrow",
            "Cold Harvest",
            "Deep Lantern",
            "Early Snow",
            "Far Orchard",
            "Glass River",
            "Hollow Hill",
            "Iron Song",
            "Last Ferry",
            "Mild Winter",
            "North Gate",
        ),
        (
            Column("branch", ref="branch"),
            Column("copies", low=1, high=2),
            Column("year", low=1930, high=2024),
            Column("pages", low=90, high=880),
            Column("grade", low=1, high=3),
        ),
        (8, 11),
    ),
    holder=Entity(
        "member",
        "members",
        PEOPLE,
        (
            Column("quota", low=2, high=4),
            Column("level", low=1, high=3),
            Column("standing", ("good", "blocked")),
            Column("joined", low=1990, high=2024),
        ),
    ),
    link="loan",
    do="lend_book",
    undo="return_book",
    phrase="lend {item} to {holder}",
    undo_phrase="take {item} back from {holder}",
    rules=(
        RuleSpec("capacity", ("copies",), "fewer members have it on loan than it has copies"),
        RuleSpec("quota", ("quota",), "the member holds fewer books than their quota"),
        RuleSpec("status", ("standing",), "the member's standing is good", ("good",)),
        RuleSpec("level", ("level", "grade"), "the book's grade is at most the member's level"),
    ),
    settable=("holder", "level"),
)

CLINIC = Domain(
    name="clinic",
    group=Entity(
        "doctor",
        "doctors",
        ("Dr. Abel", "Dr. Brandt", "Dr. Cole", "Dr. Diaz", "Dr. Engel", "Dr. Frost", "Dr. Gray"),
        (
            Column("room", low=101, high=399),
            Column("field", ("skin", "eyes", "heart", "bones")),
            Column("practice", low=4, high=38),
        ),
        (5, 7),
    ),
    item=Entity(
        "slot",
        "slots",
        _numbered("S", range(10, 40)),
        (
            Column("doctor", ref="doctor"),
            Column("day", DAYS),
            Column("minutes", low=10, high=90, step=5),
            Column("fee", low=20, high=240, step=5),
        ),
        (9, 13),
    ),
    holder=Entity(
        "patient",
        "patients",
        PEOPLE,
        (
            Column("need", ("skin", "eyes", "heart", "bones")),
            Column("age", low=5, high=95),
            Column("visits", low=2, high=4),
        ),
    ),
    link="appointment",
    do="book_slot",
    undo="cancel_slot",
    phrase="book slot {item} for {holder}",
    undo_phrase="cancel slot {item} of {holder}",
    rules=(
        RuleSpec("single", (), "nobody has booked it"),
        RuleSpec("match", ("need", "field"), "its doctor's field is the patient's need"),
        RuleSpec("apart", ("day",), "the patient has no other slot on its day"),
        RuleSpec("quota", ("visits",), "the patient has fewer slots than their visits allow"),
    ),
    settable=("group", "room"),
)

FLIGHTS = Domain(
    name="flights",
    group=Entity(
        "airline",
        "airlines",
        ("Aquila", "Borealis", "Condor", "Drift", "Egret", "Fulmar"),
        (Column("fleet", low=6, high=300), Column("bag", low=12, high=40)),
        (5, 6),
    ),
    item=Entity(
        "flight",
        "flights",
        _numbered("F", range(100, 160)),
        (
            Column("airline", ref="airline"),
            Column("origin", TOWNS[:3]),
            Column("day", DAYS),
            Column("seats", low=1, high=3),
            Column("price", low=40, high=600, step=5),
            Column("hours", low=5, high=19),
        ),
        (9, 13),
    ),
    holder=Entity(
        "traveller",
        "travellers",
        PEOPLE,
        (
            Column("credit", low=300, high=1500, step=5),
            Column("points", low=100, high=9000, step=10),
            Column("papers", ("valid", "expired")),
        ),
    ),
    link="booking",
    do="book_flight",
    undo="cancel_flight",
    phrase="book flight {item} for {holder}",
    undo_phrase="cancel flight {item} of {holder}",
    rules=(
        RuleSpec(
            "funds",
            ("credit", "price"),
            "its price is at most the traveller's credit, from which it is paid",
        ),
        RuleSpec("capacity", ("seats",), "fewer travellers have booked it than it has seats"),
        RuleSpec("apart", ("day",), "the traveller has no other flight on its day"),
        RuleSpec("status", ("papers",), "the traveller's papers are valid", ("valid",)),
    ),
    settable=("item", "price"),
)

COURSES = Domain(
    name="courses",
    group=Entity(
        "teacher",
        "teachers",
        ("Prof. Adler", "Prof. Boone", "Prof. Chen", "Prof. Dahl", "Prof. Evans", "Prof. Fuchs"),
        (Column("office", low=110, high=499), Column("since", low=1975, high=2023)),
        (5, 6),
    ),
    item=Entity(
        "course",
        "courses",
        (
            "Algebra",
            "Botany",
            "Ceramics",
            "Drama",
            "Ethics",
            "Film",
            "Geology",
            "History",
            "Italian",
            "Jazz",
            "Logic",
            "Music",
        ),
        (
            Column("teacher", ref="teacher"),
            Column("credits", low=4, high=12),
            Column("places", low=1, high=3),
            Column("hours", low=20, high=190),
            Column("day", DAYS[:5]),
            Column("stage", low=1, high=3),
        ),
        (8, 11),
    ),
    holder=Entity(
        "student",
        "students",
        PEOPLE,
        (
            Column("load", low=16, high=30),
            Column("term", low=1, high=3),
            Column("age", low=17, high=60),
        ),
    ),
    link="enrolment",
    do="enrol",
    undo="withdraw",
    phrase="enrol {holder} in {item}",
    undo_phrase="withdraw {holder} from {item}",
    rules=(
        RuleSpec(
            "load",
            ("load", "credits"),
            "the credits of the student's courses and of this one are at most their load",
        ),
        RuleSpec("capacity", ("places",), "fewer students are enrolled in it than it has places"),
        RuleSpec("level", ("term", "stage"), "its stage is at most the student's term"),
        RuleSpec("apart", ("day",), "the student has no other course on its day"),
    ),
    settable=("group", "office"),
)

EVENTS = Domain(
    name="events",
    group=Entity(
        "venue",
        "venues",
        ("Arena", "Barn", "Cellar", "Dome", "Empire", "Forum"),
        (Column("rooms", low=4, high=60), Column("opened", low=1890, high=2020)),
        (5, 6),
    ),
    item=Entity(
        "event",
        "events",
        (
            "Air Show",
            "Book Fair",
            "Choir Night",
            "Dance Gala",
            "Expo",
            "Folk Day",
            "Games",
            "Harvest Ball",
            "Ice Show",
            "Jazz Eve",
        ),
        (
            Column("venue", ref="venue"),
            Column("price", low=8, high=180),
            Column("minimum", low=6, high=30),
            Column("tickets", low=1, high=3),
            Column("length", low=30, high=300, step=5),
        ),
        (8, 10),
    ),
    holder=Entity(
        "guest",
        "guests",
        PEOPLE,
        (
            Column("age", low=8, high=80),
            Column("budget", low=60, high=400),
            Column("pass", ("gold", "plain")),
        ),
    ),
    link="ticket",
    do="sell_ticket",
    undo="refund_ticket",
    phrase="sell {holder} a ticket for {item}",
    undo_phrase="take back the ticket for {item} from {holder}",
    rules=(
        RuleSpec(
            "funds",
            ("budget", "price"),
            "its price is at most the guest's budget, which it is taken from",
        ),
        RuleSpec("level", ("age", "minimum"), "its minimum is at most the guest's age"),
        RuleSpec("capacity", ("tickets",), "fewer guests have a ticket than it has tickets"),
    ),
    settable=("item", "price"),
)

RENTALS = Domain(
    name="rentals",
    group=Entity(
        "station",
        "stations",
        TOWNS,
        (Column("bays", low=6, high=90), Column("distance", low=5, high=160)),
        (5, 6),
    ),
    item=Entity(
        "car",
        "cars",
        _numbered("C", range(40, 90)),
        (
            Column("station", ref="station"),
            Column("rate", low=18, high=150),
            Column("kind", ("van", "saloon", "coupe")),
            Column("power", low=60, high=400),
            Column("experience", low=0, high=6),
        ),
        (8, 12),
    ),
    holder=Entity(
        "driver",
        "drivers",
        PEOPLE,
        (
            Column("licence", low=1, high=9),
            Column("wallet", low=90, high=500),
            Column("home", TOWNS),
        ),
    ),
    link="rental",
    do="rent_car",
    undo="end_rental",
    phrase="rent car {item} to {holder}",
    undo_phrase="take car {item} back from {holder}",
    rules=(
        RuleSpec("single", (), "no driver has it"),
        RuleSpec(
            "level",
            ("licence", "experience"),
            "its experience is at most the years of the driver's licence",
        ),
        RuleSpec(
            "funds",
            ("wallet", "rate"),
            "its rate is at most what is in the driver's wallet, which pays it",
        ),
    ),
    settable=("item", "rate"),
)

BANK = Domain(
    name="bank",
    group=Entity(
        "client",
        "clients",
        PEOPLE,
        (Column("since", low=1970, high=2024), Column("score", low=200, high=900)),
        (5, 7),
    ),
    item=Entity(
        "account",
        "accounts",
        _numbered("A", range(100, 190)),
        (
            Column("client", ref="client"),
            Column("balance", low=100, high=5000, step=10),
            Column("reserve", low=0, high=90, step=10),
            Column("currency", ("EUR", "USD")),
        ),
        (9, 13),
    ),
    holder=None,
    link="",
    do="transfer",
    undo="",
    phrase="transfer {amount} from account {source} to account {target}",
    undo_phrase="",
    rules=(
        RuleSpec("floor", ("reserve",), "what is left is at least the account's reserve"),
        RuleSpec("same", ("currency",), "both accounts have one currency"),
    ),
    amount="balance",
    settable=("group", "score"),
)

WAREHOUSE = Domain(
    name="warehouse",
    group=Entity(
        "site",
        "sites",
        TOWNS,
        (Column("docks", low=4, high=60), Column("crew", low=5, high=140)),
        (5, 6),
    ),
    item=Entity(
        "lot",
        "lots",
        _numbered("L", range(20, 90)),
        (
            Column("site", ref="site"),
            Column("product", ("bolts", "cable", "paint")),
            Column("units", low=40, high=900),
            Column("weight", low=5, high=95),
            Column("buffer", low=0, high=30),
        ),
        (10, 14),
    ),
    holder=None,
    link="",
    do="move_units",
    undo="",
    phrase="move {amount} units from lot {source} to lot {target}",
    undo_phrase="",
    rules=(
        RuleSpec("floor", ("buffer",), "what is left is at least the lot's buffer"),
        RuleSpec("same", ("product",), "both lots are of one product"),
    ),
    amount="units",
    settable=("item", "weight"),
)

DOMAINS = {
    domain.name: domain
    for domain in (LIBRARY, CLINIC, FLIGHTS, COURSES, EVENTS, RENTALS, BANK, WAREHOUSE)
}
