"""Functions of the installed source: the words of their docstrings and of their names.

The task is to predict the name of a function from its description: thousands of labels, a
few for each example, as in extreme classification.
"""

import ast
import re

from examples.data import cache, installed
from examples.data.labeled import Examples, padded


WORDS, LABELS = 20_000, 4_000


def load() -> Examples:
    """The functions, from a cache after the first time."""

    def read():
        described = list(dict.fromkeys(_functions()))
        words = installed.by_frequency(w for text, _ in described for w in text)[:WORDS]
        labels = installed.by_frequency(w for _, name in described for w in name)[:LABELS]
        place_of = lambda names: {name: at for at, name in enumerate(names)}
        places = place_of(words), place_of(labels)
        rows = [
            [
                [place[w] for w in side if w in place]
                for side, place in zip(one, places, strict=True)
            ]
            for one in described
        ]
        rows = [(features, labels) for features, labels in rows if features and labels]
        rows = [(dict.fromkeys(features, 1.0), names) for features, names in rows]
        return padded(rows, len(words), len(labels))._asdict()

    stored = cache.cached("documented", (1, WORDS, LABELS, installed.versions()), read)
    return Examples(**stored)


def _functions():
    """The words of the docstring and of the name of each function that has both."""
    for _, tree in installed.modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = re.findall("[a-z]+", (ast.get_docstring(node) or "").lower())
                name = [word for word in node.name.lower().split("_") if word.isalpha()]
                if len(text) > 3 and name:
                    yield tuple(text), tuple(name)
