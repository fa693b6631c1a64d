"""Data to train small models on that is there where sparsejax is installed.

Sentences and their translations are from the gettext catalogues of the system's programs.
Categories are from the calls in the source of the standard library and of the packages
that sparsejax needs. Both depend on what is installed, so there is a SHA-256 to tell.
"""

import ast
import collections
import gettext
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata

from benchmarks.record import say
from examples import lm_corpus


CATALOGUES = pathlib.Path("/usr/share/locale/de/LC_MESSAGES")
FIELDS = ("module", "callee", "receiver", "first argument", "arguments")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


class Missing(Exception):
    """Data that this machine does not have."""


def sentence_pairs() -> tuple[list[tuple[list[str], list[str]]], int]:
    """The words of every message and of its translation, each pair once.

    Messages of a word or two are left out: they are labels and names, not sentences.

    Returns:
        The pairs, and how many catalogues were read.
    """
    pairs, read = {}, 0
    for path in sorted(CATALOGUES.glob("*.mo")):
        try:
            with path.open("rb") as file:
                # There is no public way to list the messages.
                messages = gettext.GNUTranslations(file)._catalog
        except (OSError, UnicodeDecodeError):
            say(f"  {path.name} cannot be read and is left out")
            continue
        read += 1
        for message, german in messages.items():
            # A message with plurals comes as itself and which plural.
            english = message[0] if isinstance(message, tuple) else message
            words = re.findall("[a-z]+", english.lower())
            if len(words) > 2:
                pairs[english, german] = words, re.findall("[a-zäöüß]+", german.lower())
    if not pairs:
        raise Missing(f"there are no German catalogues in {CATALOGUES}")
    return list(pairs.values()), read


def calls() -> Iterator[tuple[tuple, bool]]:
    """The categories of each call in Python source, and whether it passes a keyword."""
    for module, path in _modules():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Call):
                yield (module, *_categories(node)), bool(node.keywords)


def versions() -> dict[str, str]:
    """Of the source that the calls are in."""
    packages = {name: metadata.version(name) for name in lm_corpus.PACKAGES}
    return {"python": platform.python_version()} | packages


def _modules() -> Iterator[tuple[str, pathlib.Path]]:
    """Every file of the standard library and of the packages, tests aside."""
    folders = [pathlib.Path(sysconfig.get_paths()["stdlib"])]
    for name in lm_corpus.PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            folders.append(pathlib.Path(spec.submodule_search_locations[0]))
    for folder in folders:
        for here, inner, files in os.walk(folder):
            inner[:] = sorted(set(inner) - _SKIPPED)
            for path in (pathlib.Path(here, name) for name in sorted(files)):
                if path.suffix == ".py":
                    yield path.relative_to(folder.parent).as_posix(), path


def _parsed(path: pathlib.Path) -> ast.AST:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Old files have doubtful escapes.
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _categories(call: ast.Call) -> tuple[str, str, str, int]:
    receiver = _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    first = type(call.args[0]).__name__ if call.args else ""
    return _name(call.func), receiver, first, len(call.args)


def _name(node: ast.expr) -> str:
    """What a name or the end of a dotted one says; of all else the kind."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else f"<{type(node).__name__}>"


def numbered(names: Iterable) -> list:
    """The different ones, most frequent first; equal counts by their text."""
    counts = collections.Counter(names)
    return sorted(counts, key=lambda name: (-counts[name], str(name)))


def sha256(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()
