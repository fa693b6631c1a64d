"""Lists the slots of sets that are packed bits, in the way of each platform.

On CPUs and TPUs each slot is searched for by its rank: `rank_select`.

On GPUs sets are not searched, which is a dozen kernels, each waiting for the one before.
Each unit that is present finds its own rank, from the bits up to its word and those below
it in the word, and writes itself there: one kernel over all units. Where these are many,
each word that has bits writes itself where the rank of its first one is, and each rank
finds its word among the 32 places up to its own: one kernel over the words, and two over
the ranks. TPUs write what a scatter is given one after another: there sets are searched.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import policy
from pallas_kernels.rank_select import (
    WORD,
    bit_of_rank,
    bits_to,
    rank_index,
    running_sum,
    select,
    taken_at,
)
from pallas_kernels.types import untyped


# Units that find their own ranks in less time than two kernels take to launch: each takes
# some 55 instructions, of which an H200 does 29 million million a second.
_FEW_UNITS = 1 << 22


def slots_of(
    words: jax.Array, first: jax.Array, length: int, counts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Lists the slots of ranks first, first + 1, ... of each part, ascending.

    Args:
        words: uint32 [parts, words], the bits.
        first: The rank of the first slot.
        length: How many ranks.
        counts: int32 [parts], how many bits each part has, where that is known: on CPUs it
            saves adding them up.

    Returns:
        The slots int32 [parts, length], anything beyond a part's count; all counts.
    """
    if policy().scatters:
        write = _slots_that_write if words.size * WORD <= _FEW_UNITS else _slots_by_words
        return write(words, first, length)
    return _slots_that_are_searched(words, first, length, counts)


@functools.partial(jax.jit, static_argnames="length")
def _slots_that_are_searched(words, first, length, counts):
    """`slots_of`, each found by the rank that it has."""
    parts, row = words.shape
    search = rank_index(words.reshape(-1), lanes=parts * length)
    if counts is not None:
        starts = running_sum(counts) - counts
    else:
        # Read off the index: to count again, and add up, takes six more kernels.
        if row and row % search.row == 0:
            ends = search.row_end.reshape(parts, -1)[:, -1]
        else:
            ends = bits_to(search, np.arange(1, parts + 1, dtype=np.int32) * row - 1)
        starts = jnp.pad(ends[:-1], (1, 0))
        counts = ends - starts
    flat = select(search, starts + first, length=length)
    return flat - np.arange(parts, dtype=np.int32)[:, None] * (row * WORD), counts


def _counted(words):
    """The words, the bits of each part up to the end of each, and the bits of each."""
    counts = lax.population_count(words).astype(jnp.int32)
    # The barrier keeps XLA from counting again for every bit or slot.
    words, ends = lax.optimization_barrier((words, running_sum(counts)))
    return words, ends, counts


@untyped
@functools.partial(jax.jit, static_argnames="length")
def _slots_that_write(words, first, length):
    """`slots_of`, each of which finds its rank and writes itself there."""
    parts, row = words.shape
    words, ends, _ = _counted(words)
    shape = (parts, row, WORD)
    part, word, bit = (lax.broadcasted_iota(jnp.int32, shape, i) for i in range(3))
    here = words[..., None] >> bit.astype(jnp.uint32)
    from_here = lax.population_count(here).astype(jnp.int32)
    rank = ends[..., None] - from_here - first
    is_there = (here & 1 != 0) & (rank >= 0) & (rank < length)
    slot = word * WORD + bit
    # Those that are left out are distinct, unless int32 ends.
    behind = jnp.minimum(part * (row * WORD) + slot, 2**31 - 1 - parts * length)
    place = jnp.where(is_there, part * length + rank, parts * length + behind)
    # Filled with a number of its own: of equal arrays XLA makes one, and copies of it.
    found = jnp.broadcast_to(ends[-1, -1], parts * length)
    found = found.at[place.reshape(-1)].set(
        slot.reshape(-1), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return found.reshape(parts, length), ends[:, -1]


@untyped
@functools.partial(jax.jit, static_argnames="length")
def _slots_by_words(words, first, length):
    """`slots_of`, of which each finds its word among those that begin just before it."""
    parts, row = words.shape
    words, ends, counts = _counted(words)
    part, word = (lax.broadcasted_iota(jnp.int32, words.shape, i) for i in range(2))
    begins = ends - counts - first
    # Of the words that begin before the first slot one may have it.
    is_there = (counts > 0) & (ends > first) & (begins < length)
    # Those that are left out are distinct, unless int32 ends.
    behind = jnp.minimum(part * row + word, 2**31 - 1 - parts * length)
    place = part * length + jnp.maximum(begins, 0)
    place = jnp.where(is_there, place, parts * length + behind)
    # Filled with a number of its own: of equal arrays XLA makes one, and copies of it.
    nothing = jnp.minimum(ends[-1, -1], 0)
    marks = jnp.broadcast_to(nothing, parts * length)
    marks = marks.at[place.reshape(-1)].set(
        word.reshape(-1), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    # Words are marked in ascending order, and have at most 32 slots.
    window, ahead = (1, WORD), ((0, 0), (WORD - 1, 0))
    marks = marks.reshape(parts, length)
    word = lax.reduce_window(marks, np.int32(0), lax.max, window, (1, 1), ahead)
    part = lax.broadcasted_iota(jnp.int32, word.shape, 0)
    at = part * row + word
    own, end = taken_at(words.reshape(-1), at), taken_at(ends.reshape(-1), at)
    rank = first + lax.broadcasted_iota(jnp.int32, word.shape, 1)
    rank = rank - (end - lax.population_count(own).astype(jnp.int32))
    return word * WORD + bit_of_rank(own, rank), ends[:, -1]
