"""Messages of rows unpacked in the order of the array, in one pass over it.

Zeros into which rows are scattered are written twice where there are rows. Here a table
with a number or a few for each row of the array, which is small beside the row, is
scattered instead: the number says which entry of the messages the row takes. Then each row
of the array reads its number, and its values, and is written once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.reference.layout import Run, from_words
from pallas_kernels.reference.messages import padded, read_slots
from pallas_kernels.reference.ordered import apart
from pallas_kernels.reference.specs import MessageSpec


def set_rows(
    like: jax.Array,
    message: jax.Array,
    numbers: jax.Array,
    spec: MessageSpec,
    prefix: int,
    begin: int,
) -> jax.Array:
    """The array with the rows of messages, no two at one place, and zeros elsewhere.

    Args:
        like: [size, ...], of the shape and dtype of the result.
        message: uint32 [senders, words], of one size.
        numbers: As for `unpack_message`.
        spec: What is static, of messages of all sizes.
        prefix: Words that come before values in messages of any size: what is read of them
            is read by the same kernels for all.
        begin: The word at which values begin, in messages of this size.
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
    """The ordered sum of the rows of messages, one sender after another, from zero.

    For the arguments see `set_rows`.
    """
    senders, size = len(message), len(like)
    places = _places(message, numbers, spec, prefix, size)
    sender = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    # One line of the table has what is at one place of each sender.
    places = jnp.where(places < size, places * senders + sender, size * senders)
    entries = _entries_at(places.reshape(-1), size * senders).reshape(size, senders)
    is_there, entries = entries >= 0, jnp.maximum(entries, 0)
    values = _values(message, spec, begin, like)

    def of_sender(number):
        rank = jnp.maximum(entries[:, number] - number * spec.room, 0)
        rows = _taken(values, number, rank).astype(like.dtype)
        return _where(is_there[:, number], rows)

    first = of_sender(0)
    # What is added to zero is never -0.0, and XLA leaves such an addition out.
    total = jnp.where(first == 0, 0, first)
    for number in range(1, senders):
        total = total + of_sender(number)
    return total


def _places(message, numbers, spec, prefix, size):
    """Where in an array entries are, int32 [senders, room]; `size` of those not there."""
    head = padded(message[:, :prefix], prefix)
    slots, is_there = read_slots(head, Run.of(numbers, spec), spec)
    sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    units = spec.units
    places = slots if units is None else units(sender, jnp.where(is_there, slots, 0))
    return jnp.where(is_there & (places < size), places, size)


def _entries_at(places, size):
    """For each place the number of the entry that has it, int32 [size]; -1 if none has."""
    # Filled with a number of its own: of equal arrays XLA makes one, and copies of it.
    nothing = jnp.minimum(places[0], 0) - 1
    entries = lax.iota(jnp.int32, len(places))
    return (
        jnp.broadcast_to(nothing, size)
        .at[apart(places, size)]
        .set(entries, mode="drop", unique_indices=True, wrap_negative_indices=False)
    )


def _values(message, spec, begin, like):
    """The values of messages, [senders, k, ...], as they travel."""
    values = from_words(message[:, begin:], spec.dtype)
    return values.reshape(len(message), -1, *like.shape[1:])


def _taken(values, sender, rank):
    """Rows of values; of an entry that is not there the first."""
    # Else XLA would copy the values of each sender.
    sender = jnp.broadcast_to(sender, rank.shape)
    inside = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return values.at[sender, rank].get(**inside)


def _where(is_there, rows):
    return jnp.where(is_there.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
