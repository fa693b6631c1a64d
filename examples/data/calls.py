"""Categories of the calls in Python source, and whether each passes a keyword argument."""

import ast
from collections.abc import Iterator

from examples.data import installed


FIELDS = ("module", "callee", "receiver", "first argument", "arguments")


def calls() -> Iterator[tuple[tuple, bool]]:
    """Yields the categories of each call, as in `FIELDS`, and whether it has a keyword."""
    for module, tree in installed.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield (module, *_categories(node)), bool(node.keywords)


def _categories(call: ast.Call) -> tuple[str, str, str, int]:
    receiver = _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    first = type(call.args[0]).__name__ if call.args else ""
    return _name(call.func), receiver, first, len(call.args)


def _name(node: ast.expr) -> str:
    """A name, or the end of a dotted one; the kind of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else f"<{type(node).__name__}>"
