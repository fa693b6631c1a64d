"""A checksum of an array's bits, which sees where each bit stands; nothing is sent.

An array is a row of 32-bit words. Each word is mixed with its place, in two ways, and the
mixed words are added up modulo 2**32: two sums, in whatever order, so that they cost one
pass over the array and are the same however XLA divides it.

What is found. A mix is one-to-one in the word, so an array that differs in one word, as in
one element of at most 32 bits, always has other sums. Where several words differ, as of
elements that were swapped, the sums are the same with a probability of 2**-64, as of two
random numbers of 32 bits: the mixes are not linear, so that changes which cancel out, as a
and -a or two changed signs, cancel in neither. It holds for accidents, and not for who
chooses numbers to deceive it. Bits count, not numbers: -0.0 is not 0.0, and one NaN is not
another.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


# Shorter arrays of one length are taken together: a program of hundreds of small leaves
# compiles as one of a few. A copy of them costs nothing.
_SHORT = 1 << 14  # words

_PLACES = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)  # odd: each place has another number


def words(x: jax.Array) -> jax.Array:
    """The bits of an array, uint32 [words]; bits of a short element are a word."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([words(lax.real(x)), words(lax.imag(x))])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = _bits(x.dtype)
    if size < 8:  # as int4: one to one in a byte
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")).astype(jnp.uint8)
        size = 8
    if size < 32:
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")).astype(jnp.uint32)
    else:  # of 64 bits there are two words, along a further axis
        x = lax.bitcast_convert_type(x, jnp.uint32)
    return x.reshape(-1)


def of_words(x: jax.Array) -> jax.Array:
    """The checksums of rows of words: from uint32 [..., words] to uint32 [..., 2]."""
    place = lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    first = _mixed(x ^ (place * _PLACES[0]), (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16))
    second = _mixed(x + (place * _PLACES[1]), (16, 0x7FEB352D, 15, 0x846CA68B, 16))
    # Both in one pass: XLA for CPUs takes ten times as long for two sums.
    zeros = (jnp.uint32(0), jnp.uint32(0))
    sums = lax.reduce((first, second), zeros, _both_added, (x.ndim - 1,))
    return jnp.stack(sums, -1)


def of_arrays(rows: Sequence[jax.Array]) -> jax.Array:
    """The checksums of several arrays, uint32 [arrays, 2].

    Args:
        rows: Their words, none of them empty.
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
    """A mix of 32 bits, one to one: shifts, and products with odd numbers."""
    first, a, second, b, third = numbers
    x = (x ^ (x >> np.uint32(first))) * np.uint32(a)
    x = (x ^ (x >> np.uint32(second))) * np.uint32(b)
    return x ^ (x >> np.uint32(third))


def _bits(dtype) -> int:
    """How many bits an element has."""
    about = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return about(dtype).bits
