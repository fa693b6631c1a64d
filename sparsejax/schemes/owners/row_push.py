"""Sends listed rows to their owners, which add them up.

On the wire, with n ranks:

    push    all_to_all of slots and rows: to each rank those that it owns

A rank sorts the rows that it lists by owner and slot, which also brings equal ids together,
and adds each row to its place in the messages. An owner does the same with the rows that it
receives. A listed row counts as present even if it is zero: an optimizer takes its step for
a row that was read.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference.ordered import add_repeated, add_senders
from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes.row_lists import Lists
from sparsejax.units.merging import distinct
from sparsejax.units.stacked import first_at
from sparsejax.units.units import wide
from sparsejax.wire import channels, ordered


@dataclasses.dataclass(frozen=True)
class RowsByOwner:
    """A rank's rows by owner.

    Attributes:
        keys: int32 [K], the distinct rows as part * width + slot, ascending, padded with
            the sentinel parts * width.
        of_row: int32 [K], the index in `keys` of each listed row; K if it has no key.
        starts: int32 [parts, tables + 1], the offsets in `keys` of each part and table, and
            the end of each part.
    """

    keys: jax.Array
    of_row: jax.Array
    starts: jax.Array

    @classmethod
    def of(cls, keys: jax.Array, starts: Sequence[int], ranks: int) -> "RowsByOwner":
        """Sorts the keys of listed rows, and removes repeats.

        Args:
            keys: int32 [K], in any order, with repeats.
            starts: The offsets of the slots of each table in a part, and their end.
            ranks: The number of parts.
        """
        listed, of_row = distinct(keys, keys.size, ranks * starts[-1])
        part = lax.broadcasted_iota(jnp.int32, (ranks, 1), 0)
        bounds = part * starts[-1] + jnp.array(starts, jnp.int32)
        return cls(listed, of_row, first_at(listed, bounds))

    @property
    def counts(self) -> jax.Array:
        """int32 [parts, tables], the number of rows of each part and table."""
        return self.starts[:, 1:] - self.starts[:, :-1]


def in_messages(
    keys: jax.Array, starts: jax.Array, width: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the place of each key in the messages to all parts, and their slots.

    Args:
        keys: int32 [K], as in `RowsByOwner`.
        starts: int32 [parts], the offsets in `keys` of each part.
        width: The number of slots of a part.
        room: The capacity of a message, in rows.

    Returns:
        The places, int32 [K], with the sentinel parts * room for no row; and the slots,
        int32 [parts, room], with the sentinel `width` for no row.
    """
    n = starts.size
    parts = jnp.minimum(keys // width, n - 1)
    column = lax.iota(jnp.int32, keys.size) - starts[parts]
    place = jnp.where(keys < n * width, parts * room + column, n * room)
    slots = jnp.full(n * room, width, jnp.int32)
    return place, slots.at[place].set(keys % width, mode="drop").reshape(n, room)


@dataclasses.dataclass(frozen=True)
class RowPush:
    """The push of lists, with its static properties.

    Attributes:
        lists: The format of messages of lists.
        width: The number of slots of a part.
        room: The capacity of a message, in rows.
        held: The capacity of an owner, in rows.
    """

    lists: Lists
    width: int
    room: int
    held: int

    def __call__(
        self,
        keys: jax.Array,
        of_row: jax.Array,
        starts: jax.Array,
        rows: jax.Array,
        fullest: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sends rows to their owners, and sums those that this rank owns.

        Args:
            keys: int32 [K], as `RowsByOwner.keys`.
            of_row: int32 [K], as `RowsByOwner.of_row`.
            starts: int32 [parts], the offsets in `keys` of each part.
            rows: [K, ...], the rows that this rank lists.
            fullest: int32 [], the rows of the fullest message of all ranks.

        Returns:
            The distinct slots that this rank owns, int32 [held], ascending; their sums,
            [held, numbers]; and the bytes sent.
        """
        n = self.lists.wire.ranks
        slots, values, sent = self._sent(keys, of_row, starts, rows, fullest)
        slots = slots.reshape(-1)
        owned, of_row = distinct(slots, self.held, self.width)
        values = values.reshape(slots.size, -1).astype(wide(rows.dtype))
        # XLA would share constant zeros with the buffer of the messages, and so copy them.
        zero = lax.optimization_barrier(jnp.zeros((), values.dtype))
        sums = jnp.broadcast_to(zero, (owned.size, values.shape[1]))
        sums = as_varying(sums, varying_axes(values))
        if ordered.is_ordered(self.lists.wire, varying_axes(values)):
            # The list of one sender has no row twice.
            of_each = of_row.reshape(n, -1), values.reshape(n, -1, values.shape[1])
            return owned, add_senders(sums, *of_each), sent
        return owned, sums.at[of_row].add(values, mode="drop"), sent

    def _sent(self, keys, of_row, starts, rows, fullest):
        """Returns the slots and rows received from each rank, and the bytes sent."""
        n, room, width = self.lists.wire.ranks, self.room, self.width
        place, slots = in_messages(keys, starts, width, room)
        to = place.at[of_row].get(mode="fill", fill_value=n * room)
        values = jnp.zeros((n * room, *rows.shape[1:]), wide(rows.dtype))
        values = add_repeated(values, to, rows)
        values = values.reshape(n, room, -1)
        push = channels.push(self.lists.wire)
        return self.lists.send(push, slots, values, fullest, width)
