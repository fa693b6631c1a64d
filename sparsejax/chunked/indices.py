"""How the places of selected entries travel: ascending, in blocks of one length.

Of a block of `length` numbers `kept` places are sent, always as many. So a code has one
size, without counts. For each length and number the shortest of these is taken:

    none      every place of the block is sent: nothing travels
    bitmap    one bit for every place of the block
    unary     Elias and Fano's code with `low` bits

In the last each place is sent as its `low` lowest bits, and the rest in unary: a block's
string has a one for each place, and a zero after each run of 2^low numbers, so that the
j-th one stands at (place >> low) + j. It has kept + ceil(length / 2^low) bits, or none
where it has one run. For 64 places of 4096 that is 6 low bits, and a string of 128: 8.0
bits an entry, where the entropy of the set is 7.4.

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
    """How the places of some blocks travel.

    Attributes:
        blocks: How many blocks.
        length: Numbers in a block.
        kept: Places of a block that are sent.
        low: Bits of a place that are sent unencoded; None for the bitmap.
    """

    blocks: int
    length: int
    kept: int
    low: int | None

    @classmethod
    def shortest(cls, blocks: int, length: int, kept: int) -> "PlaceCode":
        """The code of fewest bits; of equal ones that with most low bits."""
        most = (length - 1).bit_length()
        codes = [cls(blocks, length, kept, low) for low in (*range(most, -1, -1), None)]
        return min(codes, key=lambda code: code.block_bits)

    @property
    def entries(self) -> int:
        """The number of places."""
        return self.blocks * self.kept

    @property
    def stride(self) -> int:
        """Bits in the string, or the bitmap, of a block."""
        if self.kept == self.length:
            return 0
        if self.low is None:
            return self.length
        runs = -(-self.length >> self.low)
        return self.kept + runs if runs > 1 else 0

    @property
    def planes(self) -> int:
        """Planes of low bits."""
        return 0 if self.kept == self.length else self.low or 0

    @property
    def block_bits(self) -> int:
        """Bits for the places of one block."""
        return self.planes * self.kept + self.stride

    @property
    def words(self) -> int:
        """Words of 32 bits for the places of all blocks."""
        return plane_words(self.entries, self.planes) + self._string_words

    @property
    def _string_words(self) -> int:
        return -(-self.blocks * self.stride // bits.WORD)

    def encode(self, places: jax.Array) -> jax.Array:
        """The words for places int32 [blocks, kept], ascending and distinct in a block."""
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
        """The places, int32 [blocks, kept]; inverse of `encode`."""
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
        # Words that no rank has sent must not lead out of a block either.
        return jnp.clip(places, 0, self.length - 1)

    @property
    def _order(self) -> jax.Array:
        """The number of a place in its block."""
        return lax.broadcasted_iota(jnp.int32, (1, self.kept), 1)

    @property
    def _starts(self) -> jax.Array:
        """Where the string of each block starts, in bits."""
        return lax.broadcasted_iota(jnp.int32, (self.blocks, 1), 0) * self.stride
