"""Bitmap coding, and compaction by it, in Pallas.

Encoding reads every element once and writes a bit for each. Decoding gives each program a
run of words; where its positions begin follows from the counts of the words before, which
XLA adds up between the two launches (a thirty-second of the data). A compaction is the one
after the other, so it reads its input once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pallas import launch
from pallas_kernels.rank_select import WORD, run_ends, unsigned


_WORDS = 64  # a program packs, or unpacks, so many words


def bitmap_encode(x, *, interpret=False):
    """See `pallas_kernels.bitmap_encode`."""
    return _encode(x, None, interpret)


def bitmap_decode(words, capacity, *, interpret=False):
    """See `pallas_kernels.bitmap_decode`."""
    return _decode(words, capacity, words.size * WORD, interpret)


def compact(x, capacity, threshold=None, *, interpret=False):
    """See `pallas_kernels.compact`."""
    return _decode(_encode(x, threshold, interpret), capacity, x.size, interpret)


def _encode(x, threshold, interpret):
    words = -(-x.size // WORD)
    # By its bits where it is to be non-zero: comparing floats may take denormals for zero.
    data = unsigned(x) if threshold is None else x
    level = jnp.asarray(0 if threshold is None else threshold, data.dtype).reshape(1)
    kernel = functools.partial(_encode_kernel, size=x.size, by_bits=threshold is None)
    (packed,) = launch.launch(
        kernel,
        "bitmap_encode",
        -(-words // _WORDS),
        (data, level),
        [jax.ShapeDtypeStruct((words,), jnp.uint32)],
        interpret=interpret,
    )
    return packed


def _encode_kernel(x_ref, level_ref, words_ref, *, size, by_bits):
    word = launch.lanes(_WORDS)
    bit = lax.broadcasted_iota(jnp.int32, (_WORDS, WORD), 1)
    at = word[:, None] * WORD + bit
    # The last words of an array of nearly 2**31 elements would wrap.
    inside = (at < size) & (at >= 0)
    x = launch.load(x_ref, at, inside, jnp.zeros((), x_ref.dtype))
    there = (x << 1) != 0 if by_bits else jnp.abs(x) >= level_ref[0]
    ones = (there & inside).astype(jnp.uint32) << bit.astype(jnp.uint32)
    packed = jnp.sum(ones, axis=1, dtype=jnp.uint32)
    launch.store(words_ref, word, packed, word < -(-size // WORD))


def _decode(words, capacity, fill, interpret):
    padded, ends = run_ends(words, _WORDS)
    spare = _WORDS * WORD
    kernel = functools.partial(_decode_kernel, capacity=capacity)
    (found,) = launch.launch(
        kernel,
        "bitmap_decode",
        ends.size,
        (padded, ends),
        [jax.ShapeDtypeStruct((capacity + spare,), jnp.int32)],
        interpret=interpret,
    )
    count = ends[-1]
    used = lax.iota(jnp.int32, capacity) < count
    return jnp.where(used, found[:capacity], fill), count


def _decode_kernel(words_ref, ends_ref, found_ref, *, capacity):
    word = launch.lanes(_WORDS)
    words = words_ref[word]
    counts = _count_bits(words)
    inside = jnp.cumsum(counts)
    total = jnp.sum(counts)
    first = ends_ref[launch.program()] - total + inside - counts
    bit = lax.broadcasted_iota(jnp.int32, (_WORDS, WORD), 1)
    below = (jnp.uint32(1) << bit.astype(jnp.uint32)) - jnp.uint32(1)
    rank = first[:, None] + _count_bits(words[:, None] & below)
    there = ((words[:, None] >> bit.astype(jnp.uint32)) & jnp.uint32(1)) != 0
    there = there & (rank < capacity)
    lane = lax.broadcasted_iota(jnp.int32, (_WORDS, WORD), 0) * WORD + bit
    to = jnp.where(there, rank, capacity + lane)
    launch.store(found_ref, to, word[:, None] * WORD + bit, there)


def _count_bits(words):
    """`lax.population_count`, which Triton does not compile: by pairs, fours and bytes."""
    x = words - ((words >> 1) & jnp.uint32(0x55555555))
    x = (x & jnp.uint32(0x33333333)) + ((x >> 2) & jnp.uint32(0x33333333))
    x = (x + (x >> 4)) & jnp.uint32(0x0F0F0F0F)
    return ((x * jnp.uint32(0x01010101)) >> 24).astype(jnp.int32)
