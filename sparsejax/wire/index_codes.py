"""Index codes: how the slots of a message are written, and which code is cheapest.

The slots of a part are sorted, so their high bits can be coded in few bits. A message has a
capacity of `capacity` slots out of `width`:

    coo32   each slot as 32 bits: the papers' COO
    coo16   the low 16 bits of each slot, and a bit string of the high bits
    coo8    the low 8 bits of each slot, and a bit string of the high bits
    bitmap  one bit for every slot of the part: the hash bitmap of Zen, 3.3

The bit string of coo16 and coo8 holds, in unary, the number of slots in each block of 65536
or 256: a one for each slot, and a zero after each block. This is how Elias and Fano coded
sorted integers. The string of coo8 has capacity + width / 256 bits. The block of the j-th
slot is the position of the j-th one, minus j. So the bit of an entry is known from its slot
and rank, and a string is written entry by entry, as a bitmap is. A part of a single block
needs no string. Strings and bitmaps are read by the same code, a search for the j-th one.

Everything here is known at trace time: for a capacity and a width one code is the cheapest.
At a density of 1% coo8 takes 9.4 bits for an entry, where the entropy of the set is 8.1;
COO takes 32, and a bitmap 100.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.errors import ArgumentError
from sparsejax.units import bits


@dataclasses.dataclass(frozen=True)
class IndexCode:
    """A way to write the slots of a message.

    Attributes:
        name: The name by which users choose it.
        lane: The number of low bits of each slot that are sent verbatim, in whole bytes; 0
            for the bitmap.
    """

    name: str
    lane: int

    def __post_init__(self):
        if self.lane not in (0, 8, 16, 24, 32):
            raise ArgumentError(
                f"lane of index code {self.name!r} must be 0, 8, 16, 24 or 32 bits, got "
                f"{self.lane!r}: low bits are sent in whole bytes; others would be lost."
            )

    def blocks(self, width: int) -> int:
        """Returns the number of blocks of 2**lane slots in a part of this width."""
        return -(-width // (1 << self.lane))

    def lane_words(self, capacity: int) -> int:
        """Returns the words of 32 bits for the lanes; a capacity is a multiple of 4."""
        return self.planes * (capacity // 4)

    def string_words(self, capacity: int, width: int) -> int:
        """Returns the words of 32 bits for the bit string, or the bitmap, of a message."""
        if self.lane == 0:
            return width // bits.WORD
        blocks = self.blocks(width)
        return -(-(capacity + blocks) // bits.WORD) if blocks > 1 else 0

    @property
    def planes(self) -> int:
        """The number of low bytes of each slot that are sent verbatim."""
        return self.lane // 8

    def words(self, capacity: int, width: int) -> int:
        """Returns the words of 32 bits for the slots of a message."""
        return self.lane_words(capacity) + self.string_words(capacity, width)

    def needed_bits(self, count: jax.Array, width: int) -> jax.Array:
        """Returns the bits that `count` slots need without padding, as float32."""
        count = jnp.asarray(count, jnp.float32)
        lane, each, blocks = self.needed_terms(width)
        return lane * count + (each * count + blocks)

    def needed_terms(self, width: int) -> tuple[int, int, int]:
        """Returns the terms of `needed_bits`.

        These are the bits of each slot in the lanes and in the string, and the bits that do
        not depend on the number of slots.
        """
        if self.lane == 0:
            return 0, 0, width
        blocks = self.blocks(width)
        return (self.lane, 1, blocks) if blocks > 1 else (self.lane, 0, 0)


COO32 = IndexCode("coo32", 32)
COO16 = IndexCode("coo16", 16)
COO8 = IndexCode("coo8", 8)
BITMAP = IndexCode("bitmap", 0)
CODES = {code.name: code for code in (COO32, COO16, COO8, BITMAP)}


def parse(name: str) -> tuple[IndexCode, ...]:
    """Returns the code of a name, or all codes for "auto"; raises for other names."""
    if name == "auto":
        return tuple(CODES.values())
    if name not in CODES:
        known = ", ".join(["auto", *CODES])
        raise ArgumentError(f"codes must be one of {known}, got {name!r}.")
    return (CODES[name],)


def cheapest(capacity: int, width: int, among: Iterable[IndexCode]) -> IndexCode:
    """Returns the code that takes the fewest words for this capacity and width."""
    return min(among, key=lambda code: code.words(capacity, width))


def to_bytes(slots: jax.Array, plane: int) -> jax.Array:
    """Returns byte number `plane` of each of int32 [parts, 4 * k], as uint32 [parts, k]."""
    octets = (slots >> (8 * plane)).astype(jnp.uint8)
    grouped = octets.reshape(octets.shape[0], -1, 4)
    return lax.bitcast_convert_type(grouped, jnp.uint32)


def from_bytes(words: jax.Array, plane: int) -> jax.Array:
    """Inverts `to_bytes`, with zeros for all other bytes."""
    octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
    return octets.astype(jnp.int32) << (8 * plane)
