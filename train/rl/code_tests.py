"""Hidden tests of a task whose answers are programs: three kinds, as they stand in its data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv32_jax.config import require


@dataclass(frozen=True, kw_only=True)
class InputTest:
    """The whole program reads one text and writes another; the second never enters the sandbox.

    Attributes:
        stdin: What it reads.
        stdout: What it should write, white space at the ends of lines and of the text apart.
    """

    stdin: str
    stdout: str


@dataclass(frozen=True, kw_only=True)
class CallTest:
    """One call returns one value; the value never enters the sandbox.

    Attributes:
        call: What is called: `name`, or an expression such as `Solution().name`.
        result: What it should return, as JSON has it: tuples are lists.
        args: Its arguments.
        kwargs: Its arguments by name.
    """

    call: str
    result: Any
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PythonTest:
    """Statements that raise nothing, run beside the program, which a program that looks for them can cheat.

    Attributes:
        code: The statements; the program's names are theirs.
    """

    code: str


CodeTest = InputTest | CallTest | PythonTest
# By the field that tells it: a kind, and what its fields hold.
KINDS: Mapping[str, tuple[type[CodeTest], Mapping[str, type]]] = {
    "stdout": (InputTest, {"stdin": str, "stdout": str}),
    "call": (CallTest, {"call": str, "args": list, "kwargs": dict, "result": object}),
    "code": (PythonTest, {"code": str}),
}
OPTIONAL = {"args", "kwargs"}


def read_tests(data: Mapping[str, Any]) -> list[CodeTest]:
    """Read a task's hidden tests.

    Args:
        data: Of the task; `tests` is a list of objects with the fields of one of the kinds.

    Returns:
        The tests.

    Raises:
        ValueError: If there are none, one is of no kind, or a limit is no positive number: says which.
    """
    tests = data.get("tests")
    require(isinstance(tests, list) and bool(tests), "verifier='code' needs data.tests, a list")
    for name in ("timeout_s", "memory_mib"):
        value = data.get(name, 1)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        require(good, f"data.{name}={value!r} must be a positive number")
    partial = data.get("partial", False)
    require(isinstance(partial, bool), f"data.partial={partial!r} must be true or false")
    assert isinstance(tests, list)
    return [_read_test(test, f"data.tests[{i}]") for i, test in enumerate(tests)]


def _read_test(test: Any, place: str) -> CodeTest:
    kinds = [kind for key, kind in KINDS.items() if isinstance(test, Mapping) and key in test]
    require(len(kinds) == 1, f"{place} must have one of {', '.join(KINDS)}")
    kind, fields = kinds[0]
    for key, value in test.items():
        require(key in fields, f"{place} has an unknown field {key!r}; it has {', '.join(fields)}")
        require(
            isinstance(value, fields[key]), f"{place}.{key} must be of type {fields[key].__name__}"
        )
    missing = fields.keys() - OPTIONAL - test.keys()
    require(not missing, f"{place} has no {', '.join(sorted(missing))}")
    return kind(**test)
