"""Algorithm 1 of Zen: units find their owners in a hash memory, and no table is read.

A first hash gives the owner of a unit, three others a place each in that owner's parallel
memory, and after it is a serial one for those that find all three taken
(`pallas_kernels.partition`). The sizes are the paper's: for m units a parallel memory has
2 m / n places, and a serial one a tenth of that. So half of the places are taken at most,
about one unit in 22 finds none, and there is room for one in five.

Units lie in a memory in the order of their hashes, which differs from backend to backend,
and on a GPU from run to run. What found no place, because a set is larger or was made to
collide, is left over, and counted.
"""

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_kernels.hashing import draw_seeds
from pallas_kernels.operations.partition import partition
from pallas_kernels.operations.partition_dense import partition_dense
from pallas_kernels.reference.partitions import HashMemory
from pallas_kernels.striping import word_multiple
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.dense import Dense
from sparsejax.units.units import Units


_HASHES = 3
_PARALLEL, _SERIAL = 2.0, 0.1  # r1 by the units of a part, and r2 by r1


class Filled(NamedTuple):
    """Memories with the units of a set.

    Attributes:
        units: int32 [parts, room], the unit of each place; negative where there is none.
        places: Which places have a unit, a set for each part.
        counts: int32 [parts]: the units of each part, with those that are left over; of a
            list that is too long for any memory, of what was looked at.
        total: How many units the set has.
        left: Whether any is left over.
    """

    units: jax.Array
    places: Slots
    counts: jax.Array
    total: jax.Array
    left: jax.Array


@dataclasses.dataclass(frozen=True)
class PartMemory:
    """The memories of all parts: what is fixed when traced.

    Attributes:
        size: How many units there are.
        parts: How many parts.
        seed: Of the hash that gives the part.
        slots: Places in the parallel memory of a part.
        serial: Places in its serial memory.
    """

    size: int
    parts: int
    seed: int
    slots: int
    serial: int

    @classmethod
    def of(cls, size: int, parts: int, seed: int, share: float) -> Self:
        """Memories with room for a share of the units."""
        slots = max(1, math.ceil(_PARALLEL * share * size / parts))
        room = word_multiple(slots + max(1, math.ceil(_SERIAL * slots)))
        return cls(size, parts, seed, slots, room - slots)

    @property
    def room(self) -> int:
        """Places in the memories of a part, a multiple of 32."""
        return self.slots + self.serial

    @property
    def takes(self) -> int:
        """Units of a part that all find places, in sets that are not made to collide.

        Of these 11% find none in three tries, which fills the serial memory to 83%.
        """
        return int(0.75 * self.slots)

    def fill(self, x: Units, present: jax.Array) -> Filled:
        """Lets the units that are there find places.

        Single numbers are read where they are, as `partition_dense` does; rows, and entries
        of a sparsifier, by the bits that say which are there.

        Args:
            x: The units.
            present: Booleans [units], which are there.
        """
        seeds = draw_seeds(_HASHES + 1, abs(self.seed))
        seeds[0] = self.seed & 0xFFFFFFFF
        memory = HashMemory(self.parts, self.slots, self.serial)
        if isinstance(x, Dense) and x.flags is None and x.array.ndim == 1:
            found = partition_dense(x.array, jnp.asarray(seeds), memory)
            total = None
        else:
            # A longer list would not fit.
            length = min(self.size, self.parts * self.room)
            index = bits.rank_index(bits.pack_all(present), lanes=length)
            units, real = bits.listed(index, length)
            total = bits.count(present)
            listed = jnp.where(real, units, -1)
            found = partition(listed, length, jnp.asarray(seeds), memory)
        there = found.memory >= 0
        places = Slots.of(bits.pack(there))
        counts = places.counts + jnp.maximum(found.counts - self.serial, 0)
        total = jnp.sum(counts, dtype=jnp.int32) if total is None else total
        left = total > jnp.sum(places.counts)
        return Filled(found.memory, places, counts, total, left)
