"""A click log of the user's, in the format of Criteo's: lines of fields between tabs.

A line has whether it was clicked, 0 or 1, then 13 whole numbers, then 26 categories. Fields
may be empty. A number is used as a category, too: small ones unchanged, larger ones by the
square of their logarithm, so that the categories are few.
"""

import hashlib
import itertools
import math

import numpy as np

from examples.common import files
from examples.data.calls import category


NUMBERS, CATEGORIES = 13, 26


def read(path: str, most: int) -> tuple[dict[str, np.ndarray], str]:
    """The examples of a log as `calls.hashed` has them, and the SHA-256 of what was read.

    Args:
        path: The file.
        most: The most lines that are read.
    """
    rows, clicked, digest = [], [], hashlib.sha256()
    for number, line in itertools.islice(files.lines(path), most):
        fields = line.split("\t")
        if len(fields) != 1 + NUMBERS + CATEGORIES:
            files.refuse(
                path,
                number,
                f"it has {len(fields)} fields between tabs, and is to have "
                f"{1 + NUMBERS + CATEGORIES}: a click, {NUMBERS} numbers and {CATEGORIES} "
                "categories",
            )
        if fields[0] not in ("0", "1"):
            files.refuse(path, number, f"its click is {fields[0]!r}, and is to be 0 or 1")
        for at in range(1, 1 + NUMBERS):
            try:
                fields[at] = _class_of(fields[at])
            except ValueError:
                files.refuse(
                    path, number, f"its field {at + 1} is {fields[at]!r}, no whole number"
                )
        clicked.append(fields[0] == "1")
        rows.append([category(str(at), value) for at, value in enumerate(fields[1:])])
        digest.update(line.encode() + b"\n")
    examples = {
        "categories": np.array(rows, np.uint32),
        "clicked": np.array(clicked, np.float32),
    }
    return examples, digest.hexdigest()


def _class_of(text: str) -> str:
    number = int(text) if text else None
    if number is None or number <= 2:
        return text
    return f"about {int(math.log(number) ** 2)}"
