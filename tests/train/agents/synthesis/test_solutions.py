import pytest

from train.agents.synthesis import solutions
from train.agents.synthesis.solutions import SolutionError, check_source, mutants, run_in

GOOD = 'def solve(call):\n    return call("list")\n'


def body(*lines):
    return "def solve(call):\n" + "".join(f"    {line}\n" for line in lines)


def test_what_only_calls_and_computes_is_allowed(draft):
    check_source(GOOD)
    check_source(draft.solution)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1",
        "def solve(call): pass",
        "def solve(x):\n    return x",
        "import os\n" + GOOD,
        GOOD + GOOD.replace("solve", "other"),
        body("import os", 'return call("list")'),
        body("def f(): pass", 'return call("list")'),
        body('return call.__globals__["x"]'),
        body('return call("list").__class__'),
        body('return "{0.__class__}".format(call("list"))'),
        body('return __import__("os")'),
        body("f = call", 'return f("list")'),
        body('name = "list"', "return call(name)"),
        body('return call("list", **{})'),
        body("while True: pass", 'return call("list")'),
        body('return [x := call("list")]'),
        body("global y", 'return call("list")'),
        body("async def g(): pass", 'return call("list")'),
        "def solve(call",
    ],
)
def test_anything_else_is_refused(source):
    with pytest.raises(SolutionError):
        check_source(source)


@pytest.mark.parametrize("name", ["open", "eval", "getattr", "vars", "type", "print", "Exception"])
def test_builtins_that_lead_out_are_not_there(shop, name):
    outcome = run_in(shop, body(f'{name}("x")', 'return call("list")'))

    assert "NameError" in outcome.error


def test_a_run_tells_calls_and_answer(shop, draft):
    outcome = run_in(shop, draft.solution)

    assert [call.name for call in outcome.calls] == ["list", "get", "get", "get", "buy"]
    assert (outcome.answer, outcome.error) == ("317", "")


def test_failures_are_told_and_not_raised(shop):
    assert "out of stock" in run_in(shop, body('return call("buy", good="cap")')).error
    assert "KeyError" in run_in(shop, body('return call("get", good="pen")["colour"]')).error
    many = body("for i in range(9999):", '    call("list")', "return 1")
    assert f"more than {solutions.MAX_CALLS} calls" in run_in(shop, many).error


def test_each_shortcut_is_taken(draft):
    found = mutants(draft.solution)

    assert len(found) == 3
    assert sum("if True" in m for m in found) == 1
    assert sum("max(" in m for m in found) == 1
    assert sum("call('buy'" not in m for m in found) == 1


def test_branches_are_turned_and_conditions_left_out_one_by_one():
    source = body(
        'rows = [r for r in call("list") if r > 1 and r < 9]',
        "if rows:",
        '    call("a")',
        "else:",
        '    call("b")',
        "for r in rows:",
        "    if r == 3:",
        '        call("c")',
    )
    found = mutants(source)

    assert any("if True and r < 9" in m for m in found)
    assert any("if r > 1 and True" in m for m in found)
    assert any("if not rows" in m for m in found)
    assert any("if True:\n            call('c')" in m for m in found)
    assert len(found) == 7  # and three calls left out
