"""A checksum of an array's bits and their positions; nothing is sent.

An array is taken as a row of 32-bit words. Two mix functions are applied to each word and
its position, and the results of each are added modulo 2**32. The two sums do not depend on
the order of addition, so they need one pass over the array, and are the same however XLA
divides it.

A mix is a bijection of the word. So arrays that differ in one word, as in one element of at
most 32 bits, always have different sums. If several words differ, for example because
elements were swapped, the sums are equal with a probability of 2**-64, as are two random
numbers of 32 bits each: the mixes are not linear, so changes that would cancel in a plain
sum, such as a and -a or two changed signs, cancel in neither. This holds for accidents, not
for numbers that are chosen to deceive it. Bits are compared, not numbers: -0.0 differs from
0.0, and NaNs with different bits differ.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


# Up to this length arrays of equal length are stacked, so that a program of hundreds of
# small leaves compiles as fast as one of a few. A copy of such short arrays is negligible.
_SHORT = 1 << 14  # words

# Factors of the position; odd, so that each position has another product.
_PLACES = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)


def words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array, uint32 [words].

    An element of less than 32 bits takes one word, and one of 64 bits two.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([words(lax.real(x)), words(lax.imag(x))])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = _bits(x.dtype)
    if size < 8:  # such as int4: each element is widened to a byte
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")).astype(jnp.uint8)
        size = 8
    if size < 32:
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")).astype(jnp.uint32)
    else:  # an element of 64 bits becomes two words, along a further axis
        x = lax.bitcast_convert_type(x, jnp.uint32)
    return x.reshape(-1)


def of_words(x: jax.Array) -> jax.Array:
    """Returns the checksums of rows of words: from uint32 [..., words] to [..., 2]."""
    place = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    first = _mixed(x ^ (place * _PLACES[0]), (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16))
    second = _mixed(x + (place * _PLACES[1]), (16, 0x7FEB352D, 15, 0x846CA68B, 16))
    # One reduction of both: on CPUs XLA takes ten times as long for two reductions.
    zeros = (jnp.uint32(0), jnp.uint32(0))
    sums = lax.reduce((first, second), zeros, _both_added, (x.ndim - 1,))
    return jnp.stack(sums, -1)


def of_arrays(rows: Sequence[jax.Array]) -> jax.Array:
    """Returns the checksums of several arrays, uint32 [arrays, 2].

    Args:
        rows: The words of each array, uint32 [words], not empty.
    """
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.size if row.size <= _SHORT else (i,), []).append(i)
    order = [i for group in groups.values() for i in group]
    together = (jnp.stack([rows[i] for i in group]) for group in groups.values())
    sums = jnp.concatenate([of_words(x) for x in together])
    return sums[np.argsort(order)]


def _both_added(some, others):
    return some[0] + others[0], some[1] + others[1]


def _mixed(x, numbers):
    """Applies a bijection of uint32: xor with shifts, and products with odd numbers."""
    first, a, second, b, third = numbers
    x = (x ^ (x >> np.uint32(first))) * np.uint32(a)
    x = (x ^ (x >> np.uint32(second))) * np.uint32(b)
    return x ^ (x >> np.uint32(third))


def _bits(dtype) -> int:
    """Returns the number of bits of an element."""
    about = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return about(dtype).bits
