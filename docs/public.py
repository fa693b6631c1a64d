"""What is public: the names on the pages of `docs/api`, and the members of classes."""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import types
from typing import Any

import pallas_kernels
import sparsejax


REFERENCE = pathlib.Path(__file__).parent / "api"
PAGES = [path.read_text() for path in sorted(REFERENCE.glob("*.md"))]
LISTED = re.findall(
    r"^\.\. auto(?:function|class|exception):: (\S+)$", "\n".join(PAGES), re.M
)
OURS = ("sparsejax", "pallas_kernels")


def names() -> dict[str, Any]:
    """Every public function and class, by its shortest name."""
    folders = [
        value
        for name in dir(sparsejax)
        if isinstance(value := getattr(sparsejax, name), types.ModuleType)
        and name != "__main__"  # there once a test has imported the command line
    ]
    found = {}
    for module in (sparsejax, *folders, pallas_kernels):
        for name in dir(module):
            value = getattr(module, name)
            of_errors = module is not sparsejax.errors or inspect.isclass(value)
            mine = str(getattr(value, "__module__", "")).startswith(OURS)
            if callable(value) and not name.startswith("_") and of_errors and mine:
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


@functools.cache
def listed() -> dict[str, Any]:
    """What the pages list: public names, and those of modules that few users import."""
    found = {}
    for name in LISTED:
        module, _, attribute = name.rpartition(".")
        found[name] = getattr(importlib.import_module(module), attribute)
    return found


def members(kind: type) -> dict[str, Any]:
    """The methods and properties that stand on a page below their class.

    A method that overrides one of a listed class stands below that class alone.
    """
    above = [base for base in kind.__mro__[1:] if base in listed().values()]
    return {
        name: value
        for name, value in vars(kind).items()
        if is_member(kind, name) and not any(is_member(base, name) for base in above)
    }


def is_member(kind: type, name: str) -> bool:
    """Whether a class itself defines a public method or property of this name."""
    value = vars(kind).get(name)
    is_field = name in fields(kind)
    is_method = inspect.isroutine(value) or isinstance(
        value, property | functools.cached_property
    )
    is_public = not name.startswith("_") or name == "__call__"
    return is_method and is_public and not is_field


def fields(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple, in order."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", ())
