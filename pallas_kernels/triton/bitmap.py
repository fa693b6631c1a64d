"""Bitmap coding, and compaction by it, in Triton; see `pallas_kernels.pallas.bitmap`."""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels.rank_select import WORD, run_ends, unsigned
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import count_bits


_WORDS = 64  # a program packs, or unpacks, so many words


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
    bit = tl.arange(0, 32)
    at = word.to(tl.int64)[:, None] * 32 + bit[None, :]
    inside = at < SIZE
    x = tl.load(x_ptr + at, mask=inside, other=0)
    if BY_BITS:
        there = (x << 1).to(x.dtype) != 0
    else:
        there = tl.abs(x) >= tl.load(level_ptr)
    ones = (there & inside).to(tl.uint32) << bit[None, :].to(tl.uint32)
    packed = tl.sum(ones, axis=1)
    tl.store(words_ptr + word, packed.to(tl.uint32), mask=word.to(tl.int64) * 32 < SIZE)


def _decode(words, capacity, fill):
    padded, ends = run_ends(words, _WORDS)
    (found,) = launch(
        decode_kernel,
        ends.size,
        (padded, ends),
        results=[jax.ShapeDtypeStruct((capacity,), jnp.int32)],
        CAPACITY=capacity,
        WORDS=_WORDS,
    )
    used = lax.iota(jnp.int32, capacity) < ends[-1]
    return jnp.where(used, found, fill), ends[-1]


@triton.jit
def decode_kernel(
    words_ptr, ends_ptr, found_ptr, CAPACITY: tl.constexpr, WORDS: tl.constexpr
):
    """A program writes the positions of the bits of a run of words."""
    program = tl.program_id(0)
    word = program * WORDS + tl.arange(0, WORDS)
    bits = tl.load(words_ptr + word)
    counts = count_bits(bits)
    first = tl.load(ends_ptr + program) - tl.sum(counts) + tl.cumsum(counts, 0) - counts
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    below = bits[:, None] & ((1 << bit).to(tl.uint32) - 1)
    rank = first[:, None] + count_bits(below)
    there = (((bits[:, None] >> bit) & 1) != 0) & (rank < CAPACITY)
    tl.store(found_ptr + rank, word[:, None] * 32 + bit.to(tl.int32), mask=there)
