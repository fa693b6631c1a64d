"""Rows that are listed, to their owners and back: nothing is of the order of the table.

On the wire, with n ranks and room for K rows on each:

    agree   one pmax of two numbers: the fullest part of any rank, and its rows in all
    push    all_to_all of slots and rows: to each rank those that it owns
    agree   one pmax: the rows of the owner that has most
    pull    all_gather of slots and sums, from each rank to all

The push is that of `row_push`. Each row is added up in one place and copied from there, so
all ranks hold the same bits.

Several tables are one exchange: an owner's slots are those that it has of the first table,
then of the second, and so on. So what it holds of a table is one run of its list, and is
cut out where it arrives.

Messages have one of a few sizes (`row_lists`), and take the smallest that the fullest part
fits. A hash fills parts evenly (Zen, Theorem 2), so there is room for the mean and six
standard deviations, in a message and for each table in it; lists that are fuller, as of ids
that somebody made to collide, go to all ranks instead, as they are, and each adds them up
in the order of the ranks. No row is left out, and no array of the table's size is made on
either way.

On GPUs what all ranks send is received in runs (`row_lists`): of the sums of one table some
rows at a time, of lists that go to all ranks some numbers of every row. The sums of several
tables come as one list, from which each is cut.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference.ordered import add_repeated
from sparsejax import axes
from sparsejax.axes import as_varying, axis_names, varying_axes
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.owners.counts import imbalance
from sparsejax.schemes.owners.row_push import RowPush, RowsByOwner
from sparsejax.schemes.row_lists import Lists
from sparsejax.units.indices import check_numbered, in_range
from sparsejax.units.merging import union
from sparsejax.units.ownership import Layout, Ownership, StripedHash
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.stacked import apart, stacked, starts_of
from sparsejax.units.units import wide
from sparsejax.wire import channels
from sparsejax.wire.collectives import Wire


def add_up(
    tables: Sequence[RowGrads], wire: Wire, ownership: Ownership = StripedHash()
) -> base.SummedRows:
    """The sums of listed rows over the ranks, the same on all, and what was sent for them.

    Args:
        tables: This rank's rows of each table, all of one width and dtype; ids may repeat.
        wire: The ranks, and the dtype in which rows travel.
        ownership: Who owns which row of a table; one without tables of its own.

    Returns:
        For each table rows of distinct ids, with room for all that ranks list: about as
        many from each owner.
    """
    if row_lists.is_trivial(tables, wire):
        return row_lists.of_one_rank(tables, wire)
    row_lists.check_listed(sum(table.capacity for table in tables), wire)
    each = [
        _OwnedTable(table, ownership.over(table.shape[0], wire.ranks)) for table in tables
    ]
    exchange = _RowExchange(tuple(each), wire)
    check_numbered(
        f"tables of {[table.shape[0] for table in tables]} rows", exchange.nowhere
    )
    return exchange()


@dataclasses.dataclass(frozen=True)
class _OwnedTable:
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
    def capacity(self) -> int:
        """Rows of its sum that there is room for."""
        return self.layout.ranks * max(
            self.owned, min(self.grads.capacity, self.layout.width)
        )

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


def room_of(capacity: int, ranks: int, width: int) -> int:
    """Rows in a part of a list: the mean, and six standard deviations."""
    mean = capacity / ranks
    room = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    return min(room, capacity, width)


def owned_of(room: int, ranks: int, width: int) -> int:
    """Rows that an owner has room for: all that fit into its messages."""
    return min(ranks * room, width)


def bytes_to_all(listed: int, ranks: int, row_bytes: int) -> float:
    """Bytes that one rank sends where lists go to all as they are: keys, then rows."""
    return float((ranks - 1) * listed * (4 + row_bytes))


@dataclasses.dataclass(frozen=True)
class _RowExchange:
    """The exchange of lists of rows: what is fixed when traced, and the lists."""

    tables: tuple[_OwnedTable, ...]
    wire: Wire

    @property
    def ranks(self) -> int:
        """How many owners there are."""
        return self.wire.ranks

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
        return self.ranks * self.width

    @functools.cached_property
    def grads(self) -> RowGrads:
        """The rows of all tables, one under another."""
        return stacked([table.grads for table in self.tables])

    @functools.cached_property
    def room(self) -> int:
        """Rows in a message, at most."""
        return room_of(self.grads.capacity, self.ranks, self.width)

    @property
    def lists(self) -> Lists:
        """How lists travel."""
        return Lists(self.wire, self.grads)

    def __call__(self) -> base.SummedRows:
        grads, height = self.grads, self.grads.shape[0]
        lists = self._listed()
        in_part = jnp.sum(lists.counts, axis=1, dtype=jnp.int32)
        # A table that does not fit counts as a part that does not.
        rooms = jnp.array([table.room for table in self.tables], jnp.int32)
        fuller = jnp.where(jnp.any(lists.counts > rooms), self.room + 1, 0)
        here = jnp.stack([jnp.maximum(jnp.max(in_part), fuller), jnp.sum(in_part)])
        (fullest, most), agreed = self.wire.maximum(here)
        found, push, pull, more = axes.cond(
            fullest <= self.room,
            functools.partial(self._by_owners, fullest=fullest, most=most),
            functools.partial(self._to_all, most=most),
            lists.keys,
            lists.of_row,
            lists.starts[:, 0],
            grads.rows,
        )
        totals = [t.total(*each) for t, each in zip(self.tables, found, strict=True)]
        counts = [jnp.sum(t.ids < t.shape[0]) for t in totals]
        after = functools.reduce(jnp.add, counts).astype(jnp.float32)
        pull = pull._replace(payload=pull.payload * after)
        traffic = base.traffic(
            push._replace(imbalance=imbalance(fullest, most, self.ranks)),
            pull,
            scalars=agreed + more,
            dense=self.wire.dense_bytes(grads.size, grads.dtype),
            before=most.astype(jnp.float32) / height,
            after=after / height,
        )
        return base.SummedRows(self.wire.assume_same(totals), traffic)

    def _listed(self) -> RowsByOwner:
        """The rows of this rank by owner, equal ones once."""
        keys = []
        for table, start in zip(self.tables, self.starts[:-1], strict=True):
            inside, parts, slots = table.keys()
            place = parts * self.width + (start + slots)
            keys.append(jnp.where(inside, place, self.nowhere))
        return RowsByOwner.of(jnp.concatenate(keys), self.starts, self.ranks)

    def _by_owners(self, keys, of_row, starts, rows, *, fullest, most):
        """Push, add up, pull."""
        n = self.ranks
        held = owned_of(self.room, n, self.width)
        push = RowPush(self.lists, self.width, self.room, held)
        owned, sums, pushed = push(keys, of_row, starts, rows, fullest)
        slots, sums, pulled, messages, agreed = self._pull(owned, sums)
        push = base.stage(pushed, (n - 1) / n * self.lists.row_bytes * most, 1)
        pull = base.stage(pulled, (n - 1) / n * self.lists.row_bytes, messages)
        return self._of_owners(slots, sums), push, pull, agreed

    def _pull(self, owned, sums):
        """The slots and sums of all owners, bytes, messages, and bytes to agree on them."""
        count, agreed = self.wire.maximum(jnp.sum(owned < self.width, dtype=jnp.int32))
        channel = channels.pull(self.wire)
        if self.wire.at_once and len(self.tables) == 1:
            return *self.lists.place(channel, owned, sums, count, self.width), agreed
        sent = self.lists.send(channel, owned[None], sums[None], count, self.width)
        return *sent, 1, agreed

    def _of_owners(self, slots, sums):
        """Each table's places and rows, from the lists of all owners [ranks, owned]."""
        widths = [table.layout.width for table in self.tables]
        rooms = [table.owned for table in self.tables]
        cut = jax.vmap(lambda slots, sums: apart(slots, sums, widths, rooms))
        part = lax.broadcasted_iota(jnp.int32, (self.ranks, 1), 0)
        found = []
        for table, (own, rows) in zip(self.tables, cut(slots, sums), strict=True):
            width = table.layout.width
            places = jnp.where(own < width, part * width + own, table.slots)
            found.append(self._padded(table, (places.reshape(-1), rows)))
        return found

    def _to_all(self, keys, of_row, starts, rows, *, most):
        """All lists to all ranks, each of which adds them up in the order of the ranks."""
        del starts
        n, size, dtype = self.ranks, keys.size, self.lists.dtype
        merged = jnp.zeros(rows.shape, wide(rows.dtype))
        merged = add_repeated(merged, of_row, rows)
        merged = merged.astype(dtype).reshape(size, -1)
        keys, _ = self.wire.all_gather(self._by_table(keys))
        rooms = [table.capacity for table in self.tables]
        slots = [table.slots for table in self.tables]
        capacity = min(n * size, sum(rooms))
        listed, of_row = union(keys, capacity, self.nowhere)

        def added_up(rows):
            gathered, _ = self.wire.all_gather(rows)
            total = self.lists.add_up(of_row, gathered, capacity)
            found = apart(listed, total.astype(dtype), slots, rooms)
            return list(map(self._padded, self.tables, found))

        # Some numbers of all rows at a time: each is added up in the order of the ranks.
        width, row_bytes = merged.shape[1], merged.shape[1] * dtype.itemsize
        of_all = n * size * dtype.itemsize
        some = row_lists.length_of_runs(self.wire, width, of_all, sum(rooms) * row_bytes)
        runs = -(-width // some)
        found = added_up(merged) if runs == 1 else self._by_runs(added_up, merged, some)
        # The last run has numbers of the one before.
        taken = runs * (some if runs > 1 else width) * dtype.itemsize
        needed = bytes_to_all(1, n, row_bytes) * most
        push = base.stage(bytes_to_all(size, n, taken), needed, runs)
        return found, push, base.stage(), 0.0

    def _by_runs(self, added_up, merged, some):
        """What `added_up` makes of all numbers of the rows, of some of them at a time."""
        width = merged.shape[1]
        others = varying_axes(merged) - frozenset(axis_names(self.wire.axis))

        def turn(run, found):
            # The last run ends where the rows do, and has numbers of the one before.
            first = jnp.minimum(run * some, width - some)
            # A gather: see `Owned._by_runs`.
            taken = first + lax.iota(jnp.int32, some)
            own = merged.at[:, taken].get(mode="promise_in_bounds", unique_indices=True)
            more = added_up(own)
            put = lambda of, run: lax.dynamic_update_slice(of, run, (0, first))
            pairs = zip(found, more, strict=True)
            return [(places, put(of, run)) for (_, of), (places, run) in pairs]

        empty = []
        for table in self.tables:
            rows = jnp.zeros((table.capacity, width), table.grads.dtype)
            pair = jnp.zeros(table.capacity, jnp.int32), rows
            empty.append(as_varying(pair, others))
        return lax.fori_loop(0, -(-width // some), turn, empty)

    def _by_table(self, keys):
        """Keys in the order of the tables, then of the owners; still those of a rank."""
        if len(self.tables) == 1:
            return keys
        parts, slots = keys // self.width, keys % self.width
        starts = jnp.array(self.starts[:-1], jnp.int32)
        number = jnp.searchsorted(starts, slots, side="right") - 1
        widths = jnp.array([table.layout.width for table in self.tables], jnp.int32)
        place = parts * widths[number] + slots + (self.ranks - 1) * starts[number]
        return jnp.where(keys < self.nowhere, place, self.nowhere)

    def _padded(self, table, found):
        """Places and rows of numbers, in lists of the capacity that both ways have."""
        places, rows = found
        more = table.capacity - places.size
        rows = rows.reshape(places.size, -1).astype(table.grads.dtype)
        rows = jnp.pad(rows, ((0, more), (0, 0)))
        return jnp.pad(places, (0, more), constant_values=table.slots), rows
