"""Messages of rows, unpacked in the order of the array by one pass over it.

A scatter of rows into zeros writes twice where rows are not zero. Here entry numbers are
scattered instead, into a table with one for each row of the array, or one for each sender,
which is small beside the row. Then each row of the array looks up its entry, reads the
values, and is written once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.reference.layout import Run, from_words
from pallas_kernels.reference.messages import padded, read_slots
from pallas_kernels.reference.ordered import unique_places
from pallas_kernels.reference.specs import MessageSpec


class RowMessages(NamedTuple):
    """Messages of rows, all of one size.

    Attributes:
        message: uint32 [senders, words].
        numbers: int32 [numbers], as for `unpack_message`.
        spec: The static properties of messages of all sizes.
        prefix: The most words that precede the values of a message of any size. The same
            kernels read them for all sizes.
        begin: The offset of the values in messages of this size, in words.
    """

    message: jax.Array
    numbers: jax.Array
    spec: MessageSpec
    prefix: int
    begin: int

    def written(self, like: jax.Array) -> jax.Array:
        """Returns an array of the rows at their places, and of zeros elsewhere.

        Args:
            like: [size, ...], an array of the shape and dtype of the result. No two rows
                have one place.
        """
        size, room = len(like), np.int32(self.spec.room)
        entries = _entries_at(self._places(size).reshape(-1), size)
        rank = jnp.maximum(entries, 0)
        rows = _taken(self._values(like), lax.div(rank, room), lax.rem(rank, room))
        return _where(entries >= 0, rows.astype(like.dtype))

    def summed(self, like: jax.Array) -> jax.Array:
        """Returns the sum of the rows, added to zero in the order of the senders.

        Args:
            like: [size, ...], an array of the shape and dtype of the result. Rows of
                several senders may have one place.
        """
        senders, size = len(self.message), len(like)
        places = self._places(size)
        sender = lax.broadcasted_iota(jnp.int32, places.shape, 0)
        # A line of the table has the entries of all senders at one place.
        places = jnp.where(places < size, places * senders + sender, size * senders)
        entries = _entries_at(places.reshape(-1), size * senders).reshape(size, senders)
        is_there, entries = entries >= 0, jnp.maximum(entries, 0)
        values = self._values(like)

        def of_sender(number):
            rank = jnp.maximum(entries[:, number] - number * self.spec.room, 0)
            rows = _taken(values, number, rank).astype(like.dtype)
            return _where(is_there[:, number], rows)

        first = of_sender(0)
        # A sum that begins with zero is never -0.0, but XLA removes an addition of zero.
        total = jnp.where(first == 0, 0, first)
        for number in range(1, senders):
            total = total + of_sender(number)
        return total

    def _places(self, size):
        """Returns the places of entries in an array, int32 [senders, room]; else `size`."""
        spec = self.spec
        head = padded(self.message[:, : self.prefix], self.prefix)
        slots, is_there = read_slots(head, Run.of(self.numbers, spec), spec)
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        units = spec.units
        places = slots if units is None else units(sender, jnp.where(is_there, slots, 0))
        return jnp.where(is_there & (places < size), places, size)

    def _values(self, like):
        """Returns the values, [senders, k, ...], in the dtype of the wire."""
        values = from_words(self.message[:, self.begin :], self.spec.dtype)
        return values.reshape(len(self.message), -1, *like.shape[1:])


def _entries_at(places, size):
    """Returns the number of the entry at each place, int32 [size]; -1 if there is none."""
    # -1 is computed from data: XLA would make one constant for equal arrays, and copy it.
    nothing = jnp.minimum(places[0], 0) - 1
    entries = lax.iota(jnp.int32, len(places))
    return (
        jnp.broadcast_to(nothing, size)
        .at[unique_places(places, size)]
        .set(entries, mode="drop", unique_indices=True, wrap_negative_indices=False)
    )


def _taken(values, sender, rank):
    """Returns the values of entries, by sender and rank; both must be in bounds."""
    # With one sender for all entries XLA would copy the values of that sender.
    sender = jnp.broadcast_to(sender, rank.shape)
    inside = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return values.at[sender, rank].get(**inside)


def _where(is_there, rows):
    return jnp.where(is_there.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
