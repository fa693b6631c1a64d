"""A language-model corpus that is on every machine which can run the example.

It is the docstrings of the standard library and of the packages that sparsejax needs
anyway: several megabytes of English about programming, read in place. What it contains
depends on the versions installed, so a corpus carries its SHA-256 and those versions.
"""

import ast
import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.data import installed


UNKNOWN = "<unk>"
_WORD = re.compile("[a-z]+|[0-9]+")
# Part of the cache's name: to be raised when a change here changes the tokens.
_FORMAT = 1


class Corpus(NamedTuple):
    """A text as numbers.

    Attributes:
        tokens: int32 [tokens], places in `words`.
        words: The vocabulary, most frequent first; the first stands for all others.
        sha256: Of the text.
        versions: What the text was read from.
    """

    tokens: np.ndarray
    words: list[str]
    sha256: str
    versions: dict[str, str]


def load(vocabulary: int = 20_000) -> Corpus:
    """Returns the corpus, from a cache after the first time.

    Args:
        vocabulary: The most words to tell apart; fewer if the text has fewer.
    """
    versions = installed.versions()
    key = hashlib.sha256(repr((_FORMAT, vocabulary, versions)).encode()).hexdigest()
    path = _cache_folder() / f"docstrings-{key[:16]}.npz"
    try:
        with np.load(path) as stored:
            tokens, words, sha256 = stored["tokens"], stored["words"], stored["sha256"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        tokens, words, sha256 = _read(vocabulary)
        _store(path, tokens=tokens, words=np.array(words), sha256=np.array(sha256))
    return Corpus(tokens, [str(word) for word in words], str(sha256), versions)


def _read(vocabulary: int) -> tuple[np.ndarray, list[str], str]:
    text = "\n".join(_docstrings()).lower()
    occurrences = _WORD.findall(text)
    words = [UNKNOWN, *installed.by_frequency(occurrences)[: vocabulary - 1]]
    place = {word: i for i, word in enumerate(words)}
    tokens = (place.get(word, 0) for word in occurrences)
    tokens = np.fromiter(tokens, np.int32, len(occurrences))
    return tokens, words, hashlib.sha256(text.encode()).hexdigest()


def _docstrings() -> Iterator[str]:
    """Every docstring once, in an order that depends on nothing but the files."""
    seen = set()
    for _, tree in installed.modules():
        for docstring in _docstrings_of(tree):
            if docstring not in seen:
                seen.add(docstring)
                yield docstring


def _docstrings_of(tree: ast.AST) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparsejax"


def _store(path: Path, **arrays: np.ndarray) -> None:
    """Writes the cache, whole or not at all; without a place to write, not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez(file, **arrays)
        os.replace(file.name, path)
    except OSError:
        pass
