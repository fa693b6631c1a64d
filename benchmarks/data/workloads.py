"""Gradients to add up: which units each rank has, and its values for them.

A workload's sets are either recorded from training (`benchmarks.data.record_sets`) or
drawn: a unit is hit in proportion to 1 / (rank of the unit), the law of word frequencies,
and the number of draws is that which gives the wanted density.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable

import numpy as np


RECORDED = pathlib.Path(__file__).parent / "recorded"
ROWS, WIDTH = 65_536, 64
ELEMENTS = ROWS * WIDTH
# Percent of the rows, from hardly any to more than most models.
SHARES = (0.1, 0.3, 1, 3, 10)
# Recorded tables are filled up with rows that nobody reads, so that one program fits all.
RECORDED_ROWS = 32_768


@dataclasses.dataclass(frozen=True)
class Workload:
    """An array of `units` rows of `width` numbers, and the rows that each rank has.

    Attributes:
        name: Its name in tables.
        units: How many units; single numbers where the width is 1.
        width: Numbers in a unit.
        draw: From a number of ranks to booleans [ranks, units].
        about: The source of the sets.
    """

    name: str
    units: int
    width: int
    draw: Callable[[int], np.ndarray]
    about: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one rank's gradient."""
        return (self.units,) if self.width == 1 else (self.units, self.width)

    def sets(self, ranks: int) -> np.ndarray:
        """Flags of the units that each rank has, booleans [ranks, units]."""
        return self.draw(ranks)

    def values(self, sets: np.ndarray, rank: int) -> np.ndarray:
        """One rank's gradient, float32."""
        x = np.zeros((self.units, self.width), np.float32)
        there = np.flatnonzero(sets[rank])
        rng = np.random.default_rng((7, rank))
        x[there] = rng.standard_normal((len(there), self.width), np.float32)
        return x.reshape(self.shape)


def zipf(ranks: int, size: int, density: float, seed: int = 0) -> np.ndarray:
    """Sets of this density, drawn by each rank alone by a Zipf law, units in any order."""
    rng = np.random.default_rng(seed)
    hit = zipf_chances(size, density)[rng.permutation(size)].astype(np.float32)
    # One rank at a time: less to keep, and the sets of fewer ranks are the first of these.
    return np.stack([rng.random(size, np.float32) < hit for _ in range(ranks)])


def zipf_chances(size: int, density: float) -> np.ndarray:
    """The chance that a rank has each unit: float64 [size], descending, of this mean."""
    frequency = 1 / (np.arange(size) + 1.0)
    low, high = 1e-9, 1e12
    for _ in range(100):
        middle = math.sqrt(low * high)
        mean = -np.expm1(-middle * frequency).mean()
        low, high = (middle, high) if mean < density else (low, middle)
    return -np.expm1(-high * frequency)


def uniform(ranks: int, size: int, density: float, seed: int = 0) -> np.ndarray:
    """Sets of this density that every rank draws alone, all units alike."""
    rng = np.random.default_rng(seed)
    return rng.random((ranks, size), np.float32) < density


def _zipf(name, units, width, density):
    kind = "rows" if width > 1 else "numbers"
    draw = functools.partial(zipf, size=units, density=density)
    about = f"Zipf sets, {density:.2%} of {units:,} {kind}"
    return Workload(name, units, width, draw, about)


def _full(name, units, width):
    draw = lambda ranks: np.ones((ranks, units), bool)
    return Workload(name, units, width, draw, "nothing is zero")


def _recorded(name):
    path = RECORDED / f"{name}.npz"
    with np.load(path) as stored:
        units, width = int(stored["units"]), int(stored["width"])
        ranks = stored["sets"].shape[0]

    def draw(wanted):
        if wanted > ranks:
            raise ValueError(f"{path.name} holds the sets of {ranks} ranks, not {wanted}.")
        with np.load(path) as stored:
            packed = stored["sets"][:wanted]
        sets = np.zeros((wanted, RECORDED_ROWS), bool)
        sets[:, :units] = np.unpackbits(packed, axis=1, count=units, bitorder="little")
        return sets

    return Workload(name, RECORDED_ROWS, width, draw, "recorded from training")


def all_workloads() -> dict[str, Workload]:
    """Every workload by its name: the papers' densities, then what was recorded."""
    drawn = [
        _zipf("lstm", ROWS, WIDTH, 0.0113),
        _zipf("deepfm", ROWS, WIDTH, 0.0280),
        _zipf("nmt", ROWS, WIDTH, 0.0247),
        _zipf("lstm-wide", ROWS, 4 * WIDTH, 0.0113),
        _zipf("deepfm-wide", ROWS, 4 * WIDTH, 0.0280),
        _zipf("topk", ELEMENTS, 1, 0.05),
        _zipf("lstm-numbers", ELEMENTS, 1, 0.0113),
        _zipf("deepfm-numbers", ELEMENTS, 1, 0.0280),
        *(_zipf(f"rows-{share}%", ROWS, WIDTH, share / 100) for share in SHARES),
        _full("dense", ROWS, WIDTH),
        _full("dense-numbers", ELEMENTS, 1),
        _full("tiny", 64, 64),
    ]
    recorded = sorted(path.stem for path in RECORDED.glob("*.npz"))
    return {each.name: each for each in (*drawn, *map(_recorded, recorded))}
