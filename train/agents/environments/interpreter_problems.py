"""Problems that ask for computing: a reference found here one way, a program that finds it another way."""

import fractions
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem whose answer is one number.

    Attributes:
        question: What is asked.
        answer: The reference, as text.
        program: Python that prints it, by another way than the reference's.
        rel_tol: How far off an answer may be, relative to the reference; 0 for whole numbers.
        files: Name -> text, beside the program.
        difficulty: From 0.
    """

    question: str
    answer: str
    program: str
    rel_tol: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)
    difficulty: int = 0


def count_coprime(rng: Random) -> Problem:
    """Count numbers coprime to another: inclusion and exclusion here, by trying them all there."""
    limit, number = rng.randrange(2_000, 90_000), rng.randrange(30, 2_000)
    primes = [p for p in range(2, number + 1) if number % p == 0 and _is_prime(p)]
    total = sum(
        (-1) ** size * (limit // math.prod(chosen))
        for size in range(len(primes) + 1)
        for chosen in itertools.combinations(primes, size)
    )
    return Problem(
        question=f"How many whole numbers from 1 to {limit} share no factor above 1 with {number}?",
        answer=str(total),
        program=f"import math\nprint(sum(math.gcd(n, {number}) == 1 for n in range(1, {limit} + 1)))",
    )


def last_digits(rng: Random) -> Problem:
    """Add up powers modulo a number: by squaring here, multiplying one by one there."""
    top, exponent = rng.randrange(40, 120), rng.randrange(200, 900)
    modulus = rng.randrange(10_000, 1_000_000)
    return Problem(
        question=f"What is the remainder of 1^{exponent} + 2^{exponent} + ... + {top}^{exponent} by {modulus}?",
        answer=str(sum(pow(n, exponent, modulus) for n in range(1, top + 1)) % modulus),
        program=f"print(sum(n ** {exponent} for n in range(1, {top} + 1)) % {modulus})",
    )


def lattice_paths(rng: Random) -> Problem:
    """Count paths past blocked points: by adding up rows here, from the end with memory there."""
    width, height = rng.randrange(8, 13), rng.randrange(8, 13)
    inner = [(x, y) for x in range(width + 1) for y in range(height + 1)][1:-1]
    blocked = sorted(rng.sample(inner, 6))
    row = [1] + [0] * width
    for y in range(height + 1):
        for x in range(width + 1):
            left = row[x - 1] if x else 0
            row[x] = 0 if (x, y) in blocked else row[x] + left
    return Problem(
        question=f"From (0, 0) one goes to ({width}, {height}) by steps of (1, 0) and (0, 1). How many paths"
        " touch none of"
        f" the points {', '.join(map(str, blocked))}?",
        answer=str(row[width]),
        program=f"import functools\nblocked = {set(blocked)}\n@functools.cache\ndef ways(x, y):\n"
        f"    if x > {width} or y > {height} or (x, y) in blocked:\n        return 0\n"
        f"    return 1 if (x, y) == ({width}, {height}) else ways(x + 1, y) + ways(x, y + 1)\nprint(ways(0, 0))",
        difficulty=1,
    )


def coin_ways(rng: Random) -> Problem:
    """Count the ways to pay: coin by coin here, by recursion there."""
    coins = sorted(rng.sample(range(2, 25), 4))
    amount = rng.randrange(120, 320)
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return Problem(
        question=f"In how many ways can {amount} be paid with coins of {', '.join(map(str, coins))}, any number"
        " of each,"
        " where order does not matter?",
        answer=str(ways[amount]),
        program=f"coins = {coins}\ndef ways(left, kinds):\n    if not kinds:\n        return left == 0\n"
        "    return sum(ways(left - n * kinds[0], kinds[1:]) for n in range(left // kinds[0] + 1))\n"
        f"print(int(ways({amount}, coins)))",
        difficulty=1,
    )


def linear_system(rng: Random) -> Problem:
    """Solve linear equations: the solution is drawn first here, found by fractions there."""
    size = rng.randrange(4, 7)
    unknown = [rng.randrange(-40, 41) for _ in range(size)]
    while True:
        rows = [[rng.randrange(-9, 10) for _ in range(size)] for _ in range(size)]
        if _determinant(rows) != 0:
            break
    right = [sum(a * x for a, x in zip(row, unknown, strict=True)) for row in rows]
    names = "abcdefg"[:size]
    equations = "; ".join(
        " + ".join(f"({a}){n}" for a, n in zip(row, names, strict=True)) + f" = {b}"
        for row, b in zip(rows, right, strict=True)
    )
    weights = [rng.randrange(1, 9) for _ in names]
    asked = " + ".join(f"{w}{n}" for w, n in zip(weights, names, strict=True))
    return Problem(
        question=f"Given {equations}: what is {asked}?",
        answer=str(sum(w * x for w, x in zip(weights, unknown, strict=True))),
        program=f"""from fractions import Fraction
rows = [[Fraction(a) for a in row] + [Fraction(b)] for row, b in zip({rows}, {right})]
size = len(rows)
for i in range(size):
    pivot = next(k for k in range(i, size) if rows[k][i])
    rows[i], rows[pivot] = rows[pivot], rows[i]
    rows[i] = [a / rows[i][i] for a in rows[i]]
    for k in range(size):
        if k != i:
            rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i])]
print(sum(w * row[-1] for w, row in zip({weights}, rows)))""",
        difficulty=1,
    )


def integral(rng: Random) -> Problem:
    """Integrate a polynomial times exp(-x): in closed form here, by Simpson's rule there."""
    powers = [rng.randrange(-5, 6) for _ in range(3)] + [rng.randrange(1, 6)]
    top = rng.randrange(2, 7)
    # The integral of x^n exp(-x) from 0 to t is n! (1 - exp(-t) sum of t^k / k! for k <= n).
    value = sum(
        c * math.factorial(n) * (1 - math.exp(-top) * sum(top**k / math.factorial(k) for k in range(n + 1)))
        for n, c in enumerate(powers)
    )  # fmt: skip
    shown = " + ".join(f"({c})x^{n}" for n, c in enumerate(powers))
    return Problem(
        question=f"What is the integral of ({shown}) exp(-x) from 0 to {top}, to six significant digits?",
        answer=repr(value),
        program=f"import math\nf = lambda x: sum(c * x ** n for n, c in enumerate({powers})) * math.exp(-x)\n"
        f"n = 20000\nh = {top} / n\n"
        "print(h / 3 * sum((1 if i in (0, n) else 4 if i % 2 else 2) * f(i * h) for i in range(n + 1)))",
        rel_tol=1e-5,
        difficulty=1,
    )


def largest_root(rng: Random) -> Problem:
    """Find a root to four digits: drawn first here, by halving there."""
    root = rng.randrange(200_000, 900_000) / 100_000
    c = root**3 + 2 * root - 10 * math.sin(root)
    return Problem(
        question=f"What is the largest real x with x^3 + 2x - 10 sin(x) = {c:.9f}, to six significant digits?",
        answer=repr(root),
        program=f"import math\nlow, high = 0.0, 20.0\nf = lambda x: x ** 3 + 2 * x - 10 * math.sin(x) - {c:.9f}\n"
        "grid = [i * high / 20000 for i in range(20001)]\n"
        "low, high = [(a, b) for a, b in zip(grid, grid[1:]) if f(a) <= 0 < f(b)][-1]\n"
        "for _ in range(80):\n    middle = (low + high) / 2\n"
        "    low, high = (middle, high) if f(middle) <= 0 else (low, middle)\nprint(low)",
        rel_tol=1e-5,
    )


def assignments(rng: Random) -> Problem:
    """Count who may tell the truth: by trying all here, by splitting on one person at a time there."""
    people = "ABCDEFGHIJKL"
    clauses = [tuple((p, rng.random() < 0.5) for p in rng.sample(people, 3)) for _ in range(14)]
    total = sum(
        all(any(values[people.index(p)] is truth for p, truth in clause) for clause in clauses)
        for values in itertools.product((True, False), repeat=len(people))
    )
    says = "; ".join(
        " or ".join(f"{p} is a {'knight' if truth else 'knave'}" for p, truth in clause)
        for clause in clauses
    )
    return Problem(
        question=f"Each of {', '.join(people)} is a knight or a knave. It is known that: {says}."
        " In how many ways can all"
        " of this be true together?",
        answer=str(total),
        program=f"""clauses = {clauses}
def count(people, clauses):
    if any(not clause for clause in clauses):
        return 0
    if not people:
        return 1
    first, rest = people[0], people[1:]
    total = 0
    for truth in (True, False):
        left = [[(p, t) for p, t in c if p != first] for c in clauses if (first, truth) not in c]
        total += count(rest, left)
    return total
print(count({people!r}, [list(c) for c in clauses]))""",
        difficulty=2,
    )


def seatings(rng: Random) -> Problem:
    """Count orders under rules: by trying all here, by filling seats one at a time there."""
    names = rng.sample(["Ana", "Bo", "Cy", "Di", "Eli", "Fay", "Gus", "Hal", "Ivy"], 7)
    pairs = list(itertools.permutations(names, 2))
    before, apart = rng.sample(pairs, 2), rng.sample(pairs, 2)
    total = 0
    for order in itertools.permutations(names):
        at = {name: place for place, name in enumerate(order)}
        ordered = all(at[a] < at[b] for a, b in before)
        total += ordered and all(abs(at[a] - at[b]) > 1 for a, b in apart)
    rules = [f"{a} left of {b}" for a, b in before] + [f"{a} not beside {b}" for a, b in apart]
    return Problem(
        question=f"{', '.join(names)} sit in a row. In how many orders are: {'; '.join(rules)}?",
        answer=str(total),
        program=f"""before, apart = {before}, {apart}
def fill(row, left):
    if not left:
        return 1
    total = 0
    for name in left:
        if row and any({{row[-1], name}} == {{a, b}} for a, b in apart):
            continue
        if any(name == a and b in row for a, b in before):
            continue
        total += fill(row + [name], left - {{name}})
    return total
print(fill([], frozenset({names})))""",
        difficulty=2,
    )


def group_mean(rng: Random) -> Problem:
    """Ask for a group's mean in a table with gaps: kept as it is made here, read off the file there."""
    shops = ["north", "south", "east", "west"]
    lines, kept = ["day,shop,units,price"], []
    chosen, low = rng.choice(shops), rng.randrange(5, 15)
    for day in range(1, 201):
        shop, units = rng.choice(shops), rng.randrange(1, 40)
        price = None if rng.random() < 0.1 else rng.randrange(100, 2000) / 100
        lines.append(f"{day},{shop},{units},{'' if price is None else price}")
        if shop == chosen and units >= low and price is not None:
            kept.append(units * price)
    mean = math.fsum(kept) / len(kept)
    return Problem(
        question=f"sales.csv has columns day, shop, units and price; some prices are missing. Over the rows of"
        f" shop {chosen}"
        f" with at least {low} units and a price, what is the mean of units times price, to six significant digits?",
        answer=repr(mean),
        program="import csv\nwith open('sales.csv') as file:\n    rows = list(csv.DictReader(file))\n"
        f"rows = [r for r in rows if r['shop'] == {chosen!r} and int(r['units']) >= {low} and r['price']]\n"
        "print(sum(int(r['units']) * float(r['price']) for r in rows) / len(rows))",
        rel_tol=1e-5,
        files={"sales.csv": "\n".join(lines) + "\n"},
    )


def slope(rng: Random) -> Problem:
    """Ask for a line's slope: by exact fractions here, by least squares of numpy there."""
    a, b = rng.randrange(-50, 50), rng.randrange(-50, 50)
    points = [(x, a * x + b + rng.randrange(-300, 301)) for x in rng.sample(range(200), 60)]
    n = len(points)
    sx, sy = sum(x for x, _ in points), sum(y for _, y in points)
    sxx, sxy = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    value = float(fractions.Fraction(n * sxy - sx * sy, n * sxx - sx * sx))
    return Problem(
        question="points.csv has columns x and y. What is the slope of the line of least squares of y on x, to six"
        " significant digits?",
        answer=repr(value),
        program="import numpy as np\nx, y = np.loadtxt('points.csv', delimiter=',', skiprows=1).T\n"
        "print(np.polyfit(x, y, 1)[0])",
        rel_tol=1e-5,
        files={"points.csv": "x,y\n" + "".join(f"{x},{y}\n" for x, y in points)},
        difficulty=1,
    )


def shortest_route(rng: Random) -> Problem:
    """Ask for a shortest route: by Floyd and Warshall here, by Dijkstra there."""
    places = [f"P{number}" for number in range(14)]
    roads = {(a, b): rng.randrange(3, 60) for a, b in itertools.pairwise(places)}
    for _ in range(24):
        roads[tuple(rng.sample(places, 2))] = rng.randrange(3, 90)  # type: ignore[index]
    far = {(a, b): roads.get((a, b), 10**9) for a in places for b in places}
    for middle, a, b in itertools.product(places, repeat=3):
        far[a, b] = min(far[a, b], far[a, middle] + far[middle, b])
    start, end = places[0], places[-1]
    lines = "".join(f"{a},{b},{length}\n" for (a, b), length in roads.items())
    return Problem(
        question=f"roads.csv lists one-way roads with columns origin, destination and length. How long is the shortest"
        f" route from {start} to {end}?",
        answer=str(far[start, end]),
        program=f"""import csv, heapq
roads = {{}}
with open('roads.csv') as file:
    rows = list(csv.DictReader(file))
for r in rows:
    roads.setdefault(r['origin'], []).append((r['destination'], int(r['length'])))
queue, done = [(0, {start!r})], set()
while queue:
    far, place = heapq.heappop(queue)
    if place == {end!r}:
        break
    if place not in done:
        done.add(place)
        for other, length in roads.get(place, []):
            heapq.heappush(queue, (far + length, other))
print(far)""",
        files={"roads.csv": "origin,destination,length\n" + lines},
        difficulty=2,
    )


KINDS: tuple[Callable[[Random], Problem], ...] = (
    count_coprime, last_digits, lattice_paths, coin_ways, linear_system, integral, largest_root, assignments, seatings,
    group_mean, slope, shortest_route,
)  # fmt: skip


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _determinant(rows: list[list[int]]) -> int:
    if not rows:
        return 1
    return sum(
        (-1) ** i * value * _determinant([row[:i] + row[i + 1 :] for row in rows[1:]])
        for i, value in enumerate(rows[0])
    )
