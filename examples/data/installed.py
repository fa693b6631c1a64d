"""The Python source that is installed with sparsejax, and its vocabulary.

The source is that of the standard library and of the packages that sparsejax needs. It
depends on the versions installed, so data that is made from it carries a SHA-256.
"""

import ast
import collections
import hashlib
import importlib.util
import os
import pathlib
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata


PACKAGES = ("numpy", "scipy", "jax", "optax")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


def versions() -> dict[str, str]:
    """The versions of Python and of the packages."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | packages


def modules() -> Iterator[tuple[str, ast.AST]]:
    """The path and the syntax tree of every module, tests aside, always in one order."""
    for folder in _folders():
        for here, inner, files in os.walk(folder):
            inner[:] = sorted(set(inner) - _SKIPPED)
            for path in (pathlib.Path(here, name) for name in sorted(files)):
                if path.suffix == ".py":
                    yield path.relative_to(folder.parent).as_posix(), _parsed(path)


def _folders() -> Iterator[pathlib.Path]:
    yield pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            yield pathlib.Path(spec.submodule_search_locations[0])


def _parsed(path: pathlib.Path) -> ast.AST:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Old files have doubtful escapes.
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def by_frequency(names: Iterable) -> list:
    """The distinct names, most frequent first; equal counts in the order of their text."""
    counts = collections.Counter(names)
    return sorted(counts, key=lambda name: (-counts[name], str(name)))


def sha256(data: object) -> str:
    """The SHA-256 of data as Python writes it."""
    return hashlib.sha256(repr(data).encode()).hexdigest()
