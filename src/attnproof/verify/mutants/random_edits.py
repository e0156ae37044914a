"""Random one-line mistakes: what nobody thought of.

The shipped operators and the cases have one author, so they may share blind spots. Here a mistake is drawn from the
source text instead: an operator exchanged, a constant off by one, a name taken for its neighbour, a condition
negated, a statement lost. Edits that change no result on any case are not mistakes and are drawn again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.MatMult: "*",
}
SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.MatMult: "@",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
CALLS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "zeros": "ones",
    "ones": "zeros",
    "exp": "exp2",
    "max": "min",
    "sum": "max",
    "log": "log2",
    "tanh": "sin",
    "abs": "negative",
    "empty": "zeros",
}
NAMES = {
    "rows": "cols",
    "cols": "rows",
    "q": "k",
    "k": "q",
    "lo": "hi",
    "hi": "lo",
    "row": "col",
    "col": "row",
    "m": "n",
    "n": "m",
    "point": "alpha",
    "alpha": "point",
    "do": "q",
    "ds": "p",
    "p": "ds",
    "outer": "inner",
    "inner": "outer",
}


@dataclass(frozen=True)
class RandomEdit:
    """One replacement in one line of the source.

    Attributes:
        line: line number, from 1.
        start, stop: columns of the text that is replaced.
        new: what stands there afterwards.
        says: the edit in words.
    """

    line: int
    start: int
    stop: int
    new: str
    says: str

    def apply(self, text: str) -> str:
        """The whole source with the edit made."""
        lines = text.splitlines(keepends=True)
        old = lines[self.line - 1]
        # the parser counts columns in bytes of UTF-8
        raw = old.encode()
        lines[self.line - 1] = (raw[: self.start] + self.new.encode() + raw[self.stop :]).decode()
        return "".join(lines)


def edits(text: str) -> list[RandomEdit]:
    """Every edit that can be made in the functions of a source text, in order of position."""
    tree = ast.parse(text)
    lines = text.splitlines()
    found: dict[tuple[int, int, int, str], RandomEdit] = {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            for node in ast.walk(statement):
                for edit in _of_node(node, lines):
                    found[edit.line, edit.start, edit.stop, edit.new] = edit
    return [found[key] for key in sorted(found)]


def _of_node(node: ast.AST, lines: list[str]) -> Iterator[RandomEdit]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield from _symbol(node.left, node.right, SYMBOLS[type(node.op)], ARITHMETIC[type(node.op)], lines)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield from _symbol(node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])], lines)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield _replace(node, new, f"{node.value} becomes {new}")
    elif isinstance(node, ast.Attribute) and node.attr in CALLS and node.end_col_offset is not None:
        start = node.end_col_offset - len(node.attr)
        yield RandomEdit(
            node.end_lineno or node.lineno,
            start,
            node.end_col_offset,
            CALLS[node.attr],
            f"{node.attr} becomes {CALLS[node.attr]}",
        )
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield _replace(node, NAMES[node.id], f"{node.id} becomes {NAMES[node.id]}")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield RandomEdit(node.lineno, node.col_offset, node.col_offset + 1, "", "a minus sign is lost")
    elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
        segment = _segment(node.test, lines)
        yield _replace(node.test, f"(not ({segment}))", f"`if {segment}` is negated")
    if isinstance(node, (ast.AugAssign, ast.Expr)) and node.lineno == node.end_lineno:
        yield _replace(node, "pass", f"`{_segment(node, lines)}` is lost")


def _replace(node: ast.expr | ast.stmt, new: str, says: str) -> RandomEdit:
    return RandomEdit(node.lineno, node.col_offset, node.end_col_offset or node.col_offset, new, says)


def _segment(node: ast.expr | ast.stmt, lines: list[str]) -> str:
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _symbol(left: ast.expr, right: ast.expr, old: str, new: str, lines: list[str]) -> Iterator[RandomEdit]:
    """The operator between two operands on one line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    raw = lines[right.lineno - 1].encode()
    at = raw.find(old.encode(), left.end_col_offset, right.col_offset)
    if at >= 0:
        yield RandomEdit(right.lineno, at, at + len(old), new, f"{old} becomes {new}")
