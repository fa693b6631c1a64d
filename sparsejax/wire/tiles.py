"""Messages packed and unpacked tile by tile, a part after another: for CPUs.

What is in a message is said in `messages`. The work walks over the entries of one part
after another, a tile at a time, so its cost follows the number of entries and not the room
for them. Tiles are written last to first: the bytes with which a whole tile runs over the
end of its lanes lie in the values of earlier entries, which are written after them.

A set that is sent and a string that arrives are both bits of one part, searched for the
bits of a run of ranks. All searches of an exchange's sets, on its way out and back, of one
part or of many, have the same shapes, so XLA compiles their kernels once; so have those of
its strings, which are as long as those of sets where a message may be a bitmap. (All parts
at once took two fifths more kernels. A string in as many words as a set is searched in
twice the time.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import alone
from pallas_kernels.types import as_varying, varying_axes, without_types
from sparsejax.branches import at_number
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire import formats, index_codes
from sparsejax.wire.formats import Form, Places


class TileRun(NamedTuple):
    """Which ranks of each part a message has, and where: the same for all parts.

    Attributes:
        first: The first of them.
        length: How many there are at most.
        row: The places of the parts of the message, as of `Form.places`.
    """

    first: jax.Array
    length: jax.Array
    row: jax.Array


def pack(
    form: Form, slots: Slots, source: Source, run: TileRun, axes: frozenset[str]
) -> jax.Array:
    """Writes a run of ranks of each part into a message of its own; see `at_once.pack`."""
    tile = form.ladder.tile
    plain = lambda *given: without_types(given, axes)
    words, counts, first, length, row = plain(*slots, *run)
    (array,) = plain(source.array)
    source, units_of, names_of = source._replace(array=array), source.units, source.names

    def one_part(state):
        part, message = state
        index = bits.rank_index(at_number(words, part), lanes=tile)
        count = at_number(counts, part)
        here = jnp.clip(count - first, 0, length)

        def one_tile(state):
            number, message = state
            at = number * tile
            # Added up here: what is searched for is one number, as where it is read.
            begin = first + at
            found = alone(number, lambda: _search(index, begin, tile))

            def of_found(places, found=found):
                if places is None:
                    return found
                return alone(number, lambda: plain(places(part, found))[0])

            units, names = of_found(units_of), of_found(names_of)
            values = alone(number, lambda: source.read(units))
            places = Places(row)
            put = functools.partial(formats.put, part=part)
            for plane, (begin, is_sent) in enumerate(places.planes):
                words = index_codes.to_bytes(names[None], plane)
                message = put(message, words, begin=begin + is_sent * (at >> 2))
            words = form.to_words(values.astype(form.dtype)[None])
            message = put(message, words, begin=places.values + form.unit_words(at))
            # Last: XLA copies a message that is scattered into and then written again.
            return number - 1, formats.mark(message, part, places, found, at, here)

        header = lax.bitcast_convert_type(count, jnp.uint32)[None, None]
        message = formats.put(message, header, part, 0)
        return part + 1, _from_last(here, tile, one_tile, message)

    start = jnp.zeros((form.rows, form.room), jnp.uint32)
    return as_varying(_each(len(counts), one_part, start), axes)


def _each(count, one, start):
    """Applies `one` to (number, result) for each number below a count, as one program.

    How many there are is kept from XLA, which makes a loop of a single turn a part of what
    is around it, and then has other kernels to compile for one part than for several.
    """
    (count,) = lax.optimization_barrier((jnp.int32(count),))
    _, result = lax.while_loop(lambda state: state[0] < count, one, (jnp.int32(0), start))
    return result


def _from_last(entries, tile, one_tile, start):
    """Applies `one_tile` to (number, result) for each tile of entries, from the last."""
    last = lax.div(entries + (tile - 1), np.int32(tile)) - 1
    return lax.while_loop(lambda state: state[0] >= 0, one_tile, (last, start))[1]


def _search(index, first, tile):
    """The positions of the bits of ranks first, first + 1, ...: int32 [tile]."""
    return bits.select(index, first[None], length=tile)[0]


def unpack(
    form: Form,
    message: jax.Array,
    counts: jax.Array,
    run: TileRun,
    fold: Any,
    carry: Any,
) -> Any:
    """Folds the entries of the messages received, in turn; see `at_once.unpack`."""
    ladder, tile = form.ladder, form.ladder.tile
    # What vary are the messages, or what a fold has in hand: a rank's own places.
    types = jax.tree.map(varying_axes, carry)
    axes = frozenset[str]().union(varying_axes(message), *jax.tree.leaves(types))
    plain = lambda *given: without_types(given, axes)
    message, counts, first, length, row, carry = plain(message, counts, *run, carry)

    def one_sender(state):
        sender, carry = state
        cut = functools.partial(formats.cut, message, sender)
        index = bits.rank_index(cut(1, form.longest)[0], lanes=tile)
        here = jnp.clip(at_number(counts, sender) - first, 0, length)

        # From the last, as where they are packed: it is the same loop.
        def one_tile(state):
            number, carry = state
            at = number * tile
            places = Places(row)
            rank = at + lax.iota(jnp.int32, tile)
            search = lambda: _search(index, at, tile)
            found = alone(number, search)
            low = jnp.zeros_like(found)
            for plane, (begin, is_sent) in enumerate(places.planes):
                octets = cut(begin + is_sent * (at >> 2), tile // 4)
                low = low | index_codes.from_bytes(octets, plane)[0] * is_sent
            slots = formats.slots_from(places, found, low, rank)
            slots = jnp.where(rank < here, slots, ladder.width)
            words = cut(places.values + form.unit_words(at), form.unit_words(tile))
            values = form.from_words(words, tile)[0]
            return number - 1, *plain(fold.add(carry, sender, slots, values))

        return sender + 1, _from_last(here, tile, one_tile, carry)

    return jax.tree.map(as_varying, _each(len(message), one_sender, carry), types)
