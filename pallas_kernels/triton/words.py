"""What several kernels need of a 32-bit word: its hash, its bits, and where they are."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def mix(x, seed):
    """`hashing.mix32`: MurmurHash3 of one uint32, by a seed of uint32."""
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
    """`hashing.place`: MurmurHash3 of int32 keys, modulo the places."""
    x = mix(keys.to(tl.uint32, bitcast=True), seed.to(tl.uint32, bitcast=True))
    return (x % places).to(tl.int32)


@triton.jit
def count_bits(words):
    """How many bits each word of uint32 has; to compilers this is one instruction."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def nonzero(x_ptr, word, SIZE: tl.constexpr):
    """Which elements have any bit but the sign set, as `packed` words.

    Args:
        x_ptr: The elements, as unsigned integers.
        word: int32, a tensor: the first element of each word.
        SIZE: How many elements there are.
    """
    lane, inside = elements(word, SIZE)
    x = tl.load(x_ptr + lane, mask=inside, other=0)
    return packed((x << 1).to(x.dtype) != 0)


@triton.jit
def elements(word, SIZE: tl.constexpr):
    """The elements of words of 32, [_, 32], and which of them there are."""
    lane = word[:, None] + tl.arange(0, 32)[None, :]
    # Unsigned: the last words may lie past the end of int32.
    return lane, lane.to(tl.uint32, bitcast=True) < SIZE


@triton.jit
def packed(flags):
    """Flags [_, 32] as words of uint32, the first lowest."""
    bit = tl.arange(0, 32)[None, :]
    return tl.sum(flags.to(tl.uint32) << bit.to(tl.uint32), axis=1).to(tl.uint32)


@triton.jit
def lowest(words):
    """The number of each word's lowest set bit."""
    return count_bits(words ^ (words - 1)) - 1


@triton.jit
def list_bits(words, first, list_ptr, rank, ROOM: tl.constexpr):
    """Writes where the set bits are, a thread those of a word, a bit of each at a time.

    That takes as many rounds as the fullest word has bits: few where few are set, and no
    more work than to look at every bit where all are.

    Args:
        words: uint32, a tensor.
        first: What the first bit of each word stands for.
        list_ptr: Where the list begins.
        rank: The place in the list of the first set bit of each word.
        ROOM: Places after which nothing is written.
    """
    rounds = tl.max(count_bits(words), 0)
    while rounds > 0:
        there = (words != 0) & (rank < ROOM)
        tl.store(list_ptr + rank, first + lowest(words), mask=there)
        words = words & (words - 1)
        rank += 1
        rounds -= 1
