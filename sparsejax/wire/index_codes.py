"""How the slots of a message travel, what each way costs, and which is cheapest.

The slots of one part are sorted, so most of each is known from the one before. A message
has room for `capacity` slots out of `width`:

    coo32   each slot as 32 bits: the papers' COO
    coo16   the low 16 bits of each slot, and one bit string that tells the rest
    coo8    the low 8 bits of each slot, and one bit string that tells the rest
    bitmap  one bit for every slot of the part: the hash bitmap of Zen, 3.3

The bit string of coo16 and coo8 holds, in unary, how many of the slots are in each block of
65536 or 256: a one for every slot, a zero after each block. It has capacity + width / 256
bits; the block of the j-th slot is the position of the j-th one, less j (this is how Elias
and Fano code sorted numbers). So an entry knows its bit, and a string is written entry by
entry, as a bitmap is. Where the part is a single block there is nothing to tell. With its
search for the j-th one it is read by the same code as a bitmap.

Everything here is known when the program is traced: a capacity and a width have one
cheapest code. At 1% density coo8 takes 9.4 bits an entry where the entropy of the set is
8.1; COO takes 32, a bitmap 100.
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
    """One way for slots to travel.

    Attributes:
        name: What users call it.
        lane: Bits of each slot that are sent as they are; 0 for the bitmap.
    """

    name: str
    lane: int

    def blocks(self, width: int) -> int:
        """How many blocks of 2**lane slots a part of this width has."""
        return -(-width // (1 << self.lane))

    def lane_words(self, capacity: int) -> int:
        """Words of 32 bits for the lanes; a capacity is a multiple of 4."""
        return self.planes * (capacity // 4)

    def string_words(self, capacity: int, width: int) -> int:
        """Words of 32 bits for the bit string, or the bitmap, of a message."""
        if self.lane == 0:
            return width // bits.WORD
        blocks = self.blocks(width)
        return -(-(capacity + blocks) // bits.WORD) if blocks > 1 else 0

    @property
    def planes(self) -> int:
        """Bytes of each slot that are sent as they are."""
        return self.lane // 8

    def words(self, capacity: int, width: int) -> int:
        """Words of 32 bits for the slots of a message."""
        return self.lane_words(capacity) + self.string_words(capacity, width)

    def needed_bits(self, count: jax.Array, width: int) -> jax.Array:
        """Bits that `count` slots need, had the message no room to spare, as float32."""
        count = jnp.asarray(count, jnp.float32)
        lane, each, blocks = self.needed_terms(width)
        return lane * count + (each * count + blocks)

    def needed_terms(self, width: int) -> tuple[int, int, int]:
        """The terms of `needed_bits`: bits of a slot in lanes and in the string; others."""
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
    """The codes that a name allows: one of them, or all for "auto"."""
    if name == "auto":
        return tuple(CODES.values())
    if name not in CODES:
        known = ", ".join(["auto", *CODES])
        raise ArgumentError(f"codes must be one of {known}, got {name!r}.")
    return (CODES[name],)


def cheapest(capacity: int, width: int, among: Iterable[IndexCode]) -> IndexCode:
    """The code whose message of this capacity is shortest."""
    return min(among, key=lambda code: code.words(capacity, width))


def to_bytes(slots: jax.Array, plane: int) -> jax.Array:
    """Byte number `plane` of int32 [parts, 4 * k], as uint32 [parts, k]."""
    octets = (slots >> (8 * plane)).astype(jnp.uint8)
    grouped = octets.reshape(octets.shape[0], -1, 4)
    return lax.bitcast_convert_type(grouped, jnp.uint32)


def from_bytes(words: jax.Array, plane: int) -> jax.Array:
    """Inverse of `to_bytes`, all other bytes zero."""
    octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
    return octets.astype(jnp.int32) << (8 * plane)
