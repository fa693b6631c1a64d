"""Edits of a program that are anchored by its syntax tree, for mutants.

An edit says in which definition something stands and what stands there, as Python code. The
definition is found by its name in whatever file it is, and its local variables may have any
names: moving a function, formatting it or renaming a variable leaves an edit as it is.
"""

import ast
import functools
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sparsejax", "pallas_kernels", "benchmarks")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Edit(NamedTuple):
    """One edit.

    Attributes:
        at: The name of a function, a class or a variable of a module, `Class.method` inside
            a class. It stands anywhere under `FOLDERS`; where the pattern stands in several
            definitions of this name, the last parts of the module come first
            (`units.bits.listed`).
        old: An expression or statements which stand there once. The body `...` of a
            compound statement is any body, which stays. A name that is a local variable
            there stands for any local variable.
        new: What stands there instead.
    """

    at: str
    old: str
    new: str


class Place(NamedTuple):
    """Where an edit applies.

    Attributes:
        file: The path of the file.
        nodes: The expression, or the statements one after another.
        names: By local variable of the pattern, the one that is there.
        bodies: What stands where the pattern has `...`.
    """

    file: Path
    nodes: list[Any]
    names: dict[str, str]
    bodies: list[list[ast.stmt]]


@functools.cache
def find(edit: Edit, root: Path = ROOT) -> Place:
    """Where an edit applies.

    Args:
        edit: The edit.
        root: What `FOLDERS` are in.

    Raises:
        LookupError: If it is not in one place.
    """
    module, name = _split(edit.at, root)
    pattern = _pattern(edit)
    found = [
        place
        for file in _files(root)
        if _module_ends(file, root, module) and name.split(".")[-1] in _source(file)
        for definition in _definitions(_tree(file), name)
        for place in _places(file, definition, pattern)
    ]
    # A pattern that several places match up to names is meant as it is written.
    exact = [place for place in found if all(a == b for a, b in place.names.items())]
    found = exact if len(found) > 1 else found
    if len(found) != 1:
        files = ", ".join(str(place.file.relative_to(root)) for place in found)
        raise LookupError(
            f"{edit.old!r} is in {len(found)} places of {edit.at} and must be in one. "
            + (f"They are in {files}." if found else "Has the definition a new name?")
        )
    return found[0]


def apply(edit: Edit, root: Path = ROOT) -> tuple[Path, str]:
    """The file that an edit changes, and its source afterwards."""
    place = find(edit, root)
    source = _source(place.file)
    start, end = _span(source, place.nodes)
    filler = _Filler(place.names, iter(place.bodies))
    if isinstance(place.nodes[0], ast.expr):
        new = ast.parse(textwrap.dedent(edit.new), mode="eval").body
        text = f"({ast.unparse(filler.visit(new))})"
    else:
        statements = ast.parse(textwrap.dedent(edit.new)).body
        lines = [ast.unparse(filler.visit(one)) for one in statements]
        text = textwrap.indent("\n".join(lines), " " * place.nodes[0].col_offset).lstrip()
    edited = source[:start] + text + source[end:]
    compile(edited, str(place.file), "exec")
    return place.file, edited


def _split(at: str, root: Path) -> tuple[str, str]:
    """The last parts of a module and the name inside it.

    Modules and functions are written alike, so what is a module is read from the files.
    """
    parts = at.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if any(_module_ends(file, root, module) for file in _files(root)):
            return module, ".".join(parts[count:])
    return "", at


def _module_ends(file: Path, root: Path, module: str) -> bool:
    return not module or _module(file, root).endswith("." + module)


@functools.cache
def _module(file: Path, root: Path) -> str:
    """A file's module, with a dot in front."""
    parts = file.relative_to(root).with_suffix("").parts
    return "." + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _files(root: Path) -> tuple[Path, ...]:
    return tuple(file for name in FOLDERS for file in sorted((root / name).rglob("*.py")))


@functools.cache
def _source(file: Path) -> str:
    return file.read_text()


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(_source(file))


def _definitions(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    """The definitions or calls of a name that are in no function."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func) == name:
                yield node
        if isinstance(node, _Definition) and node.name == first:
            if not rest:
                yield node
            elif isinstance(node, ast.ClassDef):
                yield from _definitions(node, rest)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not rest:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == first for one in targets):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node, name)


def _pattern(edit: Edit) -> ast.expr | list[ast.stmt]:
    """An expression if both sides are one; else statements."""
    try:
        old, _ = (
            ast.parse(textwrap.dedent(text), mode="eval") for text in (edit.old, edit.new)
        )
    except SyntaxError:
        return ast.parse(textwrap.dedent(edit.old)).body
    return old.body


def _places(file: Path, definition: ast.AST, pattern) -> Iterator[Place]:
    local = _locals(definition)
    if isinstance(pattern, ast.expr):
        for node in ast.walk(definition):
            if isinstance(node, ast.expr):
                match = _Match(local)
                if match.same(pattern, node):
                    yield Place(file, [node], match.names, match.bodies)
        return
    if len(pattern) == 1:
        match = _Match(local)
        if match.same(pattern[0], definition):
            yield Place(file, [definition], match.names, match.bodies)
    for node in ast.walk(definition):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for first in range(len(block) - len(pattern) + 1):
                match, nodes = _Match(local), block[first : first + len(pattern)]
                if all(map(match.same, pattern, nodes)):
                    yield Place(file, nodes, match.names, match.bodies)


def _locals(definition: ast.AST) -> set[str]:
    """The names that functions in a definition bind: parameters and variables."""
    names = set()
    for scope in ast.walk(definition):
        if not isinstance(scope, _Scope):
            continue
        for node in ast.walk(scope):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, _Definition) and node is not definition:
                names.add(node.name)
    return names


class _Match:
    """Whether a pattern is a piece of a program, up to the names of local variables."""

    def __init__(self, local: set[str]):
        self.names: dict[str, str] = {}
        self.bodies: list[list[ast.stmt]] = []
        self._local = local

    def same(self, pattern, node) -> bool:
        if isinstance(pattern, list):
            return (
                isinstance(node, list)
                and len(pattern) == len(node)
                and all(map(self.same, pattern, node))
            )
        if not isinstance(pattern, ast.AST):
            return type(pattern) is type(node) and pattern == node
        if type(pattern) is not type(node):
            return False
        if isinstance(pattern, ast.Name):
            return self._same_name(pattern.id, node.id)
        if isinstance(pattern, ast.arg):
            return self._same_name(pattern.arg, node.arg)
        return all(self._same_field(field, pattern, node) for field in pattern._fields)

    def _same_field(self, field: str, pattern: ast.AST, node: ast.AST) -> bool:
        if field in ("ctx", "kind", "type_comment"):
            return True
        own, other = getattr(pattern, field, None), getattr(node, field, None)
        if field == "body" and _is_any_body(own) and isinstance(other, list):
            self.bodies.append(other)
            return True
        return self.same(own, other)

    def _same_name(self, own: str, other: str) -> bool:
        if other not in self._local:
            return own == other
        known = self.names.setdefault(own, other)
        return known == other and list(self.names.values()).count(other) == 1


def _is_any_body(body) -> bool:
    return isinstance(body, list) and len(body) == 1 and _is_ellipsis(body[0])


def _is_ellipsis(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and node.value.value is ...


class _Filler(ast.NodeTransformer):
    """Puts the names and the bodies that are there into what stands there instead."""

    def __init__(self, names: dict[str, str], bodies: Iterator[list[ast.stmt]]):
        self._names, self._bodies = names, bodies

    def visit(self, node: Any):
        if isinstance(node, ast.Name):
            node.id = self._names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = self._names.get(node.arg, node.arg)
        elif _is_any_body(getattr(node, "body", None)):
            # The body has its own names already.
            node.body = []
            super().generic_visit(node)
            node.body = next(self._bodies)
        else:
            super().generic_visit(node)
        return node


def _span(source: str, nodes: list) -> tuple[int, int]:
    """Where nodes begin and end in a source, in characters; decorators are part of them."""
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def offset(line, column):
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    first, last = nodes[0], nodes[-1]
    decorators = getattr(first, "decorator_list", [])
    begins = [(one.lineno, one.col_offset - 1) for one in decorators]
    begin = min([(first.lineno, first.col_offset), *begins])
    return offset(*begin), offset(last.end_lineno, last.end_col_offset)
