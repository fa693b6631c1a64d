"""Rows that are listed, divided among ranks: each has the rows of its part, added up.

The push of `row_push`, of several tables in one exchange: a rank's slots are those that it
has of the first table, then of the second, and so on. So what it holds of a table is one
run of its list, and is cut out where it arrives.

A hash fills parts evenly (Zen, Theorem 2), so there is room for the mean and six standard
deviations, in a message and for each table in it. Lists that are fuller, as of ids that
somebody made to collide, do not fit, and the caller sends them in another way: ranks agree
on `need`, which is above `room` then.
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
from sparsejax.units.stacked import apart, stacked, starts_of
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class OwnedTable:
    """One table: its rows on this rank, and who owns which."""

    grads: RowGrads
    layout: Layout

    @property
    def room(self) -> int:
        """Rows of it in a message, at most."""
        return room_of(self.grads.capacity, self.layout.ranks, self.layout.width)

    @property
    def owned(self) -> int:
        """Rows of it that an owner has room for: all that fit into its messages."""
        return owned_of(self.room, self.layout.ranks, self.layout.width)

    @property
    def slots(self) -> int:
        """Places of its rows at all owners."""
        return self.layout.ranks * self.layout.width

    def keys(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Flags the listed ids that the table has; and the part and slot of each."""
        ids = in_range(self.grads.ids, self.layout.size)
        inside = ids < self.layout.size
        return inside, *self.layout.assign(jnp.where(inside, ids, 0))

    def total(self, places: jax.Array, rows: jax.Array) -> RowGrads:
        """Rows by their places, part * width + slot, as rows of the table."""
        rows = rows.reshape(-1, *self.grads.shape[1:])
        width, real = self.layout.width, places < self.slots
        places = jnp.where(real, places, 0)
        ids = self.layout.invert(places // width, places % width)
        return RowGrads(jnp.where(real, ids, self.layout.size), rows, self.grads.shape)

    def places(self, slots: jax.Array) -> jax.Array:
        """The places of slots [parts, k], `slots` where there is none, in one list."""
        width = self.layout.width
        part = lax.broadcasted_iota(jnp.int32, (self.layout.ranks, 1), 0)
        return jnp.where(slots < width, part * width + slots, self.slots).reshape(-1)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """Lists of rows by owner: what is fixed when traced, and the lists.

    Attributes:
        tables: This rank's rows of each table, all of one width and dtype.
        wire: The ranks, and the dtype in which rows travel.
    """

    tables: tuple[OwnedTable, ...]
    wire: Wire

    @classmethod
    def of(cls, tables: Sequence[RowGrads], wire: Wire, ownership: Ownership) -> "RowParts":
        """Divides listed rows by a rule, one without tables of its own."""
        owned = [OwnedTable(x, ownership.over(x.shape[0], wire.ranks)) for x in tables]
        parts = cls(tuple(owned), wire)
        rows = [table.shape[0] for table in tables]
        check_numbered(f"tables of {rows} rows", parts.nowhere)
        return parts

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where the slots of each table begin in a part, and where the last end."""
        return starts_of([table.layout.width for table in self.tables])

    @property
    def width(self) -> int:
        """Slots in a part, of all tables."""
        return self.starts[-1]

    @property
    def nowhere(self) -> int:
        """The key of no row: above all others."""
        return self.wire.ranks * self.width

    @functools.cached_property
    def grads(self) -> RowGrads:
        """The rows of all tables, one under another."""
        return stacked([table.grads for table in self.tables])

    @functools.cached_property
    def room(self) -> int:
        """Rows in a message, at most."""
        return room_of(self.grads.capacity, self.wire.ranks, self.width)

    @property
    def may_overflow(self) -> bool:
        """Whether lists may have more rows for a part than there is room for."""
        return self.room < min(self.grads.capacity, self.width) or any(
            table.room < min(table.grads.capacity, table.layout.width)
            for table in self.tables
        )

    @property
    def lists(self) -> Lists:
        """How lists travel."""
        return Lists(self.wire, self.grads)

    def listed(self) -> RowsByOwner:
        """The rows of this rank by owner, equal ones once."""
        keys = []
        for table, start in zip(self.tables, self.starts[:-1], strict=True):
            inside, parts, slots = table.keys()
            place = parts * self.width + (start + slots)
            keys.append(jnp.where(inside, place, self.nowhere))
        return RowsByOwner.of(jnp.concatenate(keys), self.starts, self.wire.ranks)

    def need(self, counts: jax.Array) -> jax.Array:
        """Rows of this rank's fullest message; above `room` where something does not fit.

        Args:
            counts: int32 [parts, tables], of `listed`.
        """
        in_part = jnp.sum(counts, axis=1, dtype=jnp.int32)
        # A table that does not fit counts as a part that does not.
        rooms = jnp.array([table.room for table in self.tables], jnp.int32)
        fuller = jnp.where(jnp.any(counts > rooms), self.room + 1, 0)
        return jnp.maximum(jnp.max(in_part), fuller)

    @property
    def push(self) -> RowPush:
        """The push, which gives each rank the rows of its part."""
        held = owned_of(self.room, self.wire.ranks, self.width)
        return RowPush(self.lists, self.width, self.room, held)

    def cut(self, slots: jax.Array, sums: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """The slots and sums of each table, of the list of a part."""
        widths = [table.layout.width for table in self.tables]
        return apart(slots, sums, widths, [table.owned for table in self.tables])
