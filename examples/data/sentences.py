"""Pairs of sentences as numbers, and pairs of the user's own."""

import re

import numpy as np

from examples.common import files
from examples.data import installed


PAD, UNKNOWN, BEGIN, END = range(4)
HELD_OUT = 40  # of how many pairs one is not trained on

Pairs = list[tuple[list[str], list[str]]]


def read(source: str, target: str) -> Pairs:
    """The words of two files of the user's, each line of one a translation of the other's.

    Args:
        source: The file in the language that is read.
        target: The file in the language that is written.
    """
    texts = [
        [re.findall(r"\w+", line.lower()) for _, line in files.lines(path, blank=True)]
        for path in (source, target)
    ]
    if len(texts[0]) != len(texts[1]):
        raise SystemExit(
            f"{source} has {len(texts[0])} lines and {target} has {len(texts[1])}: each "
            "line of one is to be the translation of that of the other."
        )
    return list(zip(*texts, strict=True))


def short(pairs: Pairs, length: int) -> Pairs:
    """The pairs of which both sides have words, and at most the given number."""
    is_short = lambda words: 0 < len(words) <= length
    return [pair for pair in pairs if is_short(pair[0]) and is_short(pair[1])]


def numbered(pairs: Pairs, words: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences as numbers of words, the more frequent first.

    Args:
        pairs: From `short`.
        words: The number of words of each language that have a number.
        length: The most words of a sentence.

    Returns:
        What is read, int32 [pairs, length], and what is written, [pairs, length + 2] from
        `BEGIN` to `END`, both filled up with `PAD`.
    """
    texts = []
    for side in (0, 1):
        known = installed.by_frequency(word for pair in pairs for word in pair[side])
        place = {w: END + 1 + i for i, w in enumerate(known[: words - END - 1])}
        texts.append([[place.get(w, UNKNOWN) for w in pair[side]] for pair in pairs])
    framed = [[BEGIN, *text, END] for text in texts[1]]
    return _filled(texts[0], length), _filled(framed, length + 2)


def held_out(pairs: Pairs) -> np.ndarray:
    """Which pairs are held out: equal sentences are on one side."""
    english = sorted({tuple(pair[0]) for pair in pairs})
    apart = set(english[::HELD_OUT])
    return np.array([tuple(pair[0]) in apart for pair in pairs])


def _filled(texts, length):
    return np.array([text + [PAD] * (length - len(text)) for text in texts], np.int32)
