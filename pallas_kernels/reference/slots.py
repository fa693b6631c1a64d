"""Lists the slots of sets that are packed bits, by an algorithm for each platform.

On CPUs and TPUs each slot is searched for by its rank: `rank_select`. (TPUs perform the
updates of a scatter one after another.)

On GPUs a search would take a dozen kernels, each waiting for the previous one. Instead each
unit that is present computes its own rank, from the bits before its word and those below it
in the word, and is written to that place of the list: one kernel over all units. If there
are many units, each word that has bits is written to the place of its first bit's rank, and
each rank finds its word among the 32 places up to its own: one kernel over the words, and
two over the ranks.
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


# The number of units that compute their own ranks in the time of two launches: each takes
# about 55 instructions, and an H200 executes 2.9e13 of these a second.
_FEW_UNITS = 1 << 22


def slots_of(
    words: jax.Array, first: jax.Array, length: int, counts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Lists the slots of ranks first, first + 1, ... of each part, ascending.

    Args:
        words: uint32 [parts, words], the bits.
        first: int32 [], the rank of the first slot.
        length: The number of ranks.
        counts: int32 [parts], the number of bits of each part, if known; on CPUs that saves
            a sum.

    Returns:
        The slots, int32 [parts, length], unspecified beyond a part's count; and the counts,
        int32 [parts].
    """
    if policy().scatters:
        write = _slots_that_write if words.size * WORD <= _FEW_UNITS else _slots_by_words
        return write(words, first, length)
    return _slots_that_are_searched(words, first, length, counts)


@functools.partial(jax.jit, static_argnames="length")
def _slots_that_are_searched(words, first, length, counts):
    """Does as `slots_of`, by a search for each rank."""
    parts, row = words.shape
    search = rank_index(words.reshape(-1), lanes=parts * length)
    if counts is not None:
        starts = running_sum(counts) - counts
    else:
        # The counts are read from the index: counting again would take six more kernels.
        if row and row % search.row == 0:
            ends = search.row_end.reshape(parts, -1)[:, -1]
        else:
            ends = bits_to(search, np.arange(1, parts + 1, dtype=np.int32) * row - 1)
        starts = jnp.pad(ends[:-1], (1, 0))
        counts = ends - starts
    flat = select(search, starts + first, length=length)
    return flat - np.arange(parts, dtype=np.int32)[:, None] * (row * WORD), counts


def _counted(words):
    """Returns the words, the prefix sums of their popcounts in each part, and popcounts."""
    counts = lax.population_count(words).astype(jnp.int32)
    # Without the barrier XLA would recompute the counts for every bit or slot.
    words, ends = lax.optimization_barrier((words, running_sum(counts)))
    return words, ends, counts


@untyped
@functools.partial(jax.jit, static_argnames="length")
def _slots_that_write(words, first, length):
    """Does as `slots_of`, by a scatter of each slot to the place of its rank."""
    parts, row = words.shape
    words, ends, _ = _counted(words)
    shape = (parts, row, WORD)
    part, word, bit = (lax.broadcasted_iota(jnp.int32, shape, i) for i in range(3))
    here = words[..., None] >> bit.astype(jnp.uint32)
    from_here = lax.population_count(here).astype(jnp.int32)
    rank = ends[..., None] - from_here - first
    is_there = (here & 1 != 0) & (rank >= 0) & (rank < length)
    slot = word * WORD + bit
    # The places of slots that are left out are distinct, unless they exceed int32.
    outside = jnp.minimum(part * (row * WORD) + slot, 2**31 - 1 - parts * length)
    place = jnp.where(is_there, part * length + rank, parts * length + outside)
    # Filled with a number that no other array has: XLA would share equal arrays, by copies.
    found = jnp.broadcast_to(ends[-1, -1], parts * length)
    found = found.at[place.reshape(-1)].set(
        slot.reshape(-1), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return found.reshape(parts, length), ends[:, -1]


@untyped
@functools.partial(jax.jit, static_argnames="length")
def _slots_by_words(words, first, length):
    """Does as `slots_of`, by a scatter of words, among which each rank finds its own."""
    parts, row = words.shape
    words, ends, counts = _counted(words)
    part, word = (lax.broadcasted_iota(jnp.int32, words.shape, i) for i in range(2))
    begins = ends - counts - first
    # At most one word that begins before the first slot contains it.
    is_there = (counts > 0) & (ends > first) & (begins < length)
    # The places of words that are left out are distinct, unless they exceed int32.
    outside = jnp.minimum(part * row + word, 2**31 - 1 - parts * length)
    place = part * length + jnp.maximum(begins, 0)
    place = jnp.where(is_there, place, parts * length + outside)
    # Not a constant zero: XLA would share equal arrays, by copies.
    nothing = jnp.minimum(ends[-1, -1], 0)
    marks = jnp.broadcast_to(nothing, parts * length)
    marks = marks.at[place.reshape(-1)].set(
        word.reshape(-1), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    # Marks ascend, and a word has at most 32 slots, so a maximum over 32 places finds it.
    window, ahead = (1, WORD), ((0, 0), (WORD - 1, 0))
    marks = marks.reshape(parts, length)
    word = lax.reduce_window(marks, np.int32(0), lax.max, window, (1, 1), ahead)
    part = lax.broadcasted_iota(jnp.int32, word.shape, 0)
    at = part * row + word
    own, end = taken_at(words.reshape(-1), at), taken_at(ends.reshape(-1), at)
    rank = first + lax.broadcasted_iota(jnp.int32, word.shape, 1)
    rank = rank - (end - lax.population_count(own).astype(jnp.int32))
    return word * WORD + bit_of_rank(own, rank), ends[:, -1]
