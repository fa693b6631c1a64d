"""Encodes the places of selected entries, which ascend in each block of one length.

Of a block of `length` elements always `kept` places are sent. So a code has a constant
size, without counts. For each pair of lengths the shortest of these codes is used:

    none      all places of the block are selected: nothing is sent
    bitmap    one bit for each place of the block
    unary     Elias-Fano code with `low` bits

In the last one each place is sent as its `low` lowest bits, and the rest in unary: the bit
string of a block has a one for each place, and a zero after each segment of 2^low places,
so that the j-th one is at (place >> low) + j. It has kept + ceil(length / 2^low) bits, or
none if there is one segment. For 64 places of 4096 these are 6 low bits, and a string of
128 bits: 8.0 bits per entry, where the entropy of the set is 7.4.

Layout, for the E entries of all blocks: `low` planes of ceil(E / 32) words, plane p with
bit p of every place; then the strings of all blocks end to end, padded to a word.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operations.bitmap import bitmap_decode
from sparsejax.units import bits
from sparsejax.wire.value_codes.planes import pack_planes, plane_words, unpack_planes


@dataclasses.dataclass(frozen=True)
class PlaceCode:
    """The code of the places of some blocks.

    Attributes:
        blocks: The number of blocks.
        length: The number of elements of a block.
        kept: The number of places of a block that are sent.
        low: The number of low bits of a place that are sent as they are; None for the
            bitmap.
    """

    blocks: int
    length: int
    kept: int
    low: int | None

    @classmethod
    def shortest(cls, blocks: int, length: int, kept: int) -> "PlaceCode":
        """Returns the code with fewest bits; among equal ones that with most low bits."""
        most = (length - 1).bit_length()
        codes = [cls(blocks, length, kept, low) for low in (*range(most, -1, -1), None)]
        return min(codes, key=lambda code: code.block_bits)

    @property
    def entries(self) -> int:
        """The number of places."""
        return self.blocks * self.kept

    @property
    def stride(self) -> int:
        """The number of bits of the string, or of the bitmap, of a block."""
        if self.kept == self.length:
            return 0
        if self.low is None:
            return self.length
        runs = -(-self.length >> self.low)
        return self.kept + runs if runs > 1 else 0

    @property
    def planes(self) -> int:
        """The number of bit planes of low bits."""
        return 0 if self.kept == self.length else self.low or 0

    @property
    def block_bits(self) -> int:
        """The number of bits for the places of one block."""
        return self.planes * self.kept + self.stride

    @property
    def words(self) -> int:
        """The number of 32-bit words for the places of all blocks."""
        return plane_words(self.entries, self.planes) + self._string_words

    @property
    def _string_words(self) -> int:
        return -(-self.blocks * self.stride // bits.WORD)

    def encode(self, places: jax.Array) -> jax.Array:
        """Encodes places int32 [blocks, kept], ascending and distinct in each block."""
        if not self.words:
            return jnp.zeros(0, jnp.uint32)
        planes = pack_planes(places.reshape(-1).astype(jnp.uint32), self.planes)
        if not self.stride:
            return planes
        high = places if self.low is None else (places >> self.low) + self._order
        ones = (high + self._starts).reshape(-1)
        flags = jnp.zeros(self._string_words * bits.WORD, bool)
        flags = flags.at[ones].set(
            True, mode="drop", unique_indices=True, indices_are_sorted=True
        )
        return jnp.concatenate([planes, bits.pack(flags)])

    def decode(self, words: jax.Array) -> jax.Array:
        """Decodes places, int32 [blocks, kept]: the inverse of `encode`."""
        shape = self.blocks, self.kept
        if self.kept == self.length:
            return jnp.broadcast_to(self._order, shape)
        cut = plane_words(self.entries, self.planes)
        places = unpack_planes(words[:cut], self.planes, self.entries)
        places = places.astype(jnp.int32).reshape(shape)
        if self.stride:
            ones, _ = bitmap_decode(words[cut:], self.entries)
            high = ones.reshape(shape) - self._starts
            high = high if self.low is None else (high - self._order) << self.low
            places = places + high
        # Places stay inside their block even for words that no rank has encoded.
        return jnp.clip(places, 0, self.length - 1)

    @property
    def _order(self) -> jax.Array:
        """The rank j of each place in its block, int32 [1, kept]."""
        return lax.broadcasted_iota(jnp.int32, (1, self.kept), 1)

    @property
    def _starts(self) -> jax.Array:
        """The offset of the string of each block in bits, int32 [blocks, 1]."""
        return lax.broadcasted_iota(jnp.int32, (self.blocks, 1), 0) * self.stride
