"""Packs and unpacks messages tile by tile, one part after another: for CPUs.

`messages` describes the format. The loops go over the entries of one part after another, a
tile at a time, so their cost grows with the number of entries and not with the capacity.
Tiles are written from last to first: a whole tile may write past the end of its lanes, into
the values of earlier entries, which are written afterwards.

Both a set to send and a string received are the bits of one part, in which the bits of
consecutive ranks are searched. All searches in sets have the same shapes, in push and pull,
for one part or many, so XLA compiles their kernels once. So have all searches in strings,
which are as long as sets where a message may be a bitmap. (Packing all parts at once took
two fifths more kernels. Searching a string that is padded to the length of a set takes
twice the time.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.types import as_varying, varying_axes, without_types
from sparsejax.branches import alone, at_number
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire import formats, index_codes
from sparsejax.wire.formats import Form, Places


class TileRun(NamedTuple):
    """The ranks of the entries of a message, and its offsets: the same for all parts.

    Attributes:
        first: int32 [], the rank of the first entry in the order of the slots of a part.
        length: int32 [], the most entries of a message.
        row: int32 [places], the offsets of the parts of the message: see `Form.places`.
    """

    first: jax.Array
    length: jax.Array
    row: jax.Array


def pack(
    form: Form, slots: Slots, source: Source, run: TileRun, axes: frozenset[str]
) -> jax.Array:
    """Packs a run of entries of each part into one message each; see `at_once.pack`."""
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
            # The sum is taken here, so that `_search` has one number, as in `unpack`.
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
            # The bits are last: XLA copies a message if a write follows a scatter into it.
            return number - 1, formats.mark(message, part, places, found, at, here)

        header = lax.bitcast_convert_type(count, jnp.uint32)[None, None]
        message = formats.put(message, header, part, 0)
        return part + 1, _from_last(here, tile, one_tile, message)

    start = jnp.zeros((form.rows, form.room), jnp.uint32)
    return as_varying(_each(len(counts), one_part, start), axes)


def _each(count, one, start):
    """Applies `one` to (number, result) for each number below a count, in a loop.

    A barrier hides the count from XLA. Otherwise XLA would inline a loop of a single turn
    into its surroundings, and compile other kernels for one part than for several.
    """
    (count,) = lax.optimization_barrier((jnp.int32(count),))
    _, result = lax.while_loop(lambda state: state[0] < count, one, (jnp.int32(0), start))
    return result


def _from_last(entries, tile, one_tile, start):
    """Applies `one_tile` to (number, result) for each tile of entries, from the last."""
    last = lax.div(entries + (tile - 1), np.int32(tile)) - 1
    return lax.while_loop(lambda state: state[0] >= 0, one_tile, (last, start))[1]


def _search(index, first, tile):
    """Returns the positions of the bits of ranks first, first + 1, ...: int32 [tile]."""
    return bits.select(index, first[None], length=tile)[0]


def unpack(
    form: Form,
    message: jax.Array,
    counts: jax.Array,
    run: TileRun,
    fold: Any,
    carry: Any,
) -> Any:
    """Folds the entries of the messages received, in order; see `at_once.unpack`."""
    ladder, tile = form.ladder, form.ladder.tile
    # The messages vary, and so may the carry, such as places that differ by rank.
    types = jax.tree.map(varying_axes, carry)
    axes = frozenset[str]().union(varying_axes(message), *jax.tree.leaves(types))
    plain = lambda *given: without_types(given, axes)
    message, counts, first, length, row, carry = plain(message, counts, *run, carry)

    def one_sender(state):
        sender, carry = state
        cut = functools.partial(formats.cut, message, sender)
        index = bits.rank_index(cut(1, form.longest)[0], lanes=tile)
        here = jnp.clip(at_number(counts, sender) - first, 0, length)

        # From the last tile to the first, as in `pack`.
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
