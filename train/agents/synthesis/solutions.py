"""Solutions: Python that may only call tools and compute. What is allowed, running it, and breaking it on purpose."""

import ast
import copy
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from train.agents.environment import Call
from train.agents.environments.calling import caller
from train.agents.synthesis.database import Database
from train.agents.synthesis.worlds import World
from train.agents.tools import ToolCall, ToolError

MAX_CALLS = 2_000
MODULES = {"math": math, "json": json, "statistics": statistics}
BUILTINS: dict[str, Any] = {
    f.__name__: f
    for f in (
        abs, all, any, bool, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, len, list, map, max,
        min,        range, reversed, round, set, sorted, str, sum, tuple, zip, ValueError, KeyError,
    )
}  # fmt: skip
ATTRIBUTES = {
    "add", "append", "ceil", "copy", "count", "discard", "dumps", "endswith", "extend", "find", "floor",
    "get", "index", "insert", "intersection", "isdigit", "items", "join", "keys", "loads", "lower", "mean",
    "median", "pop", "remove", "replace", "reverse", "setdefault", "sort", "split", "sqrt", "startswith",
    "strip", "title", "union", "update", "upper", "values",
}  # fmt: skip
NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For,
    ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Lambda,
    ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.JoinedStr, ast.FormattedValue, ast.Constant,
    ast.Attribute, ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.expr_context,
    ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


class SolutionError(Exception):
    """A solution that is not allowed, or does not run: says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of running a solution.

    Attributes:
        calls: That it made and that were answered.
        results: Of them, as JSON.
        answer: That it returned.
        error: Why it did not come to an end; "" where it did.
    """

    calls: tuple[ToolCall, ...] = ()
    results: tuple[Any, ...] = ()
    answer: str = ""
    error: str = ""


def check_source(source: str) -> ast.Module:
    """Refuse a solution that could do more than call tools and compute.

    One function `solve(call)`, without imports (math, json and statistics are there), `while`, other functions,
    attributes or builtins beyond a list; `call` is only called, with the tool's name as a text and arguments by name.

    Args:
        source: Python.

    Returns:
        It, parsed.

    Raises:
        SolutionError: If it is anything else; says what.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SolutionError(f"the solution is no Python: {error}") from error
    one = len(tree.body) == 1 and isinstance(tree.body[0], ast.FunctionDef)
    if not one or ast.unparse(tree.body[0]).partition("\n")[0] != "def solve(call):":
        raise SolutionError("the solution must be one function, `def solve(call):`")
    calls = 0
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            raise SolutionError(f"the solution may not use {type(node).__name__}")
        if isinstance(node, ast.FunctionDef) and node is not tree.body[0]:
            raise SolutionError("the solution may not define functions")
        if isinstance(node, ast.Attribute) and node.attr not in ATTRIBUTES:
            raise SolutionError(f"the solution may not use .{node.attr}")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise SolutionError(f"the solution may not use {node.id}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "call"
        ):
            named = [
                a for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            if len(node.args) != 1 or not named or any(k.arg is None for k in node.keywords):
                raise SolutionError("call takes the tool's name as a text, then arguments by name")
            calls += 1
    uses = sum(isinstance(node, ast.Name) and node.id == "call" for node in ast.walk(tree))
    if calls == 0 or uses > calls:
        raise SolutionError("the solution must call tools, and do nothing else with `call`")
    return tree


def tools_used(source: str) -> set[str]:
    """Return the names of the tools that a solution may call."""
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "call"
        and isinstance(node.args[0], ast.Constant)
    }


def run(source: str, call: Call) -> str:
    """Run a solution in this process; for those that no model wrote.

    Args:
        source: Passed by `check_source`.
        call: Calls a tool.

    Returns:
        The answer as text: JSON unless it is a text already.

    Raises:
        SolutionError: If it fails.
        ToolError: If a tool refuses.
    """
    scope: dict[str, Any] = {"__builtins__": BUILTINS, **MODULES}
    exec(compile(source, "solution", "exec"), scope)  # checked by check_source
    try:
        answer = scope["solve"](call)
        return answer if isinstance(answer, str) else json.dumps(answer)
    except (
        ArithmeticError,
        LookupError,
        NameError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise SolutionError(f"{type(error).__name__}: {error}") from error


def run_in(world: World, source: str) -> Outcome:
    """Run a solution in a fresh copy of its world, in this process.

    Args:
        world: The world.
        source: The solution.

    Returns:
        What came of it; never raises for what the solution does.
    """
    log: list[tuple[ToolCall, Any]] = []
    answer = error = ""
    with Database(world) as database:
        counted = _counted(caller(database.tools(), log))
        try:
            check_source(source)
            answer = run(source, counted)
        except (SolutionError, ToolError) as problem:
            error = str(problem)
    calls, results = zip(*log, strict=True) if log else ((), ())
    return Outcome(calls=calls, results=results, answer=answer, error=error)


def _counted(call: Call) -> Call:
    made = 0

    def count(name: str, /, **arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made > MAX_CALLS:
            raise SolutionError(f"the solution makes more than {MAX_CALLS} calls")
        return call(name, **arguments)

    return count


def mutants(source: str) -> list[str]:
    """Break a solution in each of the ways that a shortcut would.

    A condition of a filter is left out, one of several joined by `and` too; a choice between two branches is turned
    round; the least is taken for the greatest; a call made for its effect is left out.

    Args:
        source: A solution.

    Returns:
        Sources, each with one thing broken.
    """
    tree = ast.parse(source)
    count = len(list(_places(tree)))
    found = []
    for number in range(count):
        broken = copy.deepcopy(tree)
        list(_places(broken))[number]()
        found.append(ast.unparse(ast.fix_missing_locations(broken)))
    return [mutant for mutant in dict.fromkeys(found) if mutant != ast.unparse(tree)]


def _places(tree: ast.AST) -> Iterator[Callable[[], None]]:
    """Yield what breaks a tree, one place each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            for i in range(len(node.ifs)):
                yield from _without(node.ifs, i)
        if isinstance(node, ast.If):
            yield _negation(node) if node.orelse else _truth(node)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("min", "max")
        ):
            yield _swap(node.func)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                for i, statement in enumerate(body):
                    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                        yield _removal(body, i)


def _without(conditions: list[ast.expr], i: int) -> Iterator[Callable[[], None]]:
    condition = conditions[i]
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        for k in range(len(condition.values)):
            yield functools.partial(condition.values.__setitem__, k, ast.Constant(True))
    else:
        yield functools.partial(conditions.__setitem__, i, ast.Constant(True))


def _negation(node: ast.If) -> Callable[[], None]:
    return lambda: setattr(node, "test", ast.UnaryOp(op=ast.Not(), operand=node.test))


def _truth(node: ast.If) -> Callable[[], None]:
    return lambda: setattr(node, "test", ast.Constant(True))


def _swap(name: ast.Name) -> Callable[[], None]:
    return lambda: setattr(name, "id", "max" if name.id == "min" else "min")


def _removal(body: list[ast.stmt], i: int) -> Callable[[], None]:
    return functools.partial(body.__setitem__, i, ast.Pass())
