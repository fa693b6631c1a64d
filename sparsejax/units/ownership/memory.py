"""Algorithm 1 of Zen: divides units among owners by hash memories, without any table.

A first hash gives the owner of a unit, and three others give one place each in that owner's
parallel memory. A unit that finds all three taken goes to a serial memory after it
(`pallas_kernels.partition`). The sizes are the paper's: for m units a parallel memory has
2 m / n places, and a serial one a tenth of that. So at most half of the parallel places are
taken, about one unit in 22 finds none of its three free, and the serial memory has room for
one in five.

Units are in a memory in the order of their hashes, which differs from backend to backend,
and on a GPU from run to run. Units without a place, because a set is larger or was chosen
to collide, are left over, and counted.
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
    """Part memories filled with the units of a set.

    Attributes:
        units: int32 [parts, room], the unit of each place; negative for an empty place.
        places: The places that have a unit, a set for each part.
        counts: int32 [parts], the units of each part, including those left over. If a list
            is longer than all memories, only its first units are counted.
        total: int32 [], the number of units of the set.
        left: Boolean [], whether any unit is left over.
    """

    units: jax.Array
    places: Slots
    counts: jax.Array
    total: jax.Array
    left: jax.Array


@dataclasses.dataclass(frozen=True)
class PartMemory:
    """The static sizes and seed of the memories of all parts.

    Attributes:
        size: The number of units.
        parts: The number of parts.
        seed: The seed of the hash that gives the part.
        slots: The number of places in the parallel memory of a part.
        serial: The number of places in its serial memory.
    """

    size: int
    parts: int
    seed: int
    slots: int
    serial: int

    @classmethod
    def of(cls, size: int, parts: int, seed: int, share: float) -> Self:
        """Makes memories with a capacity for a share of the units."""
        slots = max(1, math.ceil(_PARALLEL * share * size / parts))
        room = word_multiple(slots + max(1, math.ceil(_SERIAL * slots)))
        return cls(size, parts, seed, slots, room - slots)

    @property
    def room(self) -> int:
        """The number of places in the memories of a part, a multiple of 32."""
        return self.slots + self.serial

    @property
    def takes(self) -> int:
        """The units of a part that all find places, unless a set was chosen to collide.

        11% of them find no place in three tries, which fills the serial memory to 83%.
        """
        return int(0.75 * self.slots)

    def fill(self, x: Units, present: jax.Array) -> Filled:
        """Inserts the present units into the memories.

        `partition_dense` reads single numbers directly from the array. Rows, and entries of
        a sparsifier, are listed from their flags first.

        Args:
            x: The units.
            present: Booleans [units], which units are present.
        """
        seeds = draw_seeds(_HASHES + 1, abs(self.seed))
        seeds[0] = self.seed & 0xFFFFFFFF
        memory = HashMemory(self.parts, self.slots, self.serial)
        if isinstance(x, Dense) and x.flags is None and x.array.ndim == 1:
            found = partition_dense(x.array, jnp.asarray(seeds), memory)
            total = None
        else:
            # More units than all places would not fit.
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
