"""Ownership that follows the data: the strawman of Zen, section 3.1, for comparison.

Every so many steps the non-zero units of a sum are cut into equal runs, and where a run
begins a rank's range begins from then on. All ranks have the sum, so all find the same
thresholds and nothing is sent for them. As the sets move on, balance is lost.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.striping import word_multiple
from sparsejax import errors
from sparsejax.axes import varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.units.ownership.base import Layout, Ownership


@dataclasses.dataclass(frozen=True)
class SortedThresholds(Ownership):
    """Ranges each of which had equally many units in a step before.

    A part may come to hold nearly all units, so an owner's arrays are as large as the
    gradient.

    Attributes:
        every: Steps from one set of thresholds to the next.
    """

    needs_tables = True
    balanced = False
    follows_data = True
    every: int = 1000

    def __post_init__(self):
        errors.check_whole("every", self.every, 1)

    def over(self, size, ranks, tables=None):
        words = ranks * (word_multiple(size) // bits.WORD)
        if words >= 2**31:
            raise ArgumentError(
                f"the parts of {ranks} ranks, any of which may come to hold all {size:,} "
                f"units, have {words:,} words, more than int32 can number: use another "
                "ownership, or shard the array over a second mesh axis."
            )
        if tables is None:
            tables = self.tables(size, ranks)
        elif not isinstance(tables, _Thresholds) or len(tables.starts) != ranks:
            needs = f"the thresholds of {ranks} ranks"
            raise errors.wrong_state("SortedThresholds", needs, tables)
        return _Cut(size, ranks, word_multiple(size), tables.starts)

    def width(self, size, ranks):
        return word_multiple(size)

    def tables(self, size, ranks):
        starts = np.arange(ranks, dtype=np.int64) * size // ranks
        return _Thresholds(jnp.int32(0), jnp.asarray(starts, jnp.int32))

    def after(self, tables, total):
        ranks = len(tables.starts)
        elsewhere = varying_axes(total)
        if elsewhere:
            raise ArgumentError(
                f"thresholds follow the data, and these differ over {sorted(elsewhere)}: "
                "use another ownership for arrays that a second mesh axis shards."
            )

        def cut(starts):
            flags = bits.nonzero_units(total)
            room = word_multiple(len(flags))
            sets = bits.bit_sets(bits.pack(jnp.pad(flags, (0, room - len(flags))))[None])
            share, rest = sets.counts[0] // ranks, sets.counts[0] % ranks
            number = lax.iota(jnp.int32, ranks)
            # Run i starts after i shares; the first `rest` runs have one unit more.
            first = number * share + jnp.minimum(number, rest)
            found = bits.select(sets.search, first, length=1)[:, 0]
            found = jnp.where(first < sets.counts[0], found, len(flags)).at[0].set(0)
            return jnp.where(sets.counts[0] > 0, found, starts)

        now = tables.step % self.every == 0
        starts = lax.cond(now, cut, lambda starts: starts, tables.starts)
        return _Thresholds(tables.step + 1, starts)


class _Thresholds(NamedTuple):
    step: jax.Array
    starts: jax.Array  # int32 [ranks], the first unit of each range; the first is 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Cut(Layout):
    starts: jax.Array

    def assign(self, units):
        part = jnp.searchsorted(self.starts, units, side="right") - 1
        return part.astype(jnp.int32), units

    def invert(self, parts, slots):
        return jnp.broadcast_arrays(slots, parts)[0]

    def split(self, flags):
        words = bits.pack(jnp.pad(flags, (0, self.width - self.size)))
        ends = jnp.append(self.starts[1:], self.width)
        base = lax.iota(jnp.int32, len(words)) * bits.WORD
        below = bits.low_ones(self.starts[:, None] - base)
        return words & bits.low_ones(ends[:, None] - base) & ~below

    def join(self, dense):
        units = lax.iota(jnp.int32, self.size)
        return dense[self.assign(units)[0], units]
