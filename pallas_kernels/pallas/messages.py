"""Messages in Pallas: one launch that writes them, and one that reads and adds them up.

A reference has one dtype, so a message is words to these kernels, and a word is made, or
split, by one thread: of lanes it is bytes of four entries, of values of two bytes it
is two numbers. So a program has a run of entries of one part, or of one sender, laid out
four in a row, [_, 4]: a row's bytes are a word of each lane, and its values whole words,
whatever the width of rows is.

Where the bits of its entries are a program finds by their ranks, as the kernels of Triton
do: the row of words by halving, among counts that XLA has added up before the launch, then
the word and the bit. Each entry sets its bit of the string by an atomic "or", which needs
the messages cleared: the launch before does that, but for where values will be.

What one sender sends is added without atomics, which take denormals for zero on GPUs of
NVIDIA; see `pallas_kernels.triton.messages`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pallas import launch
from pallas_kernels.pallas.entries import (
    Numbers,
    bits_of,
    each_word,
    entries_here,
    number_of,
    ranks_of,
    words_filled,
)
from pallas_kernels.pallas.slots import find_bits, striped_unit, turns_of
from pallas_kernels.reference import messages as in_reference
from pallas_kernels.reference.index_message import index_message
from pallas_kernels.reference.messages import row_ends
from pallas_kernels.reference.specs import EntryConfig


_CLEARED = 2048  # words that a program clears
_ROWS = 1 << 12  # of words that are searched
_WARPS = 8
_TILE = 1024, 256  # numbers of a program's entries, and of one of them, or words


def pack_message(sets, array, numbers, *, spec, interpret=False):
    """See `pallas_kernels.pack_message`."""
    slots, counts, units, ends = sets
    if ends is None:
        ends = slots if sets.is_listed else row_ends(slots, _most_rows())
    how: Any = {"interpret": interpret}
    form = EntryConfig.of(
        spec, array, slots.shape[1], ends.shape[1], _TILE, words=spec.packed, **how
    )
    like = jax.ShapeDtypeStruct((len(slots) * form.words,), jnp.uint32)
    how |= {"form": form, "warps": _WARPS}
    (message,) = launch.launch(
        clear_message_kernel,
        len(slots) * pl.cdiv(form.words, _CLEARED),
        (counts, numbers),
        [like],
        **how,
    )
    operands = slots.reshape(-1), ends.reshape(-1), counts, numbers, array.reshape(-1)
    listed_units = (counts if units is None else units).reshape(-1)
    (message,) = launch.launch(
        pack_message_kernel,
        len(slots) * form.blocks,
        (*operands, listed_units, turns_of(spec.units), message),
        [like],
        in_place={7: 0},
        listed=sets.is_listed,
        given=units is not None,
        **how,
    )
    return message.reshape(len(slots), form.words)


def _most_rows():
    """Of more, kernels keep registers in memory on JAX 0.10 and 0.11."""
    return min(_ROWS, in_reference.MOST_ROWS)


def unpack_message(into, received, numbers, *, spec, how, interpret=False):
    """See `pallas_kernels.unpack_message`; of messages that come whole."""
    message, ends, _ = received
    if ends is None:
        _, ends = index_message(message, numbers, spec=spec, most_rows=_most_rows())
    in_turn = how.ordered and not how.replaces
    turns, sums = len(message) if in_turn else 1, into.reshape(-1)
    each = len(message) // turns
    put = "set" if how.replaces else "add alone" if each == 1 else "add"
    known: Any = {"words": message.shape[1], "interpret": interpret}
    form = EntryConfig.of(spec, into, spec.longest, ends.shape[1], _TILE, **known)
    for some, end in zip(jnp.split(message, turns), jnp.split(ends, turns), strict=True):
        (sums,) = launch.launch(
            unpack_message_kernel,
            each * form.blocks,
            (some.reshape(-1), end.reshape(-1), numbers, turns_of(spec.units), sums),
            [jax.ShapeDtypeStruct(sums.shape, sums.dtype)],
            in_place={4: 0},
            warps=_WARPS,
            interpret=interpret,
            form=form,
            put=put,
        )
    return sums.reshape(into.shape)


def clear_message_kernel(counts_ref, numbers_ref, message_ref, *, form):
    """A program clears a run of words of a message, but for those of its values."""
    blocks = pl.cdiv(form.words, _CLEARED)
    part, block = lax.div(launch.program(), blocks), lax.rem(launch.program(), blocks)
    run = Numbers(numbers_ref, form.at)
    here = entries_here(counts_ref[part], run, form)
    values = run[4]
    # A word that values fill by half is cleared, too.
    behind = values + words_filled(jnp.maximum(here, 0), form)
    word = block * _CLEARED + lax.iota(jnp.int32, _CLEARED)
    mask = (word < run[8]) & ((word < values) | (word >= behind))
    _store(message_ref, part * form.words + word, jnp.zeros_like(word, jnp.uint32), mask)


def pack_message_kernel(*refs, form, listed, given):
    """A program writes a run of entries of a part, and the first of them the header."""
    slots_ref, ends_ref, counts_ref, numbers_ref, array_ref, *refs = refs
    units_ref, turns_ref, _, message_ref = refs
    part = lax.div(launch.program(), form.blocks)
    begin = lax.rem(launch.program(), form.blocks) * form.block
    run = Numbers(numbers_ref, form.at)
    count = counts_ref[part]
    here = entries_here(count, run, form)
    own = part * form.words

    @pl.when(begin == 0)
    def _header():
        message_ref[own] = count.astype(jnp.uint32)

    @pl.when(begin < here)
    def _entries():
        rank = begin + ranks_of(form)
        there = rank < here
        entry = part * form.room + rank
        if listed:
            slot = launch.load(slots_ref, entry, there, jnp.int32(0))
        else:
            ranks, first = run[0] + rank, part * form.bits
            slot = find_bits(slots_ref, ends_ref, part, ranks, there, first, form)
        bit = lax.shift_right_logical(slot, run[7]) + run[5] * rank
        one = jnp.uint32(1) << (bit & 31).astype(jnp.uint32)
        told = there & (run[6] != 0)
        word = _apart(message_ref, own + run[2] + (bit >> 5), told)
        launch.set_bits(message_ref, word, one, told, interpret=form.interpret)
        row = lax.div(begin, 4) + lax.iota(jnp.int32, form.block // 4)
        for plane in range(form.planes):
            octets = (slot >> 8 * plane & 255).astype(jnp.uint32)
            shift = 8 * lax.broadcasted_iota(jnp.uint32, octets.shape, 1)
            word = jnp.sum(jnp.where(there, octets << shift, 0), axis=1, dtype=jnp.uint32)
            sent = (4 * row < here) & (run[10 + 2 * plane] != 0)
            _store(message_ref, own + run[9 + 2 * plane] + row, word, sent)

        unit = slot
        if given:
            unit = launch.load(units_ref, entry, there, jnp.int32(0))
        elif form.parts:
            unit = striped_unit(part, slot, turns_ref, form)
        unit = jnp.clip(unit, 0, form.size - 1)
        values = own + run[4]
        if form.width == 1 and form.in_word == 1:
            value = launch.load(array_ref, unit, there, jnp.zeros((), array_ref.dtype))
            _store(message_ref, values + rank, bits_of(value, form), there)
            return

        def write(word, parts):
            known = jnp.zeros(word.shape, jnp.uint32)
            for i, (column, unit, there) in enumerate(parts):
                of = unit * form.width + column
                value = launch.load(array_ref, of, there, jnp.zeros((), array_ref.dtype))
                known = known | bits_of(value, form) << 32 // form.in_word * i
            _store(message_ref, values + word, known, parts[0][2])

        each_word(begin, unit, there, form, write)


def unpack_message_kernel(*refs, form, put):
    """A program adds, or sets, a run of entries of a sender."""
    message_ref, ends_ref, numbers_ref, turns_ref, _, into_ref = refs
    sender = lax.div(launch.program(), form.blocks)
    begin = lax.rem(launch.program(), form.blocks) * form.block
    run = Numbers(numbers_ref, form.at)
    own = sender * form.words
    here = entries_here(message_ref[own].astype(jnp.int32), run, form)

    @pl.when(begin < here)
    def _entries():
        rank = begin + ranks_of(form)
        there = rank < here
        told = there & (run[6] != 0)
        bit = find_bits(message_ref, ends_ref, sender, rank, told, own + 1, form)
        slot = jnp.where(told, (bit - run[5] * rank) << run[7], 0)
        row = lax.div(begin, 4) + lax.iota(jnp.int32, form.block // 4)
        for plane in range(form.planes):
            sent = (4 * row < here) & (run[10 + 2 * plane] != 0)
            lane = own + run[9 + 2 * plane] + row
            word = launch.load(message_ref, lane, sent, jnp.uint32(0))[:, None]
            shift = 8 * lax.broadcasted_iota(jnp.uint32, slot.shape, 1)
            slot = slot | (word >> shift & 255).astype(jnp.int32) << 8 * plane

        unit = slot
        if form.parts:
            unit = striped_unit(sender, slot, turns_ref, form)
        there = there & (unit >= 0) & (unit < form.size)
        values = own + run[4]
        if form.width == 1 and form.in_word == 1:
            word = launch.load(message_ref, values + rank, there, jnp.uint32(0))
            _put(into_ref, unit, number_of(word, form), there, put, form)
            return

        def read(word, parts):
            some = functools.reduce(jnp.logical_or, [there for *_, there in parts])
            known = launch.load(message_ref, values + word, some, jnp.uint32(0))
            for i, (column, unit, there) in enumerate(parts):
                value = number_of(known >> 32 // form.in_word * i, form)
                _put(into_ref, unit * form.width + column, value, there, put, form)

        each_word(begin, unit, there, form, read)


def _put(into_ref, at, value, mask, put, form):
    """Adds values, or sets them."""
    value = value.astype(into_ref.dtype)
    if put == "add":
        _add(into_ref, at, value, mask, form)
        return
    if put == "add alone":
        value = launch.load(into_ref, at, mask, jnp.zeros((), value.dtype)) + value
    _store(into_ref, at, value, mask)


def _store(ref, at, values, mask):
    """Stores values where the mask says so, and nothing elsewhere."""
    launch.store(ref, _apart(ref, at, mask), values, mask)


def _add(ref, at, values, mask, form):
    """Adds values up where the mask says so."""
    launch.add(ref, _apart(ref, at, mask), values, mask, interpret=form.interpret)


def _apart(ref, at, mask):
    """Addresses; masked ones lie past the end, where an interpreted store is dropped."""
    return jnp.where(mask, at, ref.shape[0])
