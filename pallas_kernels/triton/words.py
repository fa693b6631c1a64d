"""What several kernels need of a 32-bit word: its hash, and how many bits it has."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def place(keys, seed, places: tl.constexpr):
    """`hashing.place`: MurmurHash3 of int32 keys, modulo the places."""
    x = keys.to(tl.uint32, bitcast=True)
    x = x * 0xCC9E2D51
    x = (x << 15) | (x >> 17)
    x = (x * 0x1B873593) ^ seed.to(tl.uint32, bitcast=True)
    x = (x << 13) | (x >> 19)
    x = (x * 5 + 0xE6546B64) ^ 4
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x % places).to(tl.int32)


@triton.jit
def count_bits(words):
    """How many bits each word of uint32 has; to compilers this is one instruction."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)
