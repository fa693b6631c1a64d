"""Divides indices among parts, in plain XLA: Zen's Algorithm 1, and DRAGONN's slots.

Algorithm 1 is bulk-synchronous here: all indices whose slot is free are written there, then
all are read back, and an index that does not find itself tries the next hash.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from pallas_kernels.rank_select import nonzero, pack, rank_index, running_sum, select
from pallas_kernels.reference.bitmap import EMPTY, padded


_TILE = 1 << 16
_FEW = 1 << 14  # the tile where few indices are expected


@dataclasses.dataclass(frozen=True)
class HashMemory:
    """The sizes of the memory into which `partition` hashes indices: Algorithm 1 of Zen.

    Attributes:
        parts: The number of parts.
        slots: The number of slots in the parallel memory of a part, r1 in the paper, which
            advises twice as many as a part has indices.
        serial: The number of slots in the serial memory of a part, r2 in the paper: a tenth
            of r1.
        hashes: The number of slots that an index tries, k in the paper. If None, one for
            each seed except the first.

    Example:
        >>> pallas_kernels.HashMemory(parts=4, slots=20, serial=2).room
        22

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025
    """

    parts: int
    slots: int
    serial: int
    hashes: int | None = None

    @property
    def room(self) -> int:
        """The number of slots of a part, in both memories."""
        return self.slots + self.serial


class Partitioned(NamedTuple):
    """Indices by part.

    Attributes:
        memory: int32 [parts, room], the indices of each part; -1 for an empty slot.
        counts: int32 [parts], the number of indices for the serial memory. Those that
            exceed its size found no slot.
        left: The indices that found no slot: for `partition` booleans by position in the
            input, for `partition_dense` packed bits by element, 32 to a word.

    Example:
        >>> room = pallas_kernels.HashMemory(parts=2, slots=16, serial=8)
        >>> memory, counts, left = pallas_kernels.partition_dense(
        ...     jnp.ones(8), pallas_kernels.draw_seeds(3), room)
        >>> int((memory >= 0).sum()), bool(left.any())
        (8, False)
    """

    memory: jax.Array
    counts: jax.Array
    left: jax.Array


def partition(indices, count, seeds, *, memory):
    """Divides indices by Algorithm 1: a hash for the part, and others for a slot.

    All indices try their first slot at once. The few that wait after that try the others
    tile by tile, and then go to the serial memories.
    """
    parts, slots, hashes = memory.parts, memory.slots, memory.hashes
    waiting = (lax.iota(jnp.int32, indices.size) < count) & (indices >= 0)
    parallel = jnp.full(parts * slots, EMPTY, jnp.int32)
    part = hashing.place(indices, seeds[0], parts)
    first = seeds[1 : min(hashes, 1) + 1]
    parallel, waiting = _try(parallel, indices, part, waiting, first, slots)

    def again(found, used, state):
        parallel, serials = state
        keys = indices[found]
        part = hashing.place(keys, seeds[0], parts)
        others = seeds[2 : hashes + 1]
        parallel, still = _try(parallel, keys, part, used, others, slots)
        return parallel, _to_serial(serials, found, keys, part, used, still)

    start = parallel, _Serial.empty(parts, memory.serial, waiting)
    parallel, serials = _by_tiles(waiting, again, start, _FEW)
    return serials.after(parallel.reshape(parts, slots))


def _try(parallel, indices, part, waiting, seeds, slots):
    """Tries a slot for each seed; returns the parallel memory, and which still wait."""
    for k in range(len(seeds)):
        slot = part * slots + hashing.place(indices, seeds[k], slots)
        free = waiting & (parallel[slot] == EMPTY)
        to = jnp.where(free, slot, parallel.size)
        parallel = parallel.at[to].set(indices, mode="drop")
        waiting = waiting & (parallel[slot] != indices)
    return parallel, waiting


class _Serial(NamedTuple):
    """The serial memories, int32 [parts, room]; the indices for each; and those left."""

    memory: jax.Array
    counts: jax.Array
    left: jax.Array

    @classmethod
    def empty(cls, parts, room, waiting):
        memory = jnp.full((parts, room), EMPTY, jnp.int32)
        return cls(memory, jnp.zeros(parts, jnp.int32), waiting)

    def after(self, parallel):
        memory = jnp.concatenate([parallel, self.memory], axis=1)
        return Partitioned(memory, self.counts, self.left)


def _to_serial(serials, found, keys, part, used, still):
    """Appends the indices of a tile that still wait to the serial memories.

    Args:
        serials: The serial memories.
        found: int32 [tile], the positions of the indices in the input.
        keys: int32 [tile], the indices.
        part: int32 [tile], their parts.
        used: Booleans [tile], which places of the tile are used.
        still: Booleans [tile], which indices still wait.
    """
    memory, counts, left = serials
    parts, room = memory.shape
    of_part = still & (part == lax.iota(jnp.int32, parts)[:, None])
    before = counts[:, None] + running_sum(of_part.astype(jnp.int32)) - 1
    ticket = jnp.sum(jnp.where(of_part, before, 0), axis=0)
    fits = still & (ticket < room)
    memory = memory.at[jnp.where(fits, part, parts), ticket].set(keys, mode="drop")
    done = jnp.where(used & (~still | fits), found, left.size)
    left = left.at[done].set(False, mode="drop")
    return _Serial(memory, counts + jnp.sum(of_part, axis=1, dtype=jnp.int32), left)


def with_serial(parallel, indices, waiting, seed, serial):
    """Adds the serial memories, with the indices that still wait, in input order.

    Args:
        parallel: int32 [parts, slots], the parallel memories.
        indices: int32 [n].
        waiting: Booleans [n], which indices still wait.
        seed: The seed of the hash that gives the part.
        serial: The number of slots in the serial memory of a part.
    """
    parts = len(parallel)

    def store(found, used, serials):
        keys = indices[found]
        part = hashing.place(keys, seed, parts)
        return _to_serial(serials, found, keys, part, used, used)

    start = _Serial.empty(parts, serial, waiting)
    return _by_tiles(waiting, store, start, _FEW).after(parallel)


def partition_dense(x, seeds, *, memory):
    """Divides the non-zero elements by Algorithm 1, tile by tile.

    First all of them try the slots; then those without a slot go to the serial memories.
    """
    parts, slots = memory.parts, memory.slots

    def into_slots(found, used, state):
        parallel, lost = state
        part = hashing.place(found, seeds[0], parts)
        every = seeds[1 : memory.hashes + 1]
        parallel, still = _try(parallel, found, part, used, every, slots)
        return parallel, lost.at[jnp.where(still, found, x.size)].set(True, mode="drop")

    start = jnp.full(parts * slots, EMPTY, jnp.int32), jnp.zeros(x.size, bool)
    parallel, lost = _by_tiles(nonzero(x), into_slots, start)
    everyone = lax.iota(jnp.int32, x.size)
    parallel = parallel.reshape(parts, slots)
    done = with_serial(parallel, everyone, lost, seeds[0], memory.serial)
    return done._replace(left=pack(padded(done.left)))


def threshold_hash(x, threshold, seed, slots):
    """Writes the index of each element of at least a magnitude to the slot of its hash.

    This is DRAGONN's selection. Of several elements that hash to one slot one remains.
    """

    def write(found, used, memory):
        to = jnp.where(used, hashing.place(found, seed, slots), slots)
        return memory.at[to].set(found, mode="drop")

    memory = jnp.full(slots, EMPTY, jnp.int32)
    return _by_tiles(jnp.abs(x) >= threshold, write, memory)


def _by_tiles(flags, step, carry, tile=_TILE):
    """Applies a step to the places of set flags, tile by tile.

    The cost grows with the number of set flags.

    Args:
        flags: Booleans [n].
        step: A function of places, int32 [tile], of booleans [tile], which of them are
            real, and of the carry, which returns the next carry.
        carry: The first carry.
        tile: The number of places of a tile.
    """
    tile = min(tile, max(flags.size, 1))
    index = rank_index(pack(padded(flags)), lanes=tile)
    count = index.row_end[-1]

    def one_tile(state):
        first, carry = state
        found = select(index, first[None], length=tile)[0]
        return first + tile, step(found, first + lax.iota(jnp.int32, tile) < count, carry)

    # Inside shard_map the carry must vary over the axes over which the flags vary.
    carry = jax.tree.map(lambda y: jnp.where(count < 0, jnp.zeros_like(y), y), carry)
    first = jnp.where(count < 0, count, 0)
    return lax.while_loop(lambda state: state[0] < count, one_tile, (first, carry))[1]
