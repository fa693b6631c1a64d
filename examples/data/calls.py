"""Categories of the calls in Python source, and whether each passes a keyword argument."""

import ast
import zlib
from collections.abc import Iterator

import numpy as np

from examples.data import cache, installed


FIELDS = ("module", "callee", "receiver", "first argument", "arguments")
MORE_FIELDS = (
    *FIELDS,
    *(
        "package",
        "class",
        "function",
        "stands in",
        "second argument",
        "first name",
        "depth",
    ),
)


def calls() -> Iterator[tuple[tuple, bool]]:
    """Yields the categories of each call, as in `FIELDS`, and whether it has a keyword."""
    for module, tree in installed.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield (module, *_categories(node)), bool(node.keywords)


def hashed() -> dict[str, np.ndarray]:
    """The categories of each call as in `MORE_FIELDS`, hashed; kept in a cache.

    Returns:
        "categories", uint32 [calls, fields], and "clicked", whether it has a keyword.
    """

    def read():
        rows, clicked = [], []
        for module, tree in installed.modules():
            for categories, has_keyword in _in_places(tree, module):
                rows.append([*map(category, MORE_FIELDS, categories)])
                clicked.append(has_keyword)
        return {
            "categories": np.array(rows, np.uint32),
            "clicked": np.array(clicked, np.float32),
        }

    return cache.cached("calls", (1, MORE_FIELDS, installed.versions()), read)


def category(field: str, value: object) -> int:
    """A hash of a field and its value, 32 bits, the same on all machines."""
    return zlib.crc32(f"{field}={value}".encode())


def _in_places(tree, module):
    """The categories of each call, as in `MORE_FIELDS`, and whether it has a keyword."""
    package = module.split("/")[0]
    waiting = [(tree, ("", "", "", 0))]
    while waiting:
        node, (of_class, function, stands_in, depth) = waiting.pop()
        if isinstance(node, ast.Call):
            names = [_name(argument) for argument in node.args[:1]]
            kinds = [type(argument).__name__ for argument in node.args[1:2]]
            place = package, of_class, function, stands_in
            rest = (*(kinds or [""]), *(names or [""]), depth)
            yield (module, *_categories(node), *place, *rest), bool(node.keywords)
        if isinstance(node, ast.ClassDef):
            of_class = node.name
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        place = of_class, function, type(node).__name__, depth + 1
        waiting += [(child, place) for child in ast.iter_child_nodes(node)]


def _categories(call: ast.Call) -> tuple[str, str, str, int]:
    receiver = _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    first = type(call.args[0]).__name__ if call.args else ""
    return _name(call.func), receiver, first, len(call.args)


def _name(node: ast.expr) -> str:
    """A name, or the end of a dotted one; the kind of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else f"<{type(node).__name__}>"
