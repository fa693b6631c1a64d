"""Packs and lists the bits of many blocks, with one column per block.

XLA:CPU vectorizes operations along the last axis, but is slow where it packs or sums along
it. So flags are packed down the columns of a leaf, 32 rows per word, and operations on a
block are operations on a column, for all blocks at once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits


# The most rows of one sum: XLA:CPU splits longer ones into windows, many times slower.
_RUN = 32


def rows_of_words(height: int) -> tuple[int, int]:
    """Returns the number of words for a column of a block, and of rows in each word."""
    words = -(-height // bits.WORD)
    return words, -(-height // words)


def packed(flags: jax.Array) -> jax.Array:
    """Packs flags into words down the columns.

    Args:
        flags: bool [matrices, blocks down, height, blocks across, width].

    Returns:
        uint32 [matrices, blocks down, words, blocks across, width]: bit r of a word is the
        flag of row r among the consecutive rows of the word. See `rows_of_words`.
    """
    matrices, down, height, across, width = flags.shape
    words, rows = rows_of_words(height)
    if words * rows > height:
        edges = [(0, 0)] * 5
        edges[2] = (0, words * rows - height)
        flags = jnp.pad(flags, edges)
    flags = flags.reshape(matrices, down, words, rows, across, width)
    shifts = lax.broadcasted_iota(jnp.uint32, (rows, 1, 1), 0)
    return jnp.sum(flags.astype(jnp.uint32) << shifts, axis=3, dtype=jnp.uint32)


def by_blocks(words: jax.Array) -> jax.Array:
    """Transposes words of `packed`: uint32 [32, words of a column, words of a row, blocks].

    The first axis is the column among the 32 columns of a word of a row.
    """
    *_, width = words.shape
    words = jnp.pad(words, [(0, 0)] * 4 + [(0, -width % bits.WORD)])
    words = words.reshape(*words.shape[:4], -1, bits.WORD).transpose(5, 2, 4, 0, 1, 3)
    return words.reshape(*words.shape[:3], -1)


def turned(words: jax.Array, height: int) -> jax.Array:
    """Repacks words of `by_blocks` along the rows: uint32 [words, blocks], row by row."""
    _, runs, _, blocks = words.shape
    rows = rows_of_words(height)[1]
    bit = lax.broadcasted_iota(jnp.uint32, (1, 1, rows, 1, 1), 2)
    flags = (words[:, :, None] >> bit) & 1
    shifts = lax.broadcasted_iota(jnp.uint32, (bits.WORD, 1, 1, 1, 1), 0)
    found = jnp.sum(flags << shifts, axis=0, dtype=jnp.uint32)
    return found.reshape(runs * rows, -1, blocks)[:height].reshape(-1, blocks)


def of_columns(flags: jax.Array) -> jax.Array:
    """Packs flags [rows, columns] down the columns into words, uint32 [words, columns]."""
    rows, columns = flags.shape
    flags = jnp.pad(flags, ((0, -rows % bits.WORD), (0, 0)))
    flags = flags.reshape(-1, bits.WORD, columns).astype(jnp.uint32)
    shifts = lax.broadcasted_iota(jnp.uint32, (bits.WORD, 1), 0)
    return jnp.sum(flags << shifts, axis=1, dtype=jnp.uint32)


def count(words: jax.Array) -> jax.Array:
    """Counts the bits that are set in each column of [..., columns]: int32 [columns]."""
    of_words = lambda words: lax.population_count(words).astype(jnp.int32)
    return added(words.reshape(-1, words.shape[-1]), of_words)


def added(x: jax.Array, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sums a function of x [rows, ...] over the rows, in the dtype of the function."""
    runs = (of(x[i : i + _RUN]) for i in range(0, x.shape[0], _RUN))
    return functools.reduce(
        jnp.add, [jnp.sum(numbers, axis=0, dtype=numbers.dtype) for numbers in runs]
    )


def running(x: jax.Array) -> jax.Array:
    """Returns inclusive cumulative sums down the columns of x [rows, columns], int32."""

    def step(total, row):
        total = total + row
        return total, total

    start = as_varying(jnp.zeros(x.shape[1:], jnp.int32), varying_axes(x))
    return lax.scan(step, start, x.astype(jnp.int32))[1]


def listed(words: jax.Array, length: int) -> jax.Array:
    """Lists the places of the first bits that are set in each column.

    Args:
        words: uint32 [words, columns].
        length: The number of places to list.

    Returns:
        int32 [length, columns]. If a column has fewer bits, the rest is arbitrary.
    """
    most, columns = words.shape
    narrow = np.min_scalar_type(max(length, most))

    def step(before, word):
        after = before + lax.population_count(word).astype(jnp.int32)
        # Ranks of bits are below `length`; in bytes, CPUs compare many of them at once.
        return after, [jnp.minimum(x, length).astype(narrow) for x in (before, after)]

    start = as_varying(jnp.zeros(columns, jnp.int32), varying_axes(words))
    starts, ends = lax.scan(step, start, words)[1]
    rank = lax.broadcasted_iota(jnp.int32, (length, 1), 0)
    # The bit of a rank is in the word after all words that end at or before this rank.
    ended = lambda ends: (ends[:, None] <= rank.astype(narrow)).astype(narrow)
    word = jnp.minimum(added(ends, ended).astype(jnp.int32), most - 1)
    at = word * columns + lax.broadcasted_iota(jnp.int32, word.shape, 1)
    rest = rank - _at(starts, at).astype(jnp.int32)
    return bits.WORD * word + bits.bit_of_rank(_at(words, at), rest)


def _at(table, index):
    return table.reshape(-1).at[index].get(mode="promise_in_bounds")
