"""Entries of a program, four in a row, and their values word by word.

Bytes of four entries are a word of each lane, and values of four entries, of two bytes or
of four, fill whole words, whatever the width of rows is.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


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
    per, width, columns = form.in_word, form.width, form.columns
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
