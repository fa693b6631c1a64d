"""Messages of rows, unpacked in the order of the array by one pass over it.

A scatter of rows into zeros writes twice where rows are not zero. Here entry numbers are
scattered instead, into a table with one for each row of the array, or one for each sender,
which is small beside the row. Then each row of the array looks up its entry, reads the
values, and is written once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.reference.layout import Run, from_words
from pallas_kernels.reference.messages import padded, read_slots
from pallas_kernels.reference.ordered import unique_places
from pallas_kernels.reference.specs import MessageSpec


def set_rows(
    like: jax.Array,
    message: jax.Array,
    numbers: jax.Array,
    spec: MessageSpec,
    prefix: int,
    begin: int,
) -> jax.Array:
    """Returns an array of the rows of messages at their places, and of zeros elsewhere.

    Args:
        like: [size, ...], an array of the shape and dtype of the result.
        message: uint32 [senders, words], messages of one size; no two rows have one place.
        numbers: int32 [numbers], as for `unpack_message`.
        spec: The static properties of messages of all sizes.
        prefix: The most words that precede the values of a message of any size. The same
            kernels read them for all sizes.
        begin: The offset of the values in messages of this size, in words.
    """
    places, size = _places(message, numbers, spec, prefix, len(like)), len(like)
    entries = _entries_at(places.reshape(-1), size)
    rank = jnp.maximum(entries, 0)
    sender, rank = lax.div(rank, np.int32(spec.room)), lax.rem(rank, np.int32(spec.room))
    rows = _taken(_values(message, spec, begin, like), sender, rank)
    return _where(entries >= 0, rows.astype(like.dtype))


def sum_of_rows(
    like: jax.Array,
    message: jax.Array,
    numbers: jax.Array,
    spec: MessageSpec,
    prefix: int,
    begin: int,
) -> jax.Array:
    """Returns the sum of the rows of messages, added to zero in the order of the senders.

    For the arguments see `set_rows`; rows of several senders may have one place.
    """
    senders, size = len(message), len(like)
    places = _places(message, numbers, spec, prefix, size)
    sender = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    # A line of the table has the entries of all senders at one place.
    places = jnp.where(places < size, places * senders + sender, size * senders)
    entries = _entries_at(places.reshape(-1), size * senders).reshape(size, senders)
    is_there, entries = entries >= 0, jnp.maximum(entries, 0)
    values = _values(message, spec, begin, like)

    def of_sender(number):
        rank = jnp.maximum(entries[:, number] - number * spec.room, 0)
        rows = _taken(values, number, rank).astype(like.dtype)
        return _where(is_there[:, number], rows)

    first = of_sender(0)
    # A sum that begins with zero is never -0.0, but XLA removes an addition of zero.
    total = jnp.where(first == 0, 0, first)
    for number in range(1, senders):
        total = total + of_sender(number)
    return total


def _places(message, numbers, spec, prefix, size):
    """Returns the places of entries in the array, int32 [senders, room]; else `size`."""
    head = padded(message[:, :prefix], prefix)
    slots, is_there = read_slots(head, Run.of(numbers, spec), spec)
    sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    units = spec.units
    places = slots if units is None else units(sender, jnp.where(is_there, slots, 0))
    return jnp.where(is_there & (places < size), places, size)


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


def _values(message, spec, begin, like):
    """Returns the values of messages, [senders, k, ...], in the dtype of the wire."""
    values = from_words(message[:, begin:], spec.dtype)
    return values.reshape(len(message), -1, *like.shape[1:])


def _taken(values, sender, rank):
    """Returns the values of entries, by sender and rank; both must be in bounds."""
    # With one sender for all entries XLA would copy the values of that sender.
    sender = jnp.broadcast_to(sender, rank.shape)
    inside = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return values.at[sender, rank].get(**inside)


def _where(is_there, rows):
    return jnp.where(is_there.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
