"""Lists of rows to their owners, which add them up.

On the wire, with n ranks:

    push    all_to_all of slots and rows: to each rank those that it owns

A rank sorts the rows that it lists by owner and slot, which also brings equal ones
together, and writes each where it belongs in the messages, where equal ones add up. An
owner does the same with what arrives. A row counts as present because it is listed, with
any numbers in it: an optimizer takes its step for a row that was read.
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
        keys: int32 [K], the distinct rows as part * width + slot, ascending; the number of
            all slots after the last.
        of_row: int32 [K], where the key of each listed row is; K where there is none.
        starts: int32 [parts, tables + 1], where the keys of each part and table begin, and
            where those of the part end.
    """

    keys: jax.Array
    of_row: jax.Array
    starts: jax.Array

    @classmethod
    def of(cls, keys: jax.Array, starts: Sequence[int], ranks: int) -> "RowsByOwner":
        """Sorts the keys of listed rows, in any order and with repeats.

        Args:
            keys: int32 [K].
            starts: Where the slots of each table begin in a part, and where the last end.
            ranks: How many parts there are.
        """
        listed, of_row = distinct(keys, keys.size, ranks * starts[-1])
        part = lax.broadcasted_iota(jnp.int32, (ranks, 1), 0)
        bounds = part * starts[-1] + jnp.array(starts, jnp.int32)
        return cls(listed, of_row, first_at(listed, bounds))

    @property
    def counts(self) -> jax.Array:
        """int32 [parts, tables]: how many rows each part has of each table."""
        return self.starts[:, 1:] - self.starts[:, :-1]


def in_messages(
    keys: jax.Array, starts: jax.Array, width: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Where each key is in the messages to all parts, and the slots of these messages.

    Args:
        keys: As of `RowsByOwner`.
        starts: int32 [parts], where the keys of each part begin.
        width: Slots in a part.
        room: Rows in a message, at most.

    Returns:
        int32 [K], the number of all places for no row; int32 [parts, room], `width` for
        none.
    """
    n = starts.size
    parts = jnp.minimum(keys // width, n - 1)
    column = lax.iota(jnp.int32, keys.size) - starts[parts]
    place = jnp.where(keys < n * width, parts * room + column, n * room)
    slots = jnp.full(n * room, width, jnp.int32)
    return place, slots.at[place].set(keys % width, mode="drop").reshape(n, room)


@dataclasses.dataclass(frozen=True)
class RowPush:
    """The push of lists: what is fixed when traced.

    Attributes:
        lists: How lists travel.
        width: Slots in a part.
        room: Rows in a message, at most.
        held: Rows that an owner has room for.
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
        """The distinct slots that this rank owns, ascending, their sums, and bytes sent.

        Args:
            keys: As `RowsByOwner.keys`.
            of_row: As `RowsByOwner.of_row`.
            starts: int32 [parts], where the keys of each part begin.
            rows: [K, ...], those that this rank lists.
            fullest: Rows of the fullest message of all ranks.
        """
        n = self.lists.wire.ranks
        slots, values, sent = self._sent(keys, of_row, starts, rows, fullest)
        slots = slots.reshape(-1)
        owned, of_row = distinct(slots, self.held, self.width)
        values = values.reshape(slots.size, -1).astype(wide(rows.dtype))
        # Zeros of which XLA knows, and that the messages begin with too, would be copied.
        zero = lax.optimization_barrier(jnp.zeros((), values.dtype))
        sums = jnp.broadcast_to(zero, (owned.size, values.shape[1]))
        sums = as_varying(sums, varying_axes(values))
        if ordered.is_ordered(self.lists.wire, varying_axes(values)):
            # No row is twice in the list of a sender.
            of_each = of_row.reshape(n, -1), values.reshape(n, -1, values.shape[1])
            return owned, add_senders(sums, *of_each), sent
        return owned, sums.at[of_row].add(values, mode="drop"), sent

    def _sent(self, keys, of_row, starts, rows, fullest):
        """The slots and rows that this rank owns, of each rank, and the bytes sent."""
        n, room, width = self.lists.wire.ranks, self.room, self.width
        place, slots = in_messages(keys, starts, width, room)
        to = place.at[of_row].get(mode="fill", fill_value=n * room)
        values = jnp.zeros((n * room, *rows.shape[1:]), wide(rows.dtype))
        values = add_repeated(values, to, rows)
        values = values.reshape(n, room, -1)
        push = channels.push(self.lists.wire)
        return self.lists.send(push, slots, values, fullest, width)
