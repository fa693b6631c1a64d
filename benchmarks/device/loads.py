"""What is summed: gradients, which of their units each rank has, and the least that takes.

Counts are those of sets that are drawn, split among owners as `zen_sync` splits them. Of
single numbers drawn uniformly only the counts are drawn: it is the same law. A gradient
that lists its rows (`RowGrads`) has so many ids, drawn by a Zipf law: many of them repeat.
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
    """How many units there are.

    Attributes:
        push: int [ranks, owners]: of each rank by owner.
        pull: int [owners]: of the sum by owner.
    """

    push: np.ndarray
    pull: np.ndarray


@dataclasses.dataclass(frozen=True)
class Load:
    """A gradient that all ranks sum, of float32.

    Attributes:
        name: Its name in tables.
        units: Rows, or numbers.
        width: Numbers in a row; 1 where units are numbers.
        density: The share of the units that a rank has, where it has an array.
        held: The units of the smaller array on which turns are held against a run.
        listed: Ids that a rank lists; 0 where it has an array.
    """

    name: str
    units: int
    width: int
    density: float
    held: int
    listed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's gradient."""
        return (self.units,) if self.width == 1 else (self.units, self.width)

    @property
    def leaf(self) -> str:
        """A name under which the library takes its units for what they are."""
        return "numbers" if self.width == 1 else "embedding"

    @property
    def bytes(self) -> int:
        """Of a rank's gradient."""
        return 4 * self.units * self.width

    @property
    def like(self) -> jax.ShapeDtypeStruct | RowGrads:
        """A rank's gradient: shapes and dtypes."""
        if not self.listed:
            return jax.ShapeDtypeStruct(self.shape, jnp.float32)
        ids = jax.ShapeDtypeStruct((self.listed,), jnp.int32)
        rows = jax.ShapeDtypeStruct((self.listed, self.width), jnp.float32)
        return RowGrads(ids, rows, self.shape)  # pyright: ignore[reportArgumentType]

    def smaller(self) -> "Load":
        """The load on which turns are held against a run."""
        return dataclasses.replace(self, units=self.held)

    def ids(self) -> np.ndarray:
        """The ids that each rank lists, int32 [ranks, listed]."""
        rng = np.random.default_rng(0)
        often = 1 / (np.arange(self.units) + 1.0)
        row = rng.permutation(self.units).astype(np.int32)
        drawn = rng.choice(self.units, (RANKS, self.listed), p=often / often.sum())
        return row[drawn]

    def sets(self) -> np.ndarray:
        """Flags of the units that each rank has, booleans [ranks, units]."""
        if self.listed:
            flags = np.zeros((RANKS, self.units), bool)
            np.put_along_axis(flags, self.ids(), True, axis=1)
            return flags
        draw = workloads.uniform if self.width == 1 else workloads.zipf
        return draw(RANKS, self.units, self.density)

    @functools.cached_property
    def counts(self) -> Counts:
        """Of the sets that are drawn."""
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
        """The shares of units that a rank has, and that the sum has."""
        counts = self.counts
        return counts.push.sum() / RANKS / self.units, counts.pull.sum() / self.units

    @property
    def least_sent(self) -> float:
        """Bytes below which no code gets: one rank's entries out, the sum's to all.

        The entropy of sets of these densities, and the values; a rank owns a part of both,
        which is not sent.
        """
        sets = sum(_entropy(density) * self.units / 8 for density in self.densities)
        values = sum(density * self.bytes for density in self.densities)
        return (RANKS - 1) / RANKS * (sets + values)

    @property
    def least_moved(self) -> float:
        """Bytes of memory that any step moves: the gradient read, the sum written."""
        if self.listed:
            return 4.0 * (self.width + 1) * (self.listed + self.counts.pull.sum())
        return 2.0 * self.bytes


def _entropy(density: float) -> float:
    """Bits of a flag that is set with this chance."""
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
