"""Small faults put into Python source: one place is changed, all else stays as it was written."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mod, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        kind: "comparison", "operator", "off by one", "default", "branch" or "condition".
        start: Where the changed text begins, in characters of the source.
        before: The text that stood there.
        after: What stands there now.
    """

    kind: str
    start: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        assert source[self.start :].startswith(self.before)
        return source[: self.start] + self.after + source[self.start + len(self.before) :]


def mutations(source: str) -> list[Mutation]:
    """List the faults that can be put into functions of a source.

    Args:
        source: Python.

    Returns:
        The faults, from the top down.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for kind, node, after in _changes(function):
                before = ast.get_source_segment(source, node) or ""
                line = lines[node.lineno - 1]
                column = len(line.encode()[: node.col_offset].decode())
                if before and "\n" not in before:
                    found.append(Mutation(kind, starts[node.lineno - 1] + column, before, after))
    unique = dict.fromkeys(m for m in found if m.before != m.after)
    return sorted(unique, key=lambda m: (m.start, m.kind, m.after))


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield kinds of faults, the expressions they change, and what these become."""
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Constant) and isinstance(default.value, int):
            value = not default.value if isinstance(default.value, bool) else default.value + 1
            yield "default", default, repr(value)
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
            flipped = FLIPPED[type(node.ops[0])]()
            changed = ast.Compare(node.left, [flipped], node.comparators)  # type: ignore[list-item]
            yield "comparison", node, ast.unparse(changed)
        elif isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
            operator = FLIPPED[type(node.op)]()
            yield "operator", node, ast.unparse(ast.BinOp(node.left, operator, node.right))  # type: ignore[arg-type]
        elif isinstance(node, ast.BoolOp) and type(node.op) in FLIPPED:
            yield "operator", node, ast.unparse(ast.BoolOp(FLIPPED[type(node.op)](), node.values))  # type: ignore[arg-type]
        elif isinstance(node, ast.If) and not node.orelse:
            yield "branch", node.test, "False"
        elif isinstance(node, ast.If | ast.IfExp):
            yield "condition", node.test, f"not ({ast.unparse(node.test)})"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield "off by one", node, repr(node.value + 1)
