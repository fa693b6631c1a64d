"""Loads: gradients to sum, the units that each rank has of them, and lower bounds.

The units of each rank are drawn at random, and counted by owner as `zen_sync` assigns them.
If units are single numbers, drawn uniformly, only their counts are drawn, from the same
distribution. The ids of a gradient that lists rows (`RowGrads`) are drawn by a Zipf law, so
many of them repeat.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import workloads
from sparsejax import schemes
from sparsejax.units.row_grads import RowGrads


RANKS = 16


@dataclasses.dataclass(frozen=True)
class Counts:
    """The numbers of non-zero units.

    Attributes:
        push: int [ranks, owners]: the units of each rank, by owner.
        pull: int [owners]: the units of the sum, by owner.
    """

    push: np.ndarray
    pull: np.ndarray


@dataclasses.dataclass(frozen=True)
class Load:
    """A float32 gradient that all ranks sum.

    Attributes:
        name: Its name in tables.
        units: The number of units: rows, or elements.
        width: The number of elements in a row; 1 if units are elements.
        density: The share of units that are non-zero on a rank, if it is an array.
        held: The units of the smaller array for which a run is compared with the counts.
        listed: The number of ids that a rank lists; 0 if the gradient is an array.
    """

    name: str
    units: int
    width: int
    density: float
    held: int
    listed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a rank's gradient."""
        return (self.units,) if self.width == 1 else (self.units, self.width)

    @property
    def leaf(self) -> str:
        """The name of the leaf, by which the library chooses elements or rows as units."""
        return "numbers" if self.width == 1 else "embedding"

    @property
    def bytes(self) -> int:
        """The bytes of a rank's gradient, as an array."""
        return 4 * self.units * self.width

    @property
    def like(self) -> jax.ShapeDtypeStruct | RowGrads:
        """The shapes and dtypes of a rank's gradient."""
        if not self.listed:
            return jax.ShapeDtypeStruct(self.shape, jnp.float32)
        ids = jax.ShapeDtypeStruct((self.listed,), jnp.int32)
        rows = jax.ShapeDtypeStruct((self.listed, self.width), jnp.float32)
        return RowGrads(ids, rows, self.shape)  # pyright: ignore[reportArgumentType]

    def smaller(self) -> "Load":
        """Returns the load for which a run is compared with the counts."""
        return dataclasses.replace(self, units=self.held)

    def ids(self) -> np.ndarray:
        """Returns the ids that each rank lists, int32 [ranks, listed]."""
        rng = np.random.default_rng(0)
        often = 1 / (np.arange(self.units) + 1.0)
        row = rng.permutation(self.units).astype(np.int32)
        drawn = rng.choice(self.units, (RANKS, self.listed), p=often / often.sum())
        return row[drawn]

    def sets(self) -> np.ndarray:
        """Returns bool [ranks, units]: the units that are non-zero on each rank."""
        if self.listed:
            flags = np.zeros((RANKS, self.units), bool)
            np.put_along_axis(flags, self.ids(), True, axis=1)
            return flags
        draw = workloads.uniform if self.width == 1 else workloads.zipf
        return draw(RANKS, self.units, self.density)

    @functools.cached_property
    def counts(self) -> Counts:
        """The counts of the units that were drawn."""
        if self.width == 1 and self.units != self.held:
            rng = np.random.default_rng(0)
            whole = -(-self.units // RANKS)
            of_sum = -math.expm1(RANKS * math.log1p(-self.density))
            pushed = rng.binomial(whole, self.density, (RANKS, RANKS))
            return Counts(pushed, rng.binomial(whole, of_sum, RANKS))
        sets = self.sets()
        layout = schemes.Zen().ownership.over(self.units, RANKS, None)
        owners = np.asarray(layout.assign(jnp.arange(self.units, dtype=jnp.int32))[0])
        of = lambda flags: np.bincount(owners[flags], minlength=RANKS)
        return Counts(np.stack([of(flags) for flags in sets]), of(sets.any(0)))

    @property
    def densities(self) -> tuple[float, float]:
        """The shares of units that are non-zero on a rank, and in the sum."""
        counts = self.counts
        return counts.push.sum() / RANKS / self.units, counts.pull.sum() / self.units

    @property
    def least_sent(self) -> float:
        """A lower bound of the bytes that a rank sends, by any index code.

        It sends its own entries to their owners, and its part of the sum's to all: the
        entropy of sets of these densities, and the values. The part of both that a rank
        owns is not sent.
        """
        sets = sum(_entropy(density) * self.units / 8 for density in self.densities)
        values = sum(density * self.bytes for density in self.densities)
        return (RANKS - 1) / RANKS * (sets + values)

    @property
    def least_moved(self) -> float:
        """A lower bound of the bytes of memory moved: read the gradient, write the sum."""
        if self.listed:
            return 4.0 * (self.width + 1) * (self.listed + self.counts.pull.sum())
        return 2.0 * self.bytes


def _entropy(density: float) -> float:
    """Returns the entropy, in bits, of a flag that is set with this probability."""
    if not 0 < density < 1:
        return 0.0
    other = 1 - density
    return -density * math.log2(density) - other * math.log2(other)


LOADS = {
    load.name: load
    for load in (
        Load("65,536 x 64", 65_536, 64, 0.012, 65_536),
        Load("793,471 x 512", 793_471, 512, 0.0113, 793_471 // 16),
        Load("128M numbers", 128_000_000, 1, 0.01, 8_000_000),
        Load("128M numbers, 2%", 128_000_000, 1, 0.02, 8_000_000),
        Load("128M numbers, 0.5%", 128_000_000, 1, 0.005, 8_000_000),
        Load("128M numbers, 0.1%", 128_000_000, 1, 0.001, 8_000_000),
        Load("128M numbers, 0.01%", 128_000_000, 1, 0.000_1, 8_000_000),
        Load("793,471 x 512, listed", 793_471, 512, 0.0, 793_471 // 16, listed=8_192),
    )
}
