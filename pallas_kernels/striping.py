"""The striped hash: the owner of each unit, without a table and without hashing units.

Units are arranged in `parts` columns of `width` consecutive units. The units with the same
slot s, one of each column, belong to different parts, rotated by an amount that depends on
s, the turn:

    column = unit // width,  slot = unit % width,  part = (column + turn(slot)) mod parts

So parts have equal width, slots ascend with the units of each column, and any set that is
distributed over slots is distributed at random over parts.

The turn is the sum over k of 2**k times a pseudo-random bit, and the bits of 32 slots are
one hashed word. Units packed as bits, 32 slots to a word, are split among the parts by a
barrel shifter: for each k, the bits that are set in the hashed word select bits of the
column 2**k away. If the number of parts is a power of two, log2(parts) bits make the turn
uniform; otherwise 16 bits make it uniform up to parts / 65536.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.hashing import mix32
from pallas_kernels.platforms import policy
from pallas_kernels.rank_select import WORD, pack, unpack


class Striping(NamedTuple):
    """A striped hash as a map from slots to units, which kernels can compute.

    Attributes:
        size: The number of units.
        parts: The number of parts.
        seed: The seed of the hash.
    """

    size: int
    parts: int
    seed: int

    def __call__(self, part: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the unit of each slot of a part; `size` or more for a slot of no unit."""
        return invert(part, slots, *self)

    @property
    def turned(self) -> tuple[int, int, int]:
        """The number of parts, of bits of a turn, and of units of a column."""
        return self.parts, _turn_bits(self.parts), width(self.size, self.parts)


def word_multiple(count: int) -> int:
    """Rounds up to a multiple of 32."""
    return -(-count // WORD) * WORD


def width(size: int, parts: int) -> int:
    """Returns the number of slots of a part, a multiple of 32; some belong to no unit."""
    return word_multiple(-(-size // parts))


@functools.partial(jax.jit, static_argnames=("parts", "seed"))
def turn(slots: jax.Array, parts: int, seed: int) -> jax.Array:
    """Returns the turn of each slot, in [0, parts): the rotation of its units' parts."""
    # Shifts, since // of signed numbers takes eight operations, compiled at each use.
    words, bit = slots >> 5, (slots & (WORD - 1)).astype(jnp.uint32)
    ones = (_turn_words(words, parts, seed) >> bit) & 1
    return _modulo(_weighed(ones, parts), parts)


def assign(units: jax.Array, size: int, parts: int, seed: int) -> tuple:
    """Returns the part and the slot of each unit."""
    per_part = jnp.asarray(width(size, parts), units.dtype)
    column, slots = lax.div(units, per_part), lax.rem(units, per_part)
    return _modulo(column + turn(slots, parts, seed), parts), slots


def invert(part: jax.Array, slots: jax.Array, size: int, parts: int, seed: int):
    """Returns the unit of each slot of a part; `size` or more for a slot of no unit."""
    column = _modulo(part - turn(slots, parts, seed) + parts, parts)
    return column * width(size, parts) + slots


def split(flags: jax.Array, parts: int, seed: int) -> jax.Array:
    """Packs booleans [size] into bits by part, uint32 [parts, width / 32]."""
    per_part = width(flags.size, parts)
    whole = jnp.pad(flags, (0, parts * per_part - flags.size))
    words = pack(whole).reshape(parts, -1)
    masks = _turn_words(lax.iota(jnp.uint32, per_part // WORD), parts, seed)
    fused = policy().fused
    if fused:
        # Without the barrier XLA would hash the words of each step separately.
        masks = lax.optimization_barrier(masks)
    for k, mask in enumerate(masks):
        # A gather of rows: jnp.roll is a concatenation, which is eight times slower on
        # CPUs. If steps are fused, each step computes all earlier steps twice. On GPUs that
        # costs less than a launch, unless there are many steps.
        back = (np.arange(parts) - (1 << k)) % parts
        words = (words & ~mask) | (words[back] & mask)
        if len(masks) > fused:
            words = lax.optimization_barrier(words)
    return words


def parts_of(parts: int, per_part: int, seed: int) -> jax.Array:
    """Returns the part of each unit, int32 [parts, per_part], by its column and slot."""
    words = _turn_words(lax.iota(jnp.uint32, per_part // WORD), parts, seed)
    turned = _weighed(unpack(words), parts)
    if policy().fused:
        # Without the barrier XLA would hash the words again for each column. With it each
        # column reads the turns, which are small.
        small = jnp.uint8 if parts <= 256 else jnp.int32
        turned = lax.optimization_barrier(_modulo(turned, parts).astype(small))
        turned = turned.astype(jnp.int32)
    column = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    return _modulo(column + turned, parts)


def join(dense: jax.Array, size: int, seed: int) -> jax.Array:
    """Reorders values by part, [parts, width, ...], by units, [size, ...]."""
    parts, per_part = dense.shape[:2]
    place = parts_of(parts, per_part, seed) * per_part + lax.iota(jnp.int32, per_part)
    flat = dense.reshape(-1, *dense.shape[2:])
    place = place.reshape(-1)[:size]
    return flat.at[place].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _modulo(x, parts):
    """Returns x modulo the number of parts, for x that is not negative."""
    if parts & (parts - 1) == 0:
        return x & (parts - 1)
    return lax.rem(x, jnp.asarray(parts, x.dtype))


def _turn_bits(parts):
    exact = parts & (parts - 1) == 0
    return parts.bit_length() - 1 if exact else 16


def _turn_words(words, parts, seed):
    """Returns the bits of the turns of 32 slots, for each word of slots: [bits, ...]."""
    # All bits are hashed together, so that the hash is compiled once.
    return mix32(words.astype(jnp.uint32), _ahead(turn_seeds(parts, seed), words.ndim))


def turn_seeds(parts: int, seed: int) -> np.ndarray:
    """Returns the seed of the hash of each bit of a turn, uint32 [bits]."""
    bits = range(_turn_bits(parts))
    seeds = [(seed * 0x9E3779B1 + k * 0x7F4A7C15) & 0xFFFFFFFF for k in bits]
    return np.array(seeds, np.uint32)


def _weighed(ones, parts):
    """Returns the turns of bits [bits, ...], before they are taken modulo the parts."""
    weights = np.array([(1 << k) % parts for k in range(len(ones))], np.int32)
    turns = ones.astype(jnp.int32) * _ahead(weights, ones.ndim - 1)
    return jnp.sum(turns, axis=0, dtype=jnp.int32)


def _ahead(numbers, axes):
    """Reshapes numbers [bits] to [bits, 1, ...], with `axes` further axes."""
    return numbers.reshape(-1, *[1] * axes)
