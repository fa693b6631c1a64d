"""Sets of units as packed bits, one set a part.

A scheme holds what it has to send as `Slots`, uint32 [parts, words]: a bit for each slot of
each part. A message asks for the slots of a part in ascending order, a run of ranks at a
time, or all at once (`pallas_kernels.reference.slots`). They are found by the counts of
`rank_index`; the search is `pallas_kernels.rank_select.select`.
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
    """Sets of slots, one a part; see `Slots.of`.

    Attributes:
        words: uint32 [parts, words], bit s of a row for slot s.
        counts: int32 [parts]: how many slots each part has.
    """

    words: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, words: jax.Array) -> "Slots":
        """The sets with these bits: uint32 [parts, words]."""
        return cls(words, members_of_each(words))

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the sets vary."""
        return varying_axes(self.words)


def of_units(x: jax.Array) -> jax.Array:
    """Packs the flags of non-zero units of x [units, ...]; a multiple of 32 units."""
    return bitmap_encode(x) if x.ndim == 1 else pack(nonzero_units(x))


def pack_all(flags: jax.Array) -> jax.Array:
    """Booleans of any number, packed, with at least one zero after the last."""
    return pack(jnp.pad(flags, (0, WORD - flags.size % WORD)))


def members(words: jax.Array) -> jax.Array:
    """How many bits are set in all of these words: int32."""
    return members_of_each(words.reshape(-1))


def members_of_each(words: jax.Array) -> jax.Array:
    """How many bits are set in each row of words [..., k]: int32 [...]."""
    return rank_select.total(lax.population_count(words).astype(jnp.int32))


def count(flags: jax.Array) -> jax.Array:
    """How many of these booleans are set: int32.

    Eight are added up in a byte first: XLA:CPU does that a vector at a time, and on all
    cores, and is seven times slower where it adds them up as they come. On GPUs it would be
    a kernel more.
    """
    lanes = policy().lanes
    if lanes == 1:
        return jnp.sum(flags, dtype=jnp.int32)
    flags = flags.reshape(-1).astype(jnp.uint8)
    flags = jnp.pad(flags, (0, -flags.size % lanes))
    joined = jnp.sum(flags.reshape(-1, lanes), axis=1, dtype=jnp.uint8)
    return rank_select.total(joined.astype(jnp.int32))


def density(x: jax.Array) -> jax.Array:
    """The share of the units of x [units, ...] that are non-zero: float32."""
    return count(nonzero_units(x)).astype(jnp.float32) / x.shape[0]


def apart(places: jax.Array, real: jax.Array, size: int) -> jax.Array:
    """The places where they are real; elsewhere ones past the end, all distinct.

    A scatter into `size` places with mode="drop" may then declare its indices unique.

    Args:
        places: int32 [..., k], the real ones of a row unique.
        real: Booleans of that shape.
        size: How many places there are.
    """
    behind = lax.iota(jnp.int32, places.shape[-1])
    if size + behind.size > 2**31 - 1:
        # Where int32 ends, so do they.
        behind = jnp.minimum(behind, 2**31 - 1 - size)
    return jnp.where(real, places, size + behind)


def listed(index: RankIndex, length: int) -> tuple[jax.Array, jax.Array]:
    """The places of the first set bits, in order, and which of these there are.

    Args:
        index: Of the bits; made for at least `length` lanes it is searched fastest.
        length: How many places, int32 [length]; anywhere for those after the last bit.
    """
    places = select(index, jnp.zeros(1, jnp.int32), length=length)[0]
    return places, lax.iota(jnp.int32, length) < index.row_end[-1]


def words_of(rows: jax.Array) -> jax.Array:
    """Rows [..., numbers] of any width as uint32 [..., words], padded with zeros."""
    *shape, numbers = rows.shape
    each = max(4 // rows.dtype.itemsize, 1)
    if each > 1:
        edges = [(0, 0)] * len(shape) + [(0, -numbers % each)]
        rows = jnp.pad(rows, edges).reshape(*shape, -(-numbers // each), each)
    words = lax.bitcast_convert_type(rows, jnp.uint32)
    return words.reshape(*shape, -(-numbers * rows.dtype.itemsize // 4))


def rows_of(words: jax.Array, dtype: jnp.dtype, numbers: int) -> jax.Array:
    """Inverse of `words_of`."""
    *shape, count = words.shape
    if dtype.itemsize > 4:
        words = words.reshape(*shape, numbers, dtype.itemsize // 4)
    rows = lax.bitcast_convert_type(words, dtype)
    return rows.reshape(*shape, count * 4 // dtype.itemsize)[..., :numbers]


def low_ones(count: jax.Array) -> jax.Array:
    """Words whose lowest `count` bits are set; none below 0, all above 32."""
    inside = jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)
    ones = (jnp.uint32(1) << inside) - 1
    return jnp.where(count >= WORD, jnp.uint32(0xFFFFFFFF), ones)


def nonzero_units(x: jax.Array) -> jax.Array:
    """Flags the units of x [units, ...] that have any bit set: booleans [units].

    A unit is non-zero when any of its numbers is, never when their sum is: a row like
    [1, -1] counts.
    """
    if x.ndim == 1:
        return nonzero(x)
    # The bits of a unit's numbers are joined before they are looked at, at a distance of
    # eight lanes: four times as fast on CPUs as a flag for each number. On GPUs a second
    # look would be a second kernel.
    flat = rank_select.unsigned(x).reshape(x.shape[0], -1)
    lanes = math.gcd(flat.shape[1], policy().lanes)
    joined = lax.reduce(
        flat.reshape(x.shape[0], -1, lanes), flat.dtype.type(0), lax.bitwise_or, (1,)
    )
    return jnp.any((joined << 1) != 0, axis=1)
