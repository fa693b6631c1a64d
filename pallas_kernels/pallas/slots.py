"""Slots of parts: where the bits of some ranks are, and the units of slots."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hashing, striping
from pallas_kernels.pallas import launch
from pallas_kernels.pallas.bitmap import count_bits


def find_bits(words_ref, ends_ref, part, rank, there, first, form):
    """Where in the words of a part the bits of these ranks are.

    Args:
        words_ref: The words of all parts.
        ends_ref: How many bits there are up to the end of each row of words of each part.
        part: Which part.
        rank: int32, an array.
        there: For which of them there is a bit.
        first: Where the part's words begin.
        form: The `EntryConfig`.
    """
    words, rows, halvings = form.bits, form.rows, form.halvings

    def halve(k, found):
        row, before = found
        step = lax.shift_right_logical(jnp.int32(1 << halvings >> 1), jnp.int32(k))
        inside = there & (row + step <= rows)
        at = part * rows + row + step - 1
        end = launch.load(ends_ref, at, inside, jnp.int32(0))
        below = inside & (end <= rank)
        return jnp.where(below, row + step, row), jnp.where(below, end, before)

    zeros = jnp.zeros_like(rank)
    row, before = lax.fori_loop(0, halvings, halve, (zeros, zeros))
    rest, word = rank - before, row * form.row
    mask = there & (word < words)
    bits = launch.load(words_ref, first + word, mask, jnp.uint32(0))

    def further(_, found):
        rest, word, bits = found
        count = count_bits(bits)
        beyond = there & (rest >= count) & (word + 1 < words)
        rest, word = jnp.where(beyond, rest - count, rest), word + beyond.astype(jnp.int32)
        more = launch.load(words_ref, first + word, beyond, jnp.uint32(0))
        return rest, word, jnp.where(beyond, more, bits)

    if form.row > 1:
        rest, word, bits = lax.fori_loop(0, form.row - 1, further, (rest, word, bits))
    place = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = bits & np.uint32((1 << half) - 1)
        count = count_bits(low)
        above = rest >= count
        place, rest = (
            jnp.where(above, place + half, place),
            jnp.where(above, rest - count, rest),
        )
        bits = jnp.where(above, bits >> half, low)
    return word * 32 + place


def turns_of(units):
    """The seed and the weight of each bit by which a slot is turned, uint32 [2 * bits]."""
    if units is None or units.parts == 1:
        return jnp.zeros(2, jnp.uint32)
    seeds = striping.turn_seeds(units.parts, units.seed)
    weights = [(1 << k) % units.parts for k in range(seeds.size)]
    return jnp.asarray(np.concatenate([seeds, weights]).astype(np.uint32))


def striped_unit(part, slot, turns_ref, form):
    """`striping.invert`: the unit of each slot of a part."""
    parts, bits = form.parts, turns_ref.shape[0] // 2

    def add_bit(k, turn):
        words = hashing.mix32((slot >> 5).astype(jnp.uint32), turns_ref[k])
        one = words >> (slot & 31).astype(jnp.uint32) & 1
        return turn + (one * turns_ref[bits + k]).astype(jnp.int32)

    turn = lax.fori_loop(0, bits, add_bit, jnp.zeros_like(slot))
    column = lax.rem(part + parts - lax.rem(turn, parts), parts)
    return column * form.column + slot
