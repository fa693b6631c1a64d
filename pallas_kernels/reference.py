"""What each operation computes, in plain XLA: the definition, and the default everywhere.

Packed bits that are searched by rank (`rank_select`) stand for prefix sums and sorting
throughout. Algorithm 1 of Zen is bulk-synchronous: all indices whose slot is free write
there, then all read back, and whoever does not find itself tries the next hash.

Arguments are checked by the operations of the package, which call these.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing, striping
from pallas_kernels.rank_select import (
    WORD,
    bit_sets,
    nonzero,
    pack,
    rank_index,
    rank_of,
    select,
    slots as slots_of,
)


EMPTY = -1


class Partitioned(NamedTuple):
    """Indices by part.

    Attributes:
        memory: int32 [parts, room], -1 where there is no index.
        counts: int32 [parts], how many indices wanted to be where room is not certain:
            the serial memory of `partition`, the whole part of `partition_by_bits`. Above
            the room there, the difference found none.
        left: Booleans, which of the input found no room: for `partition` by place among
            the indices, for `partition_by_bits` by element.
    """

    memory: jax.Array
    counts: jax.Array
    left: jax.Array


def chosen(x, threshold):
    """Which elements count: non-zero ones, or those of at least a magnitude."""
    return nonzero(x) if threshold is None else jnp.abs(x) >= threshold


def compact(x, capacity, threshold=None):
    """The chosen elements, ascending, `x.size` behind the last, and how many there are."""
    flags = chosen(x, threshold)
    return _positions(pack(_padded(flags)), capacity, x.size)


def bitmap_encode(x, units=None):
    """Which elements are non-zero, of all or of those listed, 32 to a word."""
    return pack(_padded(nonzero(x if units is None else x.at[units].get(mode="clip"))))


def bitmap_decode(words, capacity, units=None):
    """Where the set bits are, or which units they stand for, ascending; and how many."""
    fill = words.size * WORD if units is None else units.size
    found, count = _positions(words, capacity, fill)
    if units is not None:
        found = units.at[found].get(mode="fill", fill_value=EMPTY)
    return found, count


def partition(indices, count, seeds, *, parts, hashes, slots, serial):
    """Algorithm 1: a hash for the part, `hashes` for a slot, else the serial memory."""
    waiting = lax.iota(jnp.int32, indices.size) < count
    part = hashing.place(indices, seeds[0], parts)
    parallel = jnp.full(parts * slots, EMPTY, jnp.int32)
    for k in range(hashes):
        slot = part * slots + hashing.place(indices, seeds[1 + k], slots)
        free = waiting & (parallel[slot] == EMPTY)
        to = jnp.where(free, slot, parallel.size)
        parallel = parallel.at[to].set(indices, mode="drop")
        waiting = waiting & (parallel[slot] != indices)
    return with_serial(parallel.reshape(parts, slots), indices, part, waiting, serial)


def with_serial(parallel, indices, part, waiting, serial):
    """Adds the serial memories: what still waits, by part, in the order of the input."""
    parts = parallel.shape[0]
    of_part = waiting & (part == lax.iota(jnp.int32, parts)[:, None])
    sets = bit_sets(pack(_padded(of_part)))
    counts = sets.counts
    used = lax.iota(jnp.int32, serial) < counts[:, None]
    at = jnp.where(used, slots_of(sets, jnp.int32(0), serial), indices.size)
    stored = indices.at[at].get(mode="fill", fill_value=EMPTY)
    left = waiting.at[at.reshape(-1)].set(False, mode="drop")
    return Partitioned(jnp.concatenate([parallel, stored], axis=1), counts, left)


def partition_by_bits(x, *, parts, capacity, seed=0, threshold=None):
    """Each part's chosen elements by the striped hash, ascending by slot."""
    flags = chosen(x, threshold)
    sets = bit_sets(striping.split(flags, parts, seed))
    slot = slots_of(sets, jnp.int32(0), capacity)
    part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    units = striping.invert(part, slot, x.size, parts, seed)
    used = lax.iota(jnp.int32, capacity) < sets.counts[:, None]
    left = flags.at[jnp.where(used, units, x.size).reshape(-1)].set(False, mode="drop")
    return Partitioned(jnp.where(used, units, EMPTY), sets.counts, left)


def threshold_hash(x, threshold, seed, slots):
    """DRAGONN: every element of at least a magnitude writes its index where it hashes to.

    Of several that hash to one slot one stays. Tiles of survivors, one after another, so
    that the cost follows their number.
    """
    index = rank_index(pack(_padded(chosen(x, threshold))))
    count = index.row_end[-1]
    tile = min(1 << 16, max(x.size, 1))

    def write(state):
        first, memory = state
        found = select(index, first[None], tile)[0]
        used = first + lax.iota(jnp.int32, tile) < count
        to = jnp.where(used, hashing.place(found, seed, slots), slots)
        return first + tile, memory.at[to].set(found, mode="drop")

    start = (jnp.int32(0), jnp.full(slots, EMPTY, jnp.int32))
    return lax.while_loop(lambda state: state[0] < count, write, start)[1]


def coo_add(indices, values, first, size):
    """The sum [size, ...] of the entries of `size` units from `first` on."""
    at = indices - first
    at = jnp.where((indices >= first) & (at < size), at, size)
    return (
        jnp.zeros((size, *values.shape[1:]), values.dtype).at[at].add(values, mode="drop")
    )


def merge_rows(ids, values, rows):
    """Entries of the same id as one: ids ascending, their sums, and how many there are.

    Behind the last the id is `rows` and the sum zero. Ids outside [0, rows) are left out.
    """
    inside = (ids >= 0) & (ids < rows)
    flags = jnp.zeros(rows, bool).at[jnp.where(inside, ids, rows)].set(True, mode="drop")
    index = rank_index(pack(_padded(flags)))
    to = jnp.where(inside, rank_of(index, jnp.where(inside, ids, 0)), ids.size)
    sums = jnp.zeros_like(values).at[to].add(values, mode="drop")
    merged, count = _found(index, ids.size, rows)
    return merged, sums, count


def _padded(flags):
    """Up to whole words, and at least one, on the last axis."""
    length = flags.shape[-1]
    missing = max(-length % WORD, WORD - length)
    return jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])


def _positions(words, capacity, fill):
    return _found(rank_index(words), capacity, fill)


def _found(index, capacity, fill):
    found = select(index, jnp.zeros(1, jnp.int32), capacity)[0]
    count = index.row_end[-1]
    return jnp.where(lax.iota(jnp.int32, capacity) < count, found, fill), count
