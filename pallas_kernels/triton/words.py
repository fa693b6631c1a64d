"""Shared functions of kernels on 32-bit words: hashes, popcounts, and lists of bits."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def mix(x, seed):
    """Computes MurmurHash3 of uint32 keys, by a seed of uint32: `hashing.mix32`."""
    x = x * 0xCC9E2D51
    x = (x << 15) | (x >> 17)
    x = (x * 0x1B873593) ^ seed
    x = (x << 13) | (x >> 19)
    x = (x * 5 + 0xE6546B64) ^ 4
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def place(keys, seed, places: tl.constexpr):
    """Hashes int32 keys to places in [0, places): `hashing.place`."""
    x = mix(keys.to(tl.uint32, bitcast=True), seed.to(tl.uint32, bitcast=True))
    return (x % places).to(tl.int32)


@triton.jit
def count_bits(words):
    """Returns the popcounts of uint32 words; compilers make one instruction of it."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def nonzero(x_ptr, word, SIZE: tl.constexpr):
    """Packs flags of the elements that have any bit except the sign set; see `packed`.

    Args:
        x_ptr: The elements, as unsigned integers.
        word: int32, a tensor, the first element of each word.
        SIZE: The number of elements.
    """
    lane, inside = elements(word, SIZE)
    x = tl.load(x_ptr + lane, mask=inside, other=0)
    return packed((x << 1).to(x.dtype) != 0)


@triton.jit
def elements(word, SIZE: tl.constexpr):
    """Returns the numbers of the elements of words, [_, 32], and which are in range."""
    lane = word[:, None] + tl.arange(0, 32)[None, :]
    # Compared as unsigned numbers: those of the last words may exceed int32.
    return lane, lane.to(tl.uint32, bitcast=True) < SIZE


@triton.jit
def packed(flags):
    """Packs flags [_, 32] into words of uint32, the first flag lowest."""
    bit = tl.arange(0, 32)[None, :]
    return tl.sum(flags.to(tl.uint32) << bit.to(tl.uint32), axis=1).to(tl.uint32)


@triton.jit
def lowest(words):
    """Returns the position of each word's lowest set bit."""
    return count_bits(words ^ (words - 1)) - 1


@triton.jit
def list_bits(words, first, list_ptr, rank, ROOM: tl.constexpr):
    """Lists the set bits of words, by a thread for each word, one bit of each at a time.

    That takes as many rounds as the fullest word has bits: few if few bits are set, and no
    more work than a test of every bit if all are set.

    Args:
        words: uint32, a tensor.
        first: int32, a tensor, the number that the lowest bit of each word stands for.
        list_ptr: The start of the list.
        rank: int32, a tensor, the place in the list of the first set bit of each word.
        ROOM: The capacity of the list; later bits are not written.
    """
    rounds = tl.max(count_bits(words), 0)
    while rounds > 0:
        there = (words != 0) & (rank < ROOM)
        tl.store(list_ptr + rank, first + lowest(words), mask=there)
        words = words & (words - 1)
        rank += 1
        rounds -= 1
