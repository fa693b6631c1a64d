"""Examples of extreme classification: few of many features, few of many labels.

A file of the user's is in the format of the extreme classification repository: a line with
the numbers of examples, features and labels, then a line for each example, its labels with
commas between them and its features with their values:

    3 1000 200
    4,17 0:0.5 999:1.25
"""

import hashlib
from typing import NamedTuple

import numpy as np

from examples.common import files


MOST_FEATURES, MOST_LABELS = 64, 8


class Examples(NamedTuple):
    """Examples, each filled up to the same length with -1.

    Attributes:
        features: int32 [examples, MOST_FEATURES].
        values: float32 like the features, 0 where there is none; the squares of an
            example's add up to 1.
        labels: int32 [examples, MOST_LABELS].
        sizes: The numbers of features and of labels.
    """

    features: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray

    def sha256(self) -> str:
        return hashlib.sha256(b"".join(x.tobytes() for x in self)).hexdigest()


def padded(
    rows: list[tuple[dict[int, float], list[int]]], features: int, labels: int
) -> Examples:
    """Examples from their features and labels; the largest features, the first labels.

    Args:
        rows: {feature: value} and labels of each.
        features: Their number.
        labels: Their number.
    """
    shape = len(rows), MOST_FEATURES
    ids, values = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    names = np.full((len(rows), MOST_LABELS), -1, np.int32)
    for at, (of_features, of_labels) in enumerate(rows):
        kept = sorted(of_features.items(), key=lambda one: -abs(one[1]))[:MOST_FEATURES]
        ids[at, : len(kept)] = [feature for feature, _ in kept]
        values[at, : len(kept)] = [value for _, value in kept]
        different = list(dict.fromkeys(of_labels))[:MOST_LABELS]
        names[at, : len(different)] = different
    norms = np.sqrt(np.square(values).sum(1, keepdims=True))
    values /= np.maximum(norms, 1e-12)
    return Examples(ids, values, names, np.array([features, labels]))


def read(path: str) -> Examples:
    """The examples of a file that have features and labels.

    Args:
        path: The file.
    """
    numbered = files.lines(path)
    number, head = next(numbered)
    try:
        _, features, labels = map(int, head.split())
    except ValueError:
        files.refuse(
            path,
            number,
            f"it is {head[:40]!r}, and is to be three whole numbers: of examples, of "
            "features and of labels",
        )
    rows = []
    for number, line in numbered:
        names, *pairs = line.split(" ")
        try:
            of_labels = [_place(name, labels) for name in names.split(",") if name]
            split = [pair.split(":") for pair in pairs if pair]
            of_features = {_place(at, features): float(value) for at, value in split}
        except ValueError:
            files.refuse(
                path,
                number,
                f"it is {line[:40]!r}, and is to be labels below {labels} between commas, "
                f"then features below {features} with their values, as in 4,17 0:0.5 9:1",
            )
        if of_labels and of_features:
            rows.append((of_features, of_labels))
    if not rows:
        raise SystemExit(f"{path} has no example with features and labels.")
    return padded(rows, features, labels)


def _place(text, count):
    place = int(text)
    if not 0 <= place < count:
        raise ValueError(text)
    return place
