"""Text as numbers, and a text of the user's own."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.common import files
from examples.data import installed


UNKNOWN = "<unk>"


class Corpus(NamedTuple):
    """A text as numbers.

    Attributes:
        tokens: int32 [tokens], places in `words`.
        words: The vocabulary, most frequent first; the first stands for all others.
        sha256: Of the text.
        versions: The versions of the sources of the text.
    """

    tokens: np.ndarray
    words: list[str]
    sha256: str
    versions: dict[str, str]


def corpus(
    text: str, vocabulary: int, versions: Mapping[str, str], word: str = "[a-z]+|[0-9]+"
) -> Corpus:
    """The words of a text, in small letters, by their frequency.

    Args:
        text: The text.
        vocabulary: The largest size of the vocabulary; smaller if the text has fewer words.
        versions: What it was read from.
        word: The regular expression of a word.
    """
    text = text.lower()
    occurrences = re.findall(word, text)
    words = [UNKNOWN, *installed.by_frequency(occurrences)[: vocabulary - 1]]
    place = {word: i for i, word in enumerate(words)}
    tokens = (place.get(word, 0) for word in occurrences)
    tokens = np.fromiter(tokens, np.int32, len(occurrences))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(tokens, words, sha256, dict(versions))


def read(path: str, vocabulary: int, least: int) -> Corpus:
    """The words of a text file of the user's, in any language.

    Args:
        path: The file.
        vocabulary: The largest size of the vocabulary.
        least: The smallest number of words that is accepted.
    """
    text = "\n".join(line for _, line in files.lines(path))
    found = corpus(text, vocabulary, {"text": Path(path).name}, r"\w+")
    if len(found.tokens) < least:
        raise SystemExit(f"{path} has {len(found.tokens)} words, and {least} are needed.")
    return found
