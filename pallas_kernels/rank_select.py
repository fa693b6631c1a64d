"""Rank and select on sets of units as packed bits, on which `reference` is built.

A set of units is stored as packed bits: unit `i` is bit `i % 32` of word `i // 32`. Packing
is one pass over the data; each later step reads a thirty-second of it. The i-th element of
the set is found without a sort or a scan of the data: popcounts of all words and their
prefix sums, inside rows of words and over the rows, give the row that has rank i; then the
word is found by halving the row, and the bit by halving the word five times.

The rows of all ranks of one search are found in one pass over the rows. So rows are short,
down to one word, if many ranks are searched, and long if few are.

Bits are tested, not values: XLA on CPUs treats denormals as zero in `x != 0`, and a
lossless scheme may not lose them. NaN counts as non-zero, -0.0 as zero.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import by_platform
from pallas_kernels.types import untyped


WORD = 32
# The words of the longest row of a rank index: 16 to 64 are equally fast on CPUs, and 16
# compiles fastest.
ROW = 16


class RankIndex(NamedTuple):
    """Packed bits, with the prefix sums by which the bit of a given rank is found.

    Attributes:
        words: uint32 [rows * row], the bits, padded with zeros.
        inside: int32 [rows * row], the bits of the row up to and including each word.
        row_end: int32 [rows], the bits up to and including each row.
    """

    words: jax.Array
    inside: jax.Array
    row_end: jax.Array

    @property
    def row(self) -> int:
        """The number of words of a row."""
        return self.words.size // max(self.row_end.size, 1)


def nonzero(x: jax.Array) -> jax.Array:
    """Returns where x has any bit but the sign set, as booleans."""
    return (unsigned(x) << 1) != 0


def unsigned(x: jax.Array) -> jax.Array:
    """Returns the bits of floating x, sign first, as integers of its width."""
    width = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, width)


def pack(flags: jax.Array) -> jax.Array:
    """Packs booleans [..., 32 * n] into uint32 [..., n], the first flag lowest."""
    shape = flags.shape[:-1]
    # Bytes first: eight flags to a byte in 8-bit arithmetic is what vectorizes best.
    eights = flags.reshape(-1, 8).astype(jnp.uint8)
    shifts = lax.broadcasted_iota(jnp.uint8, (1, 8), 1)
    octets = jnp.sum(eights << shifts, axis=1, dtype=jnp.uint8)
    return lax.bitcast_convert_type(octets.reshape(*shape, -1, 4), jnp.uint32)


def unpack(words: jax.Array) -> jax.Array:
    """Unpacks uint32 [..., n] to booleans [..., 32 * n]; inverts `pack`."""
    shifts = lax.iota(jnp.uint32, WORD)
    flags = (words[..., None] >> shifts) & 1
    return flags.reshape(*words.shape[:-1], words.shape[-1] * WORD) != 0


@untyped
@functools.partial(jax.jit, static_argnames="lanes")
def rank_index(words: jax.Array, *, lanes: int = 0) -> RankIndex:
    """Counts the bits of uint32 [n], so that `select` can find the bit of a rank.

    Args:
        words: uint32 [n], the bits.
        lanes: The number of ranks of one search, which determines the length of rows.
    """
    row = next((r for r in (1, 2, 4, 8) if words.size <= 2 * r * lanes), ROW)
    words = jnp.pad(words, (0, -words.size % row))
    counts = lax.population_count(words).astype(jnp.int32).reshape(-1, row)
    # Without the barriers XLA would recompute the counts in each step of the search.
    words, inside = lax.optimization_barrier((words, running_sum(counts)))
    row_end = lax.optimization_barrier(running_sum(inside[:, -1]))
    return RankIndex(words, inside.reshape(-1), row_end)


@untyped
@functools.partial(jax.jit, static_argnames="length")
def select(index: RankIndex, first: jax.Array, *, length: int) -> jax.Array:
    """Finds the positions of the bits of consecutive ranks, for each of a few runs.

    Args:
        index: The bits and their counts.
        first: int32 [runs], ascending, the first rank of each run. Where a run extends into
            the next one, its results are unspecified.
        length: The number of ranks of a run.

    Returns:
        int32 [runs, length], of which entry [r, j] is the position of the bit of rank
        `first[r] + j`, or any position in range if there is no such bit.
    """
    runs = first.size
    ranks = (first[:, None] + lax.iota(jnp.int32, length)).reshape(-1)
    row = _row_of_rank(index.row_end, first, length)
    last_row = index.row_end.size - 1
    row = jnp.minimum(row, last_row)
    before = jnp.where(row > 0, taken_at(index.row_end, jnp.maximum(row - 1, 0)), 0)
    rest = ranks - before
    if index.row == 1:
        word, bits = row, taken_at(index.words, row)
    else:
        first_word = row * index.row
        word = first_word + _first_above(index.inside, first_word, rest, index.row)
        bits = taken_at(index.words, word)
        own = lax.population_count(bits).astype(jnp.int32)
        rest = rest - (taken_at(index.inside, word) - own)
    return (word * WORD + bit_of_rank(bits, rest)).reshape(runs, length)


def bits_to(index: RankIndex, words: jax.Array | np.ndarray) -> jax.Array:
    """Returns the number of bits up to and including each word, given by its index.

    The indices must be in range.
    """
    if index.row == 1:
        return taken_at(index.row_end, words)
    row = lax.div(words, np.int32(index.row))
    before = jnp.where(row > 0, taken_at(index.row_end, jnp.maximum(row - 1, 0)), 0)
    return before + taken_at(index.inside, words)


def run_ends(words: jax.Array, length: int) -> jax.Array:
    """Returns the bits up to the end of each run of `length` words, of words [..., n]."""
    counts = lax.population_count(words).astype(jnp.int32)
    if length > 1:
        whole = [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % length)]
        counts = jnp.pad(counts, whole).reshape(*words.shape[:-1], -1, length)
        counts = jnp.sum(counts, axis=-1, dtype=jnp.int32)
    return running_sum(counts)


def rank_of(index: RankIndex, positions: jax.Array) -> jax.Array:
    """Returns the number of bits below each position; positions must be in range."""
    word = positions >> 5
    below = (jnp.uint32(1) << (positions & (WORD - 1)).astype(jnp.uint32)) - 1
    from_here = lax.population_count(taken_at(index.words, word) & ~below).astype(jnp.int32)
    return bits_to(index, word) - from_here


@jax.jit
def running_sum(x: jax.Array) -> jax.Array:
    """Computes prefix sums of int32 along the last axis, as jnp.cumsum.

    On CPUs they are products with a triangle of ones, which are library calls. These run
    three times as fast as sums in blocks, or as jnp.cumsum, and compile in half the time.
    On GPUs each sum is computed independently, up to 4,096 numbers in one kernel, where
    jnp.cumsum takes a kernel for each factor of 16. Longer vectors are reduced to that
    length by sums of blocks first.
    """
    return by_platform(x, cpu=_sum_in_blocks, default=_sum_one_by_one)


@jax.jit
def total(x: jax.Array) -> jax.Array:
    """Computes sums of int32 along the last axis, as jnp.sum.

    On CPUs they are products, which are library calls: XLA compiles a long sum to a tree of
    kernels, one for each factor of 32.
    """
    return by_platform(
        x, cpu=_by_halves, default=functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
    )


# A product adds up two halves: with one column it would be a kernel to compile, and not a
# library call.
_HALVES = np.kron(np.eye(2, dtype=np.int32), np.ones((128, 1), np.int32))


def _by_halves(x):
    while x.shape[-1] > _HALVES.size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % len(_HALVES))])
        rows = x.reshape(*x.shape[:-1], -1, len(_HALVES))
        sums = lax.dot_general(rows, _HALVES, (((rows.ndim - 1,), (0,)), ((), ())))
        x = sums.reshape(*x.shape[:-1], -1)
    return jnp.sum(x, axis=-1, dtype=jnp.int32)


_BLOCK = 16
# The sums of blocks are few: longer blocks cost little time, and save a level to compile.
_BLOCK_OF_SUMS = 64
_SHORT = 128  # up to this many are summed by one product


def _sum_in_blocks(x, block=_BLOCK):
    length = x.shape[-1]
    if length <= _SHORT:
        return _by_product(x)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % block)])
    inner = _by_product(padded.reshape(*x.shape[:-1], -1, block))
    ends = inner[..., -1]
    above = _sum_in_blocks(ends, _BLOCK_OF_SUMS) - ends
    whole = inner + above[..., None]
    return whole.reshape(*x.shape[:-1], -1)[..., :length]


# Up to this many prefix sums are each computed independently: 16 million additions, in one
# kernel. Masks of many blocks are worse: with 60,000 of 64 by 64 numbers ptxas takes 20 s.
AT_ONCE = 1 << 12


def _sum_one_by_one(x):
    length = x.shape[-1]
    if length > AT_ONCE:
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % _BLOCK)])
        blocks = padded.reshape(*x.shape[:-1], -1, _BLOCK)
        sums = jnp.sum(blocks, axis=-1, dtype=jnp.int32)
        above = _sum_one_by_one(sums) - sums
        inner = jnp.cumsum(blocks, axis=-1, dtype=jnp.int32) + above[..., None]
        return inner.reshape(*x.shape[:-1], -1)[..., :length]
    row, column = (lax.broadcasted_iota(jnp.int32, (length,) * 2, i) for i in (0, 1))
    numbers = jnp.where(column <= row, x[..., None, :], 0)
    return jnp.sum(numbers, axis=-1, dtype=jnp.int32)


def _by_product(x):
    if x.ndim == 1:
        # Two equal rows: the product of a single row and a matrix is not a library call but
        # a kernel, and each occurrence of it is compiled again.
        return _by_product(jnp.broadcast_to(x, (2, x.size)))[0]
    above = np.tri(x.shape[-1], dtype=np.int32).T
    return lax.dot_general(x, above, (((x.ndim - 1,), (0,)), ((), ())))


def taken_at(table, index):
    """Returns table[index] for indices that are in range, without bounds checks."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


# The number of pairs of a rank and a row up to which comparing all is faster than marks.
_FEW = 1 << 14


@functools.partial(jax.jit, static_argnames="length")
def _row_of_rank(row_end, first, length):
    """Returns the number of rows that end at or before each rank.

    Each row is marked once, and the prefix sum of marks counts the rows. If ranks and rows
    are few, all pairs are compared, in one kernel where marks take ten.

    The runs of ranks are concatenated. A row that ends before the start of a run is marked
    at that start, and a row that ends after a run at the start of the next, so that the sum
    up to a rank counts exactly the rows below it.
    """
    runs = first.size
    if runs * length * row_end.size <= _FEW:
        ranks = (first[:, None] + lax.iota(jnp.int32, length)).reshape(-1)
        return jnp.sum(row_end <= ranks[:, None], axis=1, dtype=jnp.int32)
    if runs <= WORD:
        run = jnp.sum(row_end[:, None] > first[None, :], axis=1, dtype=jnp.int32) - 1
    else:
        run = jnp.searchsorted(first, row_end, side="left").astype(jnp.int32) - 1
    at = jnp.where(
        run < 0,
        0,
        run * length + jnp.minimum(row_end - taken_at(first, jnp.maximum(run, 0)), length),
    )
    marks = jnp.zeros(runs * length, jnp.int32)
    marks = marks.at[at].add(1, mode="drop", wrap_negative_indices=False)
    return running_sum(marks)


def _first_above(table, base, key, length):
    """Finds the first p < length with table[base + p] > key; length is a power of two."""
    position = jnp.zeros_like(key)
    step = length // 2
    while step:
        below = taken_at(table, base + position + (step - 1)) <= key
        position = jnp.where(below, position + step, position)
        step //= 2
    return position


@jax.jit
def bit_of_rank(words, rank):
    """Finds the position of the bit of a rank in each word, by halving."""
    position = jnp.zeros_like(rank)
    step = WORD // 2
    while step:
        low = words & jnp.uint32((1 << step) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        above = rank >= count
        position = jnp.where(above, position + step, position)
        rank = jnp.where(above, rank - count, rank)
        words = jnp.where(above, words >> step, low)
        step //= 2
    return position
