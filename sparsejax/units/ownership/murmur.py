"""Zen's own hash: MurmurHash of every unit, with tables of the units by owner.

The tables are the paper's I_i, and take as much memory as the gradient. A set is split by
them, or by the paper's Algorithm 1, which reads only the set: see `memory`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.hashing import mix32
from pallas_kernels.striping import word_multiple
from sparsejax import arguments, errors
from sparsejax.units import bits
from sparsejax.units.ownership.base import Layout, Ownership
from sparsejax.units.ownership.memory import PartMemory


_SHARE = "It is the share of the units that Algorithm 1 has room for."


@dataclasses.dataclass(frozen=True)
class MurmurHash(Ownership):
    """The paper's ownership: MurmurHash of every unit, and tables of each part's units.

    Attributes:
        seed: The seed of the hash, the same on all ranks.
        memory: The share of the units that Algorithm 1 has room for. If it is given, sets
            are split by that algorithm, and fuller sets are summed densely. If None, sets
            are split by the tables. The memories take 8.8 bytes for each unit that they
            have room for. The slot of every unit is also kept, which takes as much memory
            as the tables again.
    """

    needs_tables = True
    seed: int = 0
    memory: float | None = None

    def __post_init__(self):
        arguments.check_whole("seed", self.seed)
        if self.memory is not None:
            arguments.check_between("memory", self.memory, 0, 1, _SHARE)

    def over(self, size, ranks, tables=None):
        width = _murmur_width(size, ranks, self.seed)
        if tables is None:
            tables = self.tables(size, ranks)
        units: Any = tables
        slots: Any = None
        if isinstance(tables, tuple) and len(tables) == 2:
            units, slots = tables
        fits = getattr(units, "shape", None) == (ranks, width)
        needs = f"an array {[ranks, width]} of the units by rank"
        if self.memory is not None:
            needs += f", and one {[size]} of their slots"
            fits = fits and getattr(slots, "shape", None) == (size,)
        if not fits:
            raise errors.wrong_state("MurmurHash", needs, tables)
        return _Tables(size, ranks, width, self.seed, self.memory, units, slots)

    def width(self, size, ranks):
        return _murmur_width(size, ranks, self.seed)

    def tables(self, size, ranks):
        """Returns int32 [ranks, width], the units of each part, padded with `size`.

        The units of a part ascend. With `memory` it also returns int32 [size], the slot of
        each unit.
        """
        width = _murmur_width(size, ranks, self.seed)
        units = lax.iota(jnp.int32, size)
        part = _murmur_part(units.astype(jnp.uint32), ranks, self.seed)
        part, units = lax.sort((part.astype(jnp.int32), units), num_keys=1)
        start = jnp.searchsorted(part, lax.iota(jnp.int32, ranks)).astype(jnp.int32)
        table = jnp.full((ranks, width), size, jnp.int32)
        slots = lax.iota(jnp.int32, size) - start[part]
        table = table.at[part, slots].set(units)
        if self.memory is None:
            return table
        return table, jnp.zeros(size, jnp.int32).at[units].set(slots)


def _murmur_part(units, ranks, seed):
    return mix32(units, seed) % np.uint32(ranks)


@functools.lru_cache
def _murmur_width(size: int, ranks: int, seed: int) -> int:
    with np.errstate(over="ignore"):
        part = _murmur_part(np.arange(size, dtype=np.uint32), ranks, seed)
    return word_multiple(int(np.bincount(part, minlength=1).max(initial=1)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables(Layout):
    seed: int
    share: float | None
    units: jax.Array
    slots: jax.Array | None

    @property
    def memory(self):
        if self.share is None:
            return None
        return PartMemory.of(self.size, self.ranks, self.seed, self.share)

    def assign(self, units):
        part = _murmur_part(units.astype(jnp.uint32), self.ranks, self.seed)
        part = part.astype(jnp.int32)
        if self.slots is not None:
            return part, self.slots[units]
        slots = lax.broadcasted_iota(jnp.int32, self.units.shape, 1)
        slot_of = jnp.zeros(self.size, jnp.int32).at[self.units].set(slots, mode="drop")
        return part, slot_of[units]

    def invert(self, parts, slots):
        return self.units[parts, slots]

    def split(self, flags):
        return bits.pack(jnp.pad(flags, (0, 1))[self.units])

    def join(self, dense):
        shape = (self.size, *dense.shape[2:])
        flat = dense.reshape(-1, *dense.shape[2:])
        return (
            jnp.zeros(shape, dense.dtype).at[self.units.reshape(-1)].set(flat, mode="drop")
        )
