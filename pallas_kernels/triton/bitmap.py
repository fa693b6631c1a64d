"""Bitmap coding, and compaction by it, in Triton; see `pallas_kernels.pallas.bitmap`.

Encoding waits for memory; decoding, with a thread a word, for hardly anything.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels.rank_select import WORD, run_ends, unsigned
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import chosen, count_bits, list_bits


_WORDS = 64  # a program packs so many words
_DECODED = 256  # and lists the bits of so many


def bitmap_encode(x):
    """See `pallas_kernels.bitmap_encode`."""
    return _encode(x, None)


def bitmap_decode(words, capacity):
    """See `pallas_kernels.bitmap_decode`."""
    return _decode(words, capacity, words.size * WORD)


def compact(x, capacity, threshold=None):
    """See `pallas_kernels.compact`."""
    return _decode(_encode(x, threshold), capacity, x.size)


def _encode(x, threshold):
    words = -(-x.size // WORD)
    data = unsigned(x) if threshold is None else x
    level = jnp.asarray(0 if threshold is None else threshold, data.dtype).reshape(1)
    (packed,) = launch(
        encode_kernel,
        triton.cdiv(words, _WORDS),
        (data, level),
        results=[jax.ShapeDtypeStruct((words,), jnp.uint32)],
        SIZE=x.size,
        BY_BITS=threshold is None,
        WORDS=_WORDS,
    )
    return packed


@triton.jit
def encode_kernel(
    x_ptr,
    level_ptr,
    words_ptr,
    SIZE: tl.constexpr,
    BY_BITS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program packs a run of words."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = chosen(x_ptr, word * 32, level_ptr, SIZE, BY_BITS)
    tl.store(words_ptr + word, words, mask=word < (SIZE + 31) // 32)


def _decode(words, capacity, fill):
    ends = run_ends(words, _DECODED)
    (found,) = launch(
        decode_kernel,
        ends.size,
        (words, ends),
        results=[jax.ShapeDtypeStruct((capacity,), jnp.int32)],
        SIZE=words.size,
        CAPACITY=capacity,
        WORDS=_DECODED,
    )
    used = lax.iota(jnp.int32, capacity) < ends[-1]
    return jnp.where(used, found, fill), ends[-1]


@triton.jit
def decode_kernel(
    words_ptr,
    ends_ptr,
    found_ptr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program writes the positions of the bits of a run of words."""
    program = tl.program_id(0)
    word = program * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < SIZE, other=0)
    counts = count_bits(words)
    first = tl.load(ends_ptr + program) - tl.sum(counts)
    list_bits(words, word * 32, found_ptr, first + tl.cumsum(counts, 0) - counts, CAPACITY)
