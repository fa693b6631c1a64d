"""Listed rows divided among ranks, each of which sums the rows of its part.

It is the push of `row_push` for several tables in one exchange. The slots of a part are
those of the first table, then those of the second, and so on. So the rows of one table are
consecutive in the list of a part, from which they are sliced.

A hash fills parts evenly (Zen, Theorem 2). So the capacity, of a message and of each table
in it, is the mean plus six standard deviations. Fuller lists, such as those of ids that
were chosen to collide, exceed it, and the caller sends them by another exchange: ranks
agree on `need`, which is then above `room`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.schemes.forecast import owned_of, room_of
from sparsejax.schemes.owners.row_push import RowPush, RowsByOwner
from sparsejax.schemes.row_lists import Lists
from sparsejax.units.indices import check_numbered, in_range
from sparsejax.units.ownership.base import Layout, Ownership
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.stacked import by_table, stacked, starts_of
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class OwnedTable:
    """One table: its rows on this rank, and the owner of each row."""

    grads: RowGrads
    layout: Layout

    @property
    def room(self) -> int:
        """The capacity of a message for this table, in rows."""
        return room_of(self.grads.capacity, self.layout.ranks, self.layout.width)

    @property
    def owned(self) -> int:
        """The capacity of an owner for this table, in rows: that of all messages to it."""
        return owned_of(self.room, self.layout.ranks, self.layout.width)

    @property
    def slots(self) -> int:
        """The number of slots of the table's rows in all parts."""
        return self.layout.ranks * self.layout.width

    def keys(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns which listed ids are in range, and the part and slot of each."""
        ids = in_range(self.grads.ids, self.layout.size)
        inside = ids < self.layout.size
        return inside, *self.layout.assign(jnp.where(inside, ids, 0))

    def total(self, places: jax.Array, rows: jax.Array) -> RowGrads:
        """Returns rows by ids of the table, from rows by places, part * width + slot."""
        rows = rows.reshape(-1, *self.grads.shape[1:])
        width, real = self.layout.width, places < self.slots
        places = jnp.where(real, places, 0)
        ids = self.layout.invert(places // width, places % width)
        return RowGrads(jnp.where(real, ids, self.layout.size), rows, self.grads.shape)

    def places(self, slots: jax.Array) -> jax.Array:
        """Returns places of slots [parts, k], as one list, with sentinel `self.slots`."""
        width = self.layout.width
        part = lax.broadcasted_iota(jnp.int32, (self.layout.ranks, 1), 0)
        return jnp.where(slots < width, part * width + slots, self.slots).reshape(-1)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """Lists of rows by owner, and the static properties of their exchange.

    Attributes:
        tables: This rank's rows of each table, all of one width and dtype.
        wire: The ranks, and the dtype in which rows travel.
    """

    tables: tuple[OwnedTable, ...]
    wire: Wire

    @classmethod
    def of(cls, tables: Sequence[RowGrads], wire: Wire, ownership: Ownership) -> "RowParts":
        """Divides listed rows by an ownership that needs no tables."""
        owned = [OwnedTable(x, ownership.over(x.shape[0], wire.ranks)) for x in tables]
        parts = cls(tuple(owned), wire)
        rows = [table.shape[0] for table in tables]
        check_numbered(f"tables of {rows} rows", parts.nowhere)
        return parts

    @functools.cached_property
    def starts(self) -> list[int]:
        """The offsets of the slots of each table in a part, and their end."""
        return starts_of([table.layout.width for table in self.tables])

    @property
    def width(self) -> int:
        """The number of slots of a part, of all tables."""
        return self.starts[-1]

    @property
    def nowhere(self) -> int:
        """The sentinel key of no row, which is above all other keys."""
        return self.wire.ranks * self.width

    @functools.cached_property
    def grads(self) -> RowGrads:
        """The rows of all tables, concatenated."""
        return stacked([table.grads for table in self.tables])

    @functools.cached_property
    def room(self) -> int:
        """The capacity of a message, in rows."""
        return room_of(self.grads.capacity, self.wire.ranks, self.width)

    @property
    def may_overflow(self) -> bool:
        """Whether lists may have more rows for a part than a message holds."""
        return self.room < min(self.grads.capacity, self.width) or any(
            table.room < min(table.grads.capacity, table.layout.width)
            for table in self.tables
        )

    @property
    def lists(self) -> Lists:
        """The format of messages of lists."""
        return Lists(self.wire, self.grads)

    def listed(self) -> RowsByOwner:
        """Returns the distinct rows of this rank by owner."""
        keys = []
        for table, start in zip(self.tables, self.starts[:-1], strict=True):
            inside, parts, slots = table.keys()
            place = parts * self.width + (start + slots)
            keys.append(jnp.where(inside, place, self.nowhere))
        return RowsByOwner.of(jnp.concatenate(keys), self.starts, self.wire.ranks)

    def need(self, counts: jax.Array) -> jax.Array:
        """Returns the rows of this rank's fullest message, above `room` on an overflow.

        A table may overflow in a message that holds its rows, where other tables list few:
        an owner has no more places for a table than it has room.

        Args:
            counts: int32 [parts, tables], the counts of `listed`.
        """
        in_part = jnp.sum(counts, axis=1, dtype=jnp.int32)
        # An overflow of one table in a part counts as an overflow of the part.
        rooms = jnp.array([table.room for table in self.tables], jnp.int32)
        fuller = jnp.where(jnp.any(counts > rooms), self.room + 1, 0)
        return jnp.maximum(jnp.max(in_part), fuller)

    @property
    def push(self) -> RowPush:
        """The push, which sends each rank the rows of its part."""
        held = owned_of(self.room, self.wire.ranks, self.width)
        return RowPush(self.lists, self.width, self.room, held)

    def cut(self, slots: jax.Array, sums: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Splits the list of a part into the slots and sums of each table."""
        widths = [table.layout.width for table in self.tables]
        return by_table(slots, sums, widths, [table.owned for table in self.tables])
