import ast

from train.agents.environments import repositories
from train.agents.environments.mutations import mutations

SOURCE = """def f(a, b=3, *, c=True):
    if a < b and c:
        return a[0] + 1  # é
    return 'x' if a in b else None
"""


def test_each_sort_of_fault_is_made():
    found = {(m.kind, m.before, m.after) for m in mutations(SOURCE)}

    assert found >= {
        ("default", "3", "4"),
        ("default", "True", "False"),
        ("comparison", "a < b", "a <= b"),
        ("comparison", "a in b", "a not in b"),
        ("operator", "a[0] + 1", "a[0] - 1"),
        ("operator", "a < b and c", "a < b or c"),
        ("off by one", "0", "1"),
        ("branch", "a < b and c", "False"),
        ("condition", "a in b", "not (a in b)"),
    }


def test_a_fault_changes_one_place_and_the_rest_stays():
    for fault in mutations(SOURCE):
        broken = fault.apply(SOURCE)
        assert broken != SOURCE
        assert broken.replace(fault.after, "", 1) != broken
        assert "# é" in broken
        ast.parse(broken)


def test_every_module_of_the_repositories_can_be_broken():
    for module in repositories.MODULES:
        source = repositories.source_of(module)
        faults = mutations(source)
        assert len(faults) > 30
        for fault in faults[::25]:
            ast.parse(fault.apply(source))
