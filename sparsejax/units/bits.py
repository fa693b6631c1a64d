"""Sets of slots as packed bits, one set for each part.

A scheme stores the set that it sends as `Slots`, uint32 [parts, words]: a bit for each slot
of each part. To write a message, the slots of a part are listed in ascending order, for
consecutive ranks at a time, or all at once (`pallas_kernels.reference.slots`). They are
found by `pallas_kernels.rank_select.select`, in the prefix sums of popcounts that
`rank_index` computes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select
from pallas_kernels.operations.bitmap import bitmap_encode
from pallas_kernels.platforms import policy
from pallas_kernels.rank_select import (
    WORD as WORD,
    RankIndex as RankIndex,
    bit_of_rank as bit_of_rank,
    nonzero as nonzero,
    pack as pack,
    rank_index as rank_index,
    select as select,
    unpack as unpack,
)
from pallas_kernels.types import varying_axes


class Slots(NamedTuple):
    """Sets of slots, one for each part; see `Slots.of`.

    Attributes:
        words: uint32 [parts, words], bit s of a row for slot s.
        counts: int32 [parts], the number of slots in each set.
    """

    words: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, words: jax.Array) -> "Slots":
        """Makes the sets with these bits, uint32 [parts, words]."""
        return cls(words, members_of_each(words))

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the sets vary."""
        return varying_axes(self.words)


def bitmaps_of(slots: jax.Array, is_there: jax.Array, words: int) -> jax.Array:
    """Returns the bitmaps of lists of slots, uint32 [lists, words].

    They are sums of one bit for each slot: a slot that occurs twice in a list carries over,
    and then fewer bits are set than there are slots.

    Args:
        slots: int32 [lists, k].
        is_there: Booleans [lists, k], which of the slots are real.
        words: The number of words of a bitmap.
    """
    lists = len(slots)
    first = words * lax.broadcasted_iota(jnp.int32, (lists, 1), 0)
    word = jnp.where(is_there, first + (slots >> 5), lists * words)
    one = jnp.uint32(1) << (slots & (WORD - 1)).astype(jnp.uint32)
    found = jnp.zeros(lists * words, jnp.uint32).at[word.reshape(-1)]
    found = found.add(one.reshape(-1), mode="drop", wrap_negative_indices=False)
    return found.reshape(lists, words)


def of_units(x: jax.Array) -> jax.Array:
    """Packs flags of the non-zero units of x [units, ...], for a multiple of 32 units."""
    return bitmap_encode(x) if x.ndim == 1 else pack(nonzero_units(x))


def pack_all(flags: jax.Array) -> jax.Array:
    """Packs booleans [n], for any n, with at least one zero bit after the last."""
    return pack(jnp.pad(flags, (0, WORD - flags.size % WORD)))


def members(words: jax.Array) -> jax.Array:
    """Returns the number of bits set in all words: int32."""
    return members_of_each(words.reshape(-1))


def members_of_each(words: jax.Array) -> jax.Array:
    """Returns the number of bits set in each row of words [..., k]: int32 [...]."""
    return rank_select.total(lax.population_count(words).astype(jnp.int32))


def count(flags: jax.Array) -> jax.Array:
    """Counts the booleans that are set: int32.

    On CPUs eight booleans are added up in a byte first. XLA:CPU vectorizes that and uses
    all cores; adding them up directly is seven times slower. On GPUs it would be one more
    kernel.
    """
    lanes = policy().lanes
    if lanes == 1:
        return jnp.sum(flags, dtype=jnp.int32)
    flags = flags.reshape(-1).astype(jnp.uint8)
    flags = jnp.pad(flags, (0, -flags.size % lanes))
    joined = jnp.sum(flags.reshape(-1, lanes), axis=1, dtype=jnp.uint8)
    return rank_select.total(joined.astype(jnp.int32))


def density(x: jax.Array) -> jax.Array:
    """Returns the share of the units of x [units, ...] that are non-zero: float32."""
    return count(nonzero_units(x)).astype(jnp.float32) / x.shape[0]


def unique_places(places: jax.Array, real: jax.Array, size: int) -> jax.Array:
    """Replaces the places that are not real by distinct places past the end.

    A scatter into `size` places with mode="drop" may then declare its indices unique.

    Args:
        places: int32 [..., k]; those of a row that are real are unique.
        real: Booleans of that shape.
        size: The number of places.
    """
    outside = lax.iota(jnp.int32, places.shape[-1])
    if size + outside.size > 2**31 - 1:
        # Clipped to int32, where the last ones are equal.
        outside = jnp.minimum(outside, 2**31 - 1 - size)
    return jnp.where(real, places, size + outside)


def listed(index: RankIndex, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the places of the first set bits, int32 [length], and which are real.

    Args:
        index: The index of the bits. Made for at least `length` lanes, it is searched
            fastest.
        length: The number of places; those after the last set bit are unspecified.
    """
    places = select(index, jnp.zeros(1, jnp.int32), length=length)[0]
    return places, lax.iota(jnp.int32, length) < index.row_end[-1]


def words_of(rows: jax.Array) -> jax.Array:
    """Converts rows [..., numbers] of any dtype to uint32 [..., words], zero-padded."""
    *shape, numbers = rows.shape
    each = max(4 // rows.dtype.itemsize, 1)
    if each > 1:
        edges = [(0, 0)] * len(shape) + [(0, -numbers % each)]
        rows = jnp.pad(rows, edges).reshape(*shape, -(-numbers // each), each)
    words = lax.bitcast_convert_type(rows, jnp.uint32)
    return words.reshape(*shape, -(-numbers * rows.dtype.itemsize // 4))


def rows_of(words: jax.Array, dtype: jnp.dtype, numbers: int) -> jax.Array:
    """Converts words to rows [..., numbers] of a dtype; inverts `words_of`."""
    *shape, count = words.shape
    if dtype.itemsize > 4:
        words = words.reshape(*shape, numbers, dtype.itemsize // 4)
    rows = lax.bitcast_convert_type(words, dtype)
    return rows.reshape(*shape, count * 4 // dtype.itemsize)[..., :numbers]


def low_ones(count: jax.Array) -> jax.Array:
    """Returns words whose lowest `count` bits are set, with counts clipped to [0, 32]."""
    inside = jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)
    ones = (jnp.uint32(1) << inside) - 1
    return jnp.where(count >= WORD, jnp.uint32(0xFFFFFFFF), ones)


def nonzero_units(x: jax.Array) -> jax.Array:
    """Flags the non-zero units of x [units, ...]: booleans [units].

    A unit is non-zero if any of its numbers is. Their sum does not matter: a row like
    [1, -1] is non-zero.
    """
    if x.ndim == 1:
        return nonzero(x)
    # The bits of a unit's numbers are or-ed in eight lanes before they are compared with
    # zero, which is four times as fast on CPUs as a flag for each number. On GPUs the
    # second step would be a second kernel.
    flat = rank_select.unsigned(x).reshape(x.shape[0], -1)
    lanes = math.gcd(flat.shape[1], policy().lanes)
    joined = lax.reduce(
        flat.reshape(x.shape[0], -1, lanes), flat.dtype.type(0), lax.bitwise_or, (1,)
    )
    return jnp.any((joined << 1) != 0, axis=1)
