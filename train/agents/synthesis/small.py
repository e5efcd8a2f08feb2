"""The author of worlds for very small policies: short names, two tools, one or two calls."""

import itertools
from collections.abc import Callable
from random import Random

from train.agents.environments.drawing import random_for
from train.agents.synthesis import checking
from train.agents.synthesis.checking import RejectedError
from train.agents.synthesis.procedural import Made
from train.agents.synthesis.worlds import Change, Draft, Guard, SqlTool, Verifier, World

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
READ = ("get", "see", "read", "val", "look", "show")
WRITE = ("put", "set", "fix", "store", "write", "keep")
ADD = ("add", "plus", "grow", "raise_by")
NEXT = ("next", "link", "after", "to")
ATTEMPTS = 60

Names = dict[str, str]  # what a tool does -> its name here
Proposal = Callable[[dict[str, tuple[int, str]], Names, Random], Draft]


def make_world(seed: int, number: int, n_tasks: int) -> Made:
    """Compose a world of a few keys, each with a number and a key that comes next.

    Args:
        seed: Of all worlds.
        number: Of this one; what its tools do, and their names, differ from world to world.
        n_tasks: That it should have; it may get fewer.

    Returns:
        The world.
    """
    rng = random_for("small", seed, number)
    keys = rng.sample([a + b for a, b in itertools.product(LETTERS, repeat=2)], rng.randint(5, 8))
    rows = {
        key: (rng.randrange(11, 100), rng.choice([k for k in keys if k != key])) for key in keys
    }
    names = {
        "read": rng.choice(READ),
        "write": rng.choice(WRITE),
        "add": rng.choice(ADD),
        "next": rng.choice(NEXT),
    }
    second = rng.choice(("write", "add", "next"))
    values = ", ".join(f"('{key}', {value}, '{after}')" for key, (value, after) in rows.items())
    world = World(
        name=f"small-{second}-{seed}-{number}",
        category=f"small-{second}",
        script=f"CREATE TABLE t (k TEXT PRIMARY KEY, v INTEGER, n TEXT); INSERT INTO t VALUES {values};",
        tools=(_tool("read", names), _tool(second, names)),
    )
    made, options = Made(world=world), (read, *PROPOSALS[second])
    for attempt in range(ATTEMPTS):
        if len(made.tasks) == n_tasks:
            break
        draft = options[attempt % len(options)](rows, names, rng)
        if any(draft.prompt == other.prompt for other, _ in made.tasks):
            continue
        try:
            made.tasks.append((draft, checking.examine(world, draft)))
        except RejectedError as error:
            made.rejected[error.reason] += 1
    return made


def _tool(kind: str, names: Names) -> SqlTool:
    known = Guard(sql="SELECT EXISTS (SELECT * FROM t WHERE k = :k)", error="no such k")
    described: dict[str, tuple[str, dict[str, dict[str, str]], tuple[str, ...], str]] = {
        "read": ("number of k", {"k": TEXT}, (), "SELECT v FROM t WHERE k = :k"),
        "write": (
            "make number of k v",
            {"k": TEXT, "v": WHOLE},
            ("UPDATE t SET v = :v WHERE k = :k",),
            "SELECT 'ok'",
        ),
        "add": (
            "add v to number of k",
            {"k": TEXT, "v": WHOLE},
            ("UPDATE t SET v = v + :v WHERE k = :k",),
            "SELECT 'ok'",
        ),
        "next": ("key next to k", {"k": TEXT}, (), "SELECT n FROM t WHERE k = :k"),
    }
    description, parameters, steps, result = described[kind]
    return SqlTool(
        name=names[kind], description=description, parameters=parameters, guards=(known,), steps=steps, result=result
    )  # fmt: skip


def read(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Ask for a number."""
    key = rng.choice(sorted(rows))
    return _draft(
        "read",
        0,
        f"number of {key}?",
        [f"return call({names['read']!r}, k={key!r})"],
        str(rows[key][0]),
        {},
    )


def write(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Have a number set."""
    key, value = rng.choice(sorted(rows)), rng.randrange(11, 100)
    source = [f"call({names['write']!r}, k={key!r}, v={value})", "return 'ok'"]
    return _draft("write", 0, f"make {key} {value}", source, None, _changes(rows, key, value))


def copy(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Have a number copied."""
    source_key, key = rng.sample(sorted(rows), 2)
    source = [
        f"call({names['write']!r}, k={key!r}, v=call({names['read']!r}, k={source_key!r}))",
        "return 'ok'",
    ]
    return _draft(
        "copy",
        1,
        f"make {key} same as {source_key}",
        source,
        None,
        _changes(rows, key, rows[source_key][0]),
    )


def add(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Have a number grow."""
    key, value = rng.choice(sorted(rows)), rng.randrange(1, 10)
    source = [f"call({names['add']!r}, k={key!r}, v={value})", "return 'ok'"]
    return _draft(
        "add", 0, f"{key} up by {value}", source, None, _changes(rows, key, rows[key][0] + value)
    )


def add_and_read(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Have a number grow, and ask for it then."""
    key, value = rng.choice(sorted(rows)), rng.randrange(1, 10)
    source = [
        f"call({names['add']!r}, k={key!r}, v={value})",
        f"return call({names['read']!r}, k={key!r})",
    ]
    after = rows[key][0] + value
    return _draft(
        "add_and_read",
        1,
        f"{key} up by {value}, then its number?",
        source,
        str(after),
        _changes(rows, key, after),
    )


def follow(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Ask for the number of the key that comes next."""
    key = rng.choice(sorted(rows))
    source = [f"return call({names['read']!r}, k=call({names['next']!r}, k={key!r}))"]
    return _draft("follow", 1, f"number of next of {key}?", source, str(rows[rows[key][1]][0]), {})


def after(rows: dict[str, tuple[int, str]], names: Names, rng: Random) -> Draft:
    """Ask for the key that comes next."""
    key = rng.choice(sorted(rows))
    return _draft(
        "after",
        0,
        f"next of {key}?",
        [f"return call({names['next']!r}, k={key!r})"],
        rows[key][1],
        {},
    )


PROPOSALS: dict[str, tuple[Proposal, ...]] = {
    "write": (write, copy),
    "add": (add, add_and_read),
    "next": (after, follow),
}


def _changes(rows: dict[str, tuple[int, str]], key: str, value: int) -> dict[str, Change]:
    before, following = rows[key]
    if value == before:
        return {}  # and so it is solved without a call, and not kept
    return {"t": Change(added=[[key, value, following]], removed=[[key, before, following]])}


def _draft(
    kind: str, difficulty: int, prompt: str, source: list[str], answer: str | None, changes: dict[str, Change]
) -> Draft:  # fmt: skip
    return Draft(
        prompt=prompt,
        solution="\n".join(["def solve(call):", *(f"    {line}" for line in source)]) + "\n",
        verifier=Verifier(answer=answer, changes=changes),
        difficulty=difficulty,
        kind=kind,
    )
