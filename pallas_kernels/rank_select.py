"""Sets of units as packed bits, searched by rank: what `reference` is made of.

A set of units is held as packed bits: unit `i` is bit `i % 32` of word `i // 32`. Packing
is one pass over the data; after it every step touches a thirty-second of it. The i-th
element of the set is found without a sort or a scan of the data: count the bits of every
word, add the counts up inside rows of words and over the rows, find the row that holds rank
i, then the word by halving and the bit by five halvings.

The rows of all ranks that are searched at once are found in one pass over the rows. So rows
are short where many ranks are searched, down to a word, and long where few are.

Bits are tested, not values: XLA on CPUs takes denormals for zero in `x != 0`, and a
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
# Words in the longest row of the rank index: 16 to 64 run equally fast on CPUs, 16 compiles
# fastest.
ROW = 16


class RankIndex(NamedTuple):
    """Packed bits, with the counts that find the bit of a given rank.

    Attributes:
        words: uint32 [rows * row], the bits, zeros after the last.
        inside: int32 [rows * row], bits in the row up to and with this word.
        row_end: int32 [rows], bits up to and with this row.
    """

    words: jax.Array
    inside: jax.Array
    row_end: jax.Array

    @property
    def row(self) -> int:
        """How many words a row has."""
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
    """Inverse of `pack`: uint32 [..., n] to booleans [..., 32 * n]."""
    shifts = lax.iota(jnp.uint32, WORD)
    flags = (words[..., None] >> shifts) & 1
    return flags.reshape(*words.shape[:-1], words.shape[-1] * WORD) != 0


@untyped
@functools.partial(jax.jit, static_argnames="lanes")
def rank_index(words: jax.Array, *, lanes: int = 0) -> RankIndex:
    """Counts the bits of uint32 [n], so that `select` can find the bit of a rank.

    Args:
        words: The bits.
        lanes: How many ranks will be searched at a time; it decides on the rows.
    """
    row = next((r for r in (1, 2, 4, 8) if words.size <= 2 * r * lanes), ROW)
    words = jnp.pad(words, (0, -words.size % row))
    counts = lax.population_count(words).astype(jnp.int32).reshape(-1, row)
    # The barriers keep XLA from counting again in every step of the search.
    words, inside = lax.optimization_barrier((words, running_sum(counts)))
    row_end = lax.optimization_barrier(running_sum(inside[:, -1]))
    return RankIndex(words, inside.reshape(-1), row_end)


@untyped
@functools.partial(jax.jit, static_argnames="length")
def select(index: RankIndex, first: jax.Array, *, length: int) -> jax.Array:
    """Finds, for each of a few runs of ranks, the positions of the bits of those ranks.

    Args:
        index: The bits and their counts.
        first: int32 [runs], ascending: the rank at which each run starts. Where a run
            reaches into the next one, it means nothing from there on.
        length: How many ranks a run has.

    Returns:
        int32 [runs, length]: entry [r, j] is the position of the bit of rank
        `first[r] + j`; something in range where there is no such bit.
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
    """How many bits lie in the words up to and with each of these, which must be there."""
    if index.row == 1:
        return taken_at(index.row_end, words)
    row = lax.div(words, np.int32(index.row))
    before = jnp.where(row > 0, taken_at(index.row_end, jnp.maximum(row - 1, 0)), 0)
    return before + taken_at(index.inside, words)


def run_ends(words: jax.Array, length: int) -> jax.Array:
    """For words [..., n] in runs of a length, the bits up to the end of each run."""
    counts = lax.population_count(words).astype(jnp.int32)
    if length > 1:
        whole = [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % length)]
        counts = jnp.pad(counts, whole).reshape(*words.shape[:-1], -1, length)
        counts = jnp.sum(counts, axis=-1, dtype=jnp.int32)
    return running_sum(counts)


def rank_of(index: RankIndex, positions: jax.Array) -> jax.Array:
    """How many bits lie below each position, which must be in range."""
    word = positions >> 5
    below = (jnp.uint32(1) << (positions & (WORD - 1)).astype(jnp.uint32)) - 1
    from_here = lax.population_count(taken_at(index.words, word) & ~below).astype(jnp.int32)
    return bits_to(index, word) - from_here


@jax.jit
def running_sum(x: jax.Array) -> jax.Array:
    """Inclusive sums of int32 along the last axis: what jnp.cumsum computes.

    On CPUs by products with a triangle of ones, which are library calls: they run three
    times as fast as sums in blocks, or as jnp.cumsum, and compile in half the time. On GPUs
    each sum by itself, of 4,096 numbers in one kernel, where jnp.cumsum takes one and
    another for every factor of 16; so do longer vectors here, down to that length.
    """
    return by_platform(x, cpu=_sum_in_blocks, default=_sum_one_by_one)


@jax.jit
def total(x: jax.Array) -> jax.Array:
    """Sums of int32 along the last axis: what jnp.sum computes.

    On CPUs by products: XLA makes a tree of kernels of a long sum, one for every factor of
    32, and a product is a library call.
    """
    return by_platform(
        x, cpu=_by_halves, default=functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
    )


# A product adds up halves: with one column it is no library call, but a kernel to compile.
_HALVES = np.kron(np.eye(2, dtype=np.int32), np.ones((128, 1), np.int32))


def _by_halves(x):
    while x.shape[-1] > _HALVES.size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % len(_HALVES))])
        rows = x.reshape(*x.shape[:-1], -1, len(_HALVES))
        sums = lax.dot_general(rows, _HALVES, (((rows.ndim - 1,), (0,)), ((), ())))
        x = sums.reshape(*x.shape[:-1], -1)
    return jnp.sum(x, axis=-1, dtype=jnp.int32)


_BLOCK = 16
# The sums of blocks are few: longer blocks cost them little, and save a level to compile.
_BLOCK_OF_SUMS = 64
_SHORT = 128  # so few are added up at once


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


# So many numbers are each added up by itself: 16 million additions, in one kernel. Masks of
# many blocks are worse: of 60,000 times 64 by 64 ptxas makes a kernel in 20 s.
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
        # Two equal rows: the product of one row with a matrix is no library call, but a
        # kernel to compile, and each of them is compiled again.
        return _by_product(jnp.broadcast_to(x, (2, x.size)))[0]
    above = np.tri(x.shape[-1], dtype=np.int32).T
    return lax.dot_general(x, above, (((x.ndim - 1,), (0,)), ((), ())))


def taken_at(table, index):
    """table[index] where index is known to be in range: no test, no wrapping."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


# Pairs of a rank and a row that are compared in less time than marks take.
_FEW = 1 << 14


@functools.partial(jax.jit, static_argnames="length")
def _row_of_rank(row_end, first, length):
    """How many rows end at or before each rank: one mark a row, then a running sum.

    Of few ranks and rows each is compared with each, in one kernel where marks take ten.

    The runs lie one after another. A row that ends before a run's start is marked at the
    start of that run, one that ends after a run at the start of the next, so that the
    sum up to a rank counts just the rows below it.
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
    """The first p below a power of two with table[base + p] > key, by halving."""
    position = jnp.zeros_like(key)
    step = length // 2
    while step:
        below = taken_at(table, base + position + (step - 1)) <= key
        position = jnp.where(below, position + step, position)
        step //= 2
    return position


@jax.jit
def bit_of_rank(words, rank):
    """The position of the bit of this rank in each word, by halving."""
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
