"""Bitmap encoding and decoding in Pallas.

Encoding reads every element once and writes a bit for each. In decoding each program lists
the bits of consecutive words, one bit of each word at a time, in as many rounds as the
fullest word has bits. The place of its first bit in the list follows from the popcounts of
earlier words, which XLA sums before the launch (a thirty-second of the data).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pallas import launch
from pallas_kernels.rank_select import WORD, run_ends, unsigned


_WORDS = 64  # words that a program packs
_DECODED = 256  # words whose bits a program lists, a thread for each word


def bitmap_encode(x, *, interpret=False):
    """See `pallas_kernels.bitmap_encode`."""
    words = -(-x.size // WORD)
    # The bits are tested: a comparison of floats may treat denormals as zero.
    (packed,) = launch.launch(
        bitmap_encode_kernel,
        -(-words // _WORDS),
        (unsigned(x),),
        [jax.ShapeDtypeStruct((words,), jnp.uint32)],
        interpret=interpret,
    )
    return packed


def bitmap_encode_kernel(x_ref, words_ref):
    """Packs consecutive words in each program."""
    size = x_ref.shape[0]
    word = launch.lanes(_WORDS)
    bit = lax.broadcasted_iota(jnp.int32, (_WORDS, WORD), 1)
    at = word[:, None] * WORD + bit
    # In the last words of an array of nearly 2**31 elements these numbers wrap around.
    inside = (at < size) & (at >= 0)
    x = launch.load(x_ref, at, inside, jnp.zeros((), x_ref.dtype))
    ones = ((x << 1) != 0).astype(jnp.uint32) << bit.astype(jnp.uint32)
    packed = jnp.sum(ones, axis=1, dtype=jnp.uint32)
    launch.store(words_ref, word, packed, word < -(-size // WORD))


def bitmap_decode(words, capacity, fill, *, interpret=False):
    """See `pallas_kernels.bitmap_decode`; the list is padded with `fill`."""
    ends = run_ends(words, _DECODED)
    (found,) = launch.launch(
        bitmap_decode_kernel,
        ends.size,
        (words, ends),
        [jax.ShapeDtypeStruct((capacity + _DECODED,), jnp.int32)],
        interpret=interpret,
        capacity=capacity,
    )
    count = ends[-1]
    used = lax.iota(jnp.int32, capacity) < count
    return jnp.where(used, found[:capacity], fill), count


def bitmap_decode_kernel(words_ref, ends_ref, found_ref, *, capacity):
    """Lists the set bits of consecutive words in each program."""
    word = launch.lanes(_DECODED)
    words = launch.load(words_ref, word, word < words_ref.shape[0], jnp.uint32(0))
    counts = count_bits(words)
    first = ends_ref[launch.program()] - jnp.sum(counts)
    spare = capacity + lax.iota(jnp.int32, _DECODED)

    def one_of_each(_, left):
        words, rank = left
        there = (words != 0) & (rank < capacity)
        below = words - jnp.uint32(1)
        found = word * WORD + count_bits(words ^ below) - 1
        launch.store(found_ref, jnp.where(there, rank, spare), found, there)
        return words & below, rank + 1

    start = words, first + jnp.cumsum(counts) - counts
    lax.fori_loop(0, jnp.max(counts), one_of_each, start)


def count_bits(words):
    """Computes `lax.population_count`, which Triton does not compile, by shifts."""
    x = words - ((words >> 1) & jnp.uint32(0x55555555))
    x = (x & jnp.uint32(0x33333333)) + ((x >> 2) & jnp.uint32(0x33333333))
    x = (x + (x >> 4)) & jnp.uint32(0x0F0F0F0F)
    return ((x * jnp.uint32(0x01010101)) >> 24).astype(jnp.int32)
