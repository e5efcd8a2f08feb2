"""Small projects made of modules of Python's own library (PSF licence), and calls that tell how they behave.

The tests of a project are recorded: what the calls come to in the module as it was. Expected values stay outside of the
sandbox in which a project's code runs.
"""

import functools
import json
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from xml.etree import ElementTree

from train.agents import runs
from train.agents.environments.drawing import random_for

PACKAGE = "project"
N_CASES = 90
TIMEOUT_S = 20.0
WORDS = (
    "amber",
    "birch",
    "cloud",
    "drum",
    "elm",
    "frost",
    "glow",
    "heron",
    "iris",
    "jolt",
    "kelp",
    "linden",
    "mist",
    "a",
    "of",
)
RUNNER = """
import importlib, json, sys
request = json.load(sys.stdin)
real, sys.stdout = sys.stdout, sys.stderr
m = importlib.import_module(request["module"])
for call in request["calls"]:
    try:
        value = eval(call)
        result = repr(list(value) if hasattr(value, "__next__") else value)
    except Exception as error:
        result = "raises " + type(error).__name__
    real.write(json.dumps([request["token"], result]) + "\\n")
    real.flush()
"""


def _text(rng: Random, most: int = 14) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def _numbers(rng: Random) -> list[int]:
    return [rng.randrange(-9, 40) for _ in range(rng.randint(2, 9))]


def _path(rng: Random) -> str:
    parts = [
        rng.choice((*WORDS[:6], ".", "..", "", "x.tar.gz", ".hid"))
        for _ in range(rng.randint(1, 5))
    ]
    return rng.choice(("", "/", "//")) + "/".join(parts)


def _textwrap(r: Random) -> str:
    width, text = r.randrange(6, 40), _text(r)
    lines = "\n".join(" " * r.randrange(5) + _text(r, 4) for _ in range(3))
    return r.choice(
        (
            f"m.wrap({text!r}, {width})",
            f"m.fill({text!r}, {width}, initial_indent='* ', subsequent_indent='  ')",
            f"m.shorten({text!r}, {width + 6})",
            f"m.dedent({lines!r})",
            f"m.indent({lines!r}, '> ')",
            f"m.wrap({text!r}, {width}, max_lines=2)",
            f"m.wrap({text!r}, 5, break_long_words=False)",
        )
    )


def _shlex(r: Random) -> str:
    text = " ".join(
        r.choice(("a b", "'c d'", '"e f"', r"g\ h", "#i", "j;k", "--l=m"))
        for _ in range(r.randint(1, 4))
    )
    return r.choice(
        (
            f"m.split({text!r})",
            f"m.split({text!r}, comments=True)",
            f"m.quote({text!r})",
            f"m.join({text.split()!r})",
            f"list(m.shlex({text!r}, punctuation_chars=True))",
        )
    )


def _statistics(r: Random) -> str:
    a, b = _numbers(r), [float(n) for n in _numbers(r)]
    f = r.choice(("mean", "median", "median_low", "median_high", "multimode", "pvariance", "mode"))
    return r.choice(
        (
            f"m.{f}({a})",
            f"m.quantiles({a}, n={r.randrange(2, 6)})",
            f"m.median_grouped({a})",
            f"m.fmean({b})",
            f"m.quantiles({a}, n=4, method='inclusive')",
        )
    )


def _difflib(r: Random) -> str:
    a, b = _text(r, 7).split(), _text(r, 7).split()
    return r.choice(
        (
            f"m.get_close_matches({r.choice(WORDS)!r}, {a + b}, n=3, cutoff=0.3)",
            f"m.ndiff({a}, {b})",
            f"m.unified_diff({a}, {b}, lineterm='')",
            f"m.SequenceMatcher(None, {a}, {b}).get_opcodes()",
            f"m.context_diff({a}, {b}, lineterm='')",
        )
    )


def _calendar(r: Random) -> str:
    y, month = r.randrange(1850, 2100), r.randrange(1, 13)
    return r.choice(
        (
            f"m.monthrange({y}, {month})",
            f"m.monthcalendar({y}, {month})",
            f"m.leapdays({y - 90}, {y})",
            f"m.TextCalendar({r.randrange(7)}).formatmonth({y}, {month})",
            f"m.isleap({y})",
            f"m.weekday({y}, {month}, 9)",
            f"m.HTMLCalendar().formatmonth({y}, {month})",
        )
    )


def _colorsys(r: Random) -> str:
    f = r.choice(
        ("rgb_to_hsv", "hsv_to_rgb", "rgb_to_hls", "hls_to_rgb", "rgb_to_yiq", "yiq_to_rgb")
    )
    return (
        f"[round(x, 6) for x in m.{f}({', '.join(str(r.randrange(0, 11) / 10) for _ in range(3))})]"
    )


def _graphlib(r: Random) -> str:
    graph = {n: r.sample(range(n), r.randint(0, min(n, 2))) for n in range(r.randrange(2, 9))}
    if r.random() < 0.2:
        graph[0] = [max(graph)]
    return f"m.TopologicalSorter({graph}).static_order()"


def _ipaddress(r: Random) -> str:
    a, bits = f"10.{r.randrange(256)}.{r.randrange(256)}.{r.randrange(256)}", r.randrange(22, 31)
    net = f"m.ip_network('{a}/{bits}', strict=False)"
    return r.choice(
        (
            f"str({net}.broadcast_address)",
            f"[str(s) for s in {net}.subnets(prefixlen_diff=2)]",
            f"str({net}.supernet())",
            f"{net}.num_addresses",
            f"m.ip_address('{a}').reverse_pointer",
            f"str(m.ip_address('2001:db8::{bits}').exploded)",
            f"[str(n) for n in m.summarize_address_range(m.ip_address('{a}'), m.ip_address('{a}') + {bits})]",
            f"m.ip_address('{a}') in {net}",
            f"m.ip_address('{a}').is_private",
            f"m.ip_address('300.{bits}.1.1')",
        )
    )


def _posixpath(r: Random) -> str:
    a, b = _path(r), _path(r)
    return r.choice(
        (
            f"m.normpath({a!r})",
            f"m.join({a!r}, {b!r})",
            f"m.splitext({a!r})",
            f"m.split({a!r})",
            f"m.basename({a!r})",
            f"m.relpath({'/' + a!r}, {'/' + b!r})",
            f"m.commonpath({['/x/' + a, '/x/' + b]!r})",
            f"m.dirname({a!r})",
        )
    )


def _urls(r: Random) -> str:
    path, text = _path(r), _text(r, 3)
    query = "&".join(
        f"{r.choice(WORDS)}={r.choice(('1', 'x%20y', '', 'é'))}" for _ in range(r.randint(1, 3))
    )
    url = f"http://u:p@host.org:{r.randrange(1, 9999)}{path if path.startswith('/') else '/' + path}?{query}#top"
    return r.choice(
        (
            f"m.urljoin({url!r}, {path!r})",
            f"m.urlsplit({url!r})",
            f"m.parse_qs({query!r})",
            f"m.quote({text + '/é&'!r})",
            f"m.parse_qsl({query!r}, keep_blank_values=True)",
            f"m.unquote({query!r})",
            f"m.urlsplit({url!r}).port",
            f"m.urlencode({{'a': {text!r}, 'b': [1, 2]}}, doseq=True)",
            f"m.urlparse({url!r})",
        )
    )


MODULES: Mapping[str, Callable[[Random], str]] = {
    "textwrap": _textwrap,
    "shlex": _shlex,
    "statistics": _statistics,
    "difflib": _difflib,
    "calendar": _calendar,
    "colorsys": _colorsys,
    "graphlib": _graphlib,
    "ipaddress": _ipaddress,
    "posixpath": _posixpath,
    "urllib.parse": _urls,
}


def source_of(module: str) -> str:
    """Return the source of a module of the library."""
    path = Path(sysconfig.get_path("stdlib"), *module.split("."))
    return path.with_suffix(".py").read_text(encoding="utf-8")


def file_of(module: str) -> str:
    """Return where a project keeps a module."""
    return f"{PACKAGE}/{module.replace('.', '_')}.py"


@functools.cache
def cases_of(module: str) -> tuple[str, ...]:
    """Return the calls that a module is tested by, as expressions on `m`."""
    rng = random_for("repositories", module)
    return tuple(dict.fromkeys(MODULES[module](rng) for _ in range(N_CASES)))


@functools.cache
def expected_of(module: str) -> tuple[str, ...]:
    """Return what the calls come to in the module as it was."""
    found = behaviour(module, source_of(module))
    assert len(found) == len(cases_of(module)), f"the calls of {module} do not all come to an end"
    return tuple(found)


def behaviour(module: str, source: str) -> list[str]:
    """Run a module's calls in a sandbox of their own.

    Args:
        module: Its name.
        source: It, as it is now.

    Returns:
        What the calls came to, in order; fewer than there are calls where it ended before.

    Raises:
        SandboxError: If the sandbox failed.
    """
    token = str(random_for(module, source).getrandbits(64))
    name = file_of(module).removesuffix(".py").replace("/", ".")
    request = {"module": name, "calls": cases_of(module), "token": token}
    files = {f"{PACKAGE}/__init__.py": b"", file_of(module): source.encode(errors="replace")}
    ended = runs.run(
        [sys.executable, "-c", RUNNER],
        stdin=json.dumps(request).encode(),
        files=files,
        timeout_s=TIMEOUT_S,
    )
    found = []
    for line in ended.stdout.decode(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, list) and len(said) == 2 and said[0] == token:
            found.append(str(said[1]))
    return found[: len(cases_of(module))]


def passing(module: str, found: Sequence[str]) -> frozenset[int]:
    """Return the numbers of the calls that came to what they should.

    Args:
        module: Whose.
        found: As `behaviour` returned it.

    Returns:
        Numbers, from 0 on.
    """
    return frozenset(
        n for n, (a, b) in enumerate(zip(found, expected_of(module), strict=False)) if a == b
    )


def junit_xml(module: str, found: Sequence[str]) -> str:
    """Write the results as JUnit does.

    Args:
        module: Whose.
        found: As `behaviour` returned it.

    Returns:
        XML: a suite, a case for each call, a failure in each that came to something else or to nothing.
    """
    passed, cases = passing(module, found), cases_of(module)
    failed = len(cases) - len(passed)
    suite = ElementTree.Element(
        "testsuite", name=module, tests=str(len(cases)), failures=str(failed)
    )
    for number, call in enumerate(cases):
        case = ElementTree.SubElement(suite, "testcase", classname=module, name=f"{number}: {call}")
        if number not in passed:
            told = found[number] if number < len(found) else "nothing"
            ElementTree.SubElement(
                case, "failure", message=f"{told} is not {expected_of(module)[number]}"
            )
    return ElementTree.tostring(suite, encoding="unicode")
