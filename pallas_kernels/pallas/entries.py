"""Entries of a program, four in a row, and their values word by word.

Bytes of four entries are a word of each lane, and values of four entries, of two bytes or
of four, fill whole words, whatever the width of rows is.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.striping import Striping


_NUMBERS = 1024  # of the values of a program's entries, or a few entries' of long rows
_COLUMNS = 256  # of a row's words at a time


class EntryConfig(NamedTuple):
    """What does not change from message to message.

    Attributes:
        at: Which of the numbers is the first that is meant.
        room: Entries of the longest message.
        words: Of a message, as it lies in memory.
        planes: For how many bytes of a slot the places say where they are.
        width: Numbers of a value.
        dtype: Of the values while they travel.
        units: The map from parts and slots to units, if there is one.
        size: How many units there are.
        bits: Words of a set, or of a string.
        row: How many of them are counted together.
        rows: How many counts of a part there are.
        interpret: Whether kernels are interpreted.
    """

    at: int
    room: int
    words: int
    planes: int
    width: int
    dtype: Any
    units: Striping | None
    size: int
    bits: int
    row: int
    rows: int
    interpret: bool

    @property
    def block(self) -> int:
        """Entries of a program, a multiple of 4."""
        columns = min(pl.next_power_of_2(self.width), _COLUMNS)
        return max(4, _NUMBERS // columns)

    @property
    def blocks(self) -> int:
        """Programs of a part."""
        return pl.cdiv(self.room, self.block)

    @property
    def searched(self) -> dict[str, int]:
        """How the words of a part lie that are searched for bits."""
        return {"words": self.bits, "row_words": self.row, "rows": self.rows}

    @property
    def in_word(self) -> int:
        """Numbers that fill a word."""
        return 4 // self.dtype.itemsize


def words_filled(entries, form):
    """How many words values of `entries` entries fill whole; fewer than int32 ends at."""
    per = form.in_word
    odd = lax.div(lax.rem(entries, per) * form.width, per)
    return lax.div(entries, per) * form.width + odd


def each_word(begin, unit, there, form, visit):
    """Visits the words of values of a program's entries.

    Args:
        begin: The program's first entry.
        unit: int32 [_, 4], of its entries.
        there: Which of them there are.
        form: Of the messages.
        visit: Takes int32 [_, k], which words of the values, and for each number of a word
            in which column of which unit it is, and whether it is used.
    """
    per, width = form.in_word, form.width
    columns = min(pl.next_power_of_2(width), _COLUMNS)
    quad = lax.div(begin, 4) + lax.broadcasted_iota(jnp.int32, (form.block // 4, 1), 0)
    # Numbers of as many entries as a word has numbers fill whole words.
    for group in range(4 // per):
        members = [_column(unit, per * group + i) for i in range(per)]
        are_there = [_column(there.astype(jnp.int32), per * group + i) for i in range(per)]
        first = lax.div((quad * 4 + per * group), per) * width

        def some(step, _, members=members, are_there=are_there, first=first):
            word = step * columns + lax.broadcasted_iota(jnp.int32, (1, columns), 1)
            parts = []
            for i in range(per):
                number = per * word + i
                behind = number >= width  # in the second entry of the group
                column = number - jnp.where(behind, width, 0)
                pick = lambda x, behind=behind: jnp.where(behind, x[-1], x[0])
                inside = (pick(are_there) != 0) & (word < width)
                parts.append((column, pick(members), inside))
            visit(first + word, parts)

        lax.fori_loop(0, pl.cdiv(width, columns), some, None)


def ranks_of(form):
    """The numbers of a program's entries, int32 [_, 4]."""
    shape = form.block // 4, 4
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return 4 * row + lax.broadcasted_iota(jnp.int32, shape, 1)


def _column(x, number):
    """A column of numbers [_, 4], as [_, 1]."""
    own = lax.broadcasted_iota(jnp.int32, x.shape, 1) == number
    return jnp.sum(jnp.where(own, x, 0), axis=1, dtype=x.dtype)[:, None]


class Numbers:
    """What is data of a message, from a place on."""

    def __init__(self, ref, at):
        self.ref, self.at = ref, at

    def __getitem__(self, number):
        return self.ref[self.at + number]


def entries_here(count, run, form):
    """How many entries a message has, of a part that has `count` in all."""
    return jnp.minimum(jnp.minimum(count - run[0], run[1]), form.room)


def bits_of(value, form):
    """The bits of numbers as they travel, uint32."""
    value = value.astype(form.dtype)
    short = lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * form.dtype.itemsize}"))
    return short.astype(jnp.uint32)


def number_of(bits, form):
    """The numbers whose bits are the low ones of these."""
    short = bits.astype(jnp.dtype(f"uint{8 * form.dtype.itemsize}"))
    return lax.bitcast_convert_type(short, form.dtype)
