"""A language-model corpus that exists on every machine which can run the example.

It is the docstrings of the standard library and of the packages that sparsejax needs
anyway: several megabytes of English about programming, read in place. What it contains
depends on the versions installed, so a corpus carries its SHA-256 and those versions.
"""

import ast
from collections.abc import Iterator

import numpy as np

from examples.data import installed, text
from examples.data.cache import Arrays, cached
from examples.data.text import Corpus as Corpus


# Part of the cache's name: to be raised when a change here changes the tokens.
_FORMAT = 1


def load(vocabulary: int = 20_000) -> Corpus:
    """Returns the corpus, from a cache after the first time.

    Args:
        vocabulary: The largest size of the vocabulary; smaller if the text has fewer words.
    """
    versions = installed.versions()

    def read() -> Arrays:
        found = text.corpus("\n".join(_docstrings()), vocabulary, versions)
        words, sha256 = np.array(found.words), np.array(found.sha256)
        return {"tokens": found.tokens, "words": words, "sha256": sha256}

    stored = cached("docstrings", (_FORMAT, vocabulary, versions), read)
    words = [str(word) for word in stored["words"]]
    return Corpus(stored["tokens"], words, str(stored["sha256"]), versions)


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
