"""A click model's data: categories of examples, one table for all of them, and clicks.

26 categories an example, as Criteo's logs have, each a row of one table of 16 numbers. Ids
are uniform, or follow a Zipf law as those of clicks do. JAX is not needed here.
"""

from collections.abc import Iterator

import numpy as np


FEATURES, BATCH, WIDTH = 26, 8192, 16
ZIPF = 1.05  # the exponent; half of all lookups are of some hundreds of rows
KINDS = ("uniform", "zipf")


def table(height: int) -> np.ndarray:
    """The table as training starts, small normal numbers."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((height, WIDTH), np.float32)
    numbers *= 0.01
    return numbers


def batches(
    height: int, kind: str, ranks: int = 1, examples: int = BATCH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of so many examples a rank for ever: ids int32 [all, 26], and clicks."""
    rng = np.random.default_rng(0)
    while True:
        shape = ranks * examples, FEATURES
        if kind == "uniform":
            ids = rng.integers(0, height, shape)
        else:
            # The inverse of the distribution, as of a continuous one.
            power = 1 - ZIPF
            ids = ((height**power - 1) * rng.random(shape) + 1) ** (1 / power) - 1
            # Frequent rows lie anywhere in a table.
            ids = (ids.astype(np.int64) * 2_654_435_761) % height
        clicked = rng.integers(0, 2, ranks * examples)
        yield ids.astype(np.int32), clicked.astype(np.float32)
