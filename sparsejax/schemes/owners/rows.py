"""Sums of listed rows by owners, without any array of the table's size.

On the wire, with n ranks and a capacity of K rows on each:

    agree   one pmax of two numbers: the rows of the fullest part of any rank, and the most
            rows of any rank
    push    all_to_all of slots and rows: to each rank those that it owns
    agree   one pmax: the rows of the owner that has most
    pull    all_gather of slots and sums, from each rank to all

The push is that of `row_parts`. Each row is summed by one rank and copied from there, so
all ranks hold the same bits. Several tables are one exchange. For a mean owners divide
their sums; if rows travel in a narrower dtype, the sums are divided once they have arrived.

Messages have one of a few sizes (`row_lists`), the smallest that holds the fullest part.
Lists that exceed the capacity of their parts are sent to all ranks instead, and each rank
adds them up in the order of the ranks. No row is left out in either case.

On GPUs the messages of all ranks are received in runs (`row_lists`): for the sums of one
table some rows at a time, for lists that go to all ranks some columns of all rows. The sums
of several tables are received as one list, which is then split by table.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference.ordered import add_repeated
from sparsejax import branches
from sparsejax.axes import as_varying, axis_names, varying_axes
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.owners.counts import imbalance
from sparsejax.schemes.owners.row_parts import OwnedTable, RowParts
from sparsejax.units.merging import union
from sparsejax.units.ownership import Ownership, StripedHash
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.stacked import by_table
from sparsejax.units.units import wide
from sparsejax.wire import channels
from sparsejax.wire.collectives import Wire, at_once


def add_up(
    tables: Sequence[RowGrads],
    wire: Wire,
    ownership: Ownership = StripedHash(),
    mean: bool = False,
) -> base.SummedRows:
    """Sums listed rows over the ranks; the sums are the same on all ranks.

    Args:
        tables: This rank's rows of each table, all of one width and dtype; ids may repeat.
        wire: The ranks, and the dtype in which rows travel.
        ownership: The rule for the owner of each row; one that needs no tables.
        mean: Whether the sums are divided by the number of ranks.

    Returns:
        For each table rows of distinct ids, with a capacity for all rows that ranks list,
        divided equally among the owners; and the traffic.
    """
    if row_lists.is_trivial(tables, wire):
        return row_lists.of_one_rank(tables, wire)
    row_lists.check_listed(sum(table.capacity for table in tables), wire)
    return _RowExchange(RowParts.of(tables, wire, ownership), mean)()


def bytes_to_all(listed: int, ranks: int, row_bytes: int) -> float:
    """Returns the bytes that one rank sends for an all_gather of keys, and one of rows."""
    return float((ranks - 1) * listed * (4 + row_bytes))


@dataclasses.dataclass(frozen=True)
class _RowExchange:
    """The exchange of lists of rows, by the parts of their owners."""

    parts: RowParts
    mean: bool

    @property
    def wire(self) -> Wire:
        """The ranks, which are the owners."""
        return self.parts.wire

    def __call__(self) -> base.SummedRows:
        parts, grads, ranks = self.parts, self.parts.grads, self.wire.ranks
        height, lists = grads.shape[0], parts.listed()
        here = jnp.stack([parts.need(lists.counts), jnp.sum(lists.counts)])
        (fullest, most), agreed = self.wire.maximum(here)
        found, push, pull, more = branches.cond(
            fullest <= parts.room,
            functools.partial(self._by_owners, fullest=fullest, most=most),
            functools.partial(self._to_all, most=most),
            lists.keys,
            lists.of_row,
            lists.starts[:, 0],
            grads.rows,
        )
        late = self.mean and not self._owners_divide
        found = [(places, self.wire.mean_of(rows, late)) for places, rows in found]
        totals = [t.total(*each) for t, each in zip(parts.tables, found, strict=True)]
        counts = [jnp.sum(t.ids < t.shape[0]) for t in totals]
        after = functools.reduce(jnp.add, counts).astype(jnp.float32)
        pull = pull._replace(payload=pull.payload * after)
        traffic = base.traffic(
            push._replace(imbalance=imbalance(fullest, most, ranks)),
            pull,
            scalars=agreed + more,
            dense=self.wire.dense_bytes(grads.size, grads.dtype),
            before=most.astype(jnp.float32) / height,
            after=after / height,
        )
        return base.SummedRows(self.wire.assume_same(totals), traffic)

    def _by_owners(self, keys, of_row, starts, rows, *, fullest, most):
        """Pushes rows to owners, which sum them, and pulls the sums."""
        each = (self.wire.ranks - 1) / self.wire.ranks * self.parts.lists.row_bytes
        owned, sums, pushed = self.parts.push(keys, of_row, starts, rows, fullest)
        slots, sums, pulled, messages, agreed = self._pull(owned, self._divided(sums))
        push = base.stage(pushed, each * most, 1)
        pull = base.stage(pulled, each, messages)
        return self._of_owners(slots, sums), push, pull, agreed

    def _divided(self, sums):
        """Casts sums to the dtype of the wire, and divides them for a mean."""
        sums = sums.astype(self.parts.lists.dtype)
        return self.wire.mean_of(sums, self.mean and self._owners_divide)

    @property
    def _owners_divide(self):
        """Whether means travel: see `push_pull`."""
        return self.parts.lists.dtype == self.parts.grads.dtype

    def _pull(self, owned, sums):
        """Returns slots and sums of all owners, bytes, messages, and bytes of the pmax."""
        lists, width = self.parts.lists, self.parts.width
        count, agreed = self.wire.maximum(jnp.sum(owned < width, dtype=jnp.int32))
        channel = channels.pull(self.wire)
        if at_once() and len(self.parts.tables) == 1:
            return *lists.place(channel, owned, sums, count, width), agreed
        return *lists.send(channel, owned[None], sums[None], count, width), 1, agreed

    def _of_owners(self, slots, sums):
        """Returns each table's places and rows, from the lists [ranks, owned] of owners."""
        found = []
        of_each = jax.vmap(self.parts.cut)(slots, sums)
        for table, (own, rows) in zip(self.parts.tables, of_each, strict=True):
            found.append(_padded(table, (table.places(own), rows)))
        return found

    def _to_all(self, keys, of_row, starts, rows, *, most):
        """Gathers all lists, and adds them up in the order of the ranks."""
        del starts
        parts, tables = self.parts, self.parts.tables
        n, size, dtype = self.wire.ranks, keys.size, parts.lists.dtype
        merged = jnp.zeros(rows.shape, wide(rows.dtype))
        merged = add_repeated(merged, of_row, rows)
        merged = merged.astype(dtype).reshape(size, -1)
        keys, _ = self.wire.all_gather(self._by_table(keys))
        rooms, slots = list(map(_capacity, tables)), [table.slots for table in tables]
        capacity = min(n * size, sum(rooms))
        listed, of_row = union(keys, capacity, parts.nowhere)

        def added_up(rows):
            gathered, _ = self.wire.all_gather(rows)
            total = parts.lists.add_up(of_row, gathered, capacity)
            found = by_table(listed, self._divided(total), slots, rooms)
            return list(map(_padded, tables, found))

        # Some columns of all rows at a time: each is summed in the order of the ranks.
        width, row_bytes = merged.shape[1], merged.shape[1] * dtype.itemsize
        of_all = n * size * dtype.itemsize
        some = row_lists.length_of_runs(width, of_all, sum(rooms) * row_bytes)
        runs = -(-width // some)
        found = added_up(merged) if runs == 1 else self._by_runs(added_up, merged, some)
        # The last run overlaps the one before.
        taken = runs * (some if runs > 1 else width) * dtype.itemsize
        needed = bytes_to_all(1, n, row_bytes) * most
        push = base.stage(bytes_to_all(size, n, taken), needed, runs)
        return found, push, base.stage(), 0.0

    def _by_runs(self, added_up, merged, some):
        """Applies `added_up` to all columns of the rows, `some` columns at a time."""
        width = merged.shape[1]
        others = varying_axes(merged) - frozenset(axis_names(self.wire.axis))

        def turn(run, found):
            # The last run ends at the last column, and overlaps the one before.
            first = jnp.minimum(run * some, width - some)
            # A gather: see `Owned._by_runs`.
            taken = first + lax.iota(jnp.int32, some)
            own = merged.at[:, taken].get(mode="promise_in_bounds", unique_indices=True)
            more = added_up(own)
            put = lambda of, run: lax.dynamic_update_slice(of, run, (0, first))
            pairs = zip(found, more, strict=True)
            return [(places, put(of, run)) for (_, of), (places, run) in pairs]

        empty = []
        for table in self.parts.tables:
            rows = jnp.zeros((_capacity(table), width), table.grads.dtype)
            pair = jnp.zeros(_capacity(table), jnp.int32), rows
            empty.append(as_varying(pair, others))
        return lax.fori_loop(0, -(-width // some), turn, empty)

    def _by_table(self, keys):
        """Returns a rank's keys, renumbered in the order of tables, then of owners."""
        parts, tables = self.parts, self.parts.tables
        if len(tables) == 1:
            return keys
        owner, slots = keys // parts.width, keys % parts.width
        starts = jnp.array(parts.starts[:-1], jnp.int32)
        number = jnp.searchsorted(starts, slots, side="right") - 1
        widths = jnp.array([table.layout.width for table in tables], jnp.int32)
        place = owner * widths[number] + slots + (self.wire.ranks - 1) * starts[number]
        return jnp.where(keys < parts.nowhere, place, parts.nowhere)


def _capacity(table: OwnedTable) -> int:
    """Returns the capacity of the sum of a table, in rows."""
    ranks, width = table.layout.ranks, table.layout.width
    return ranks * max(table.owned, min(table.grads.capacity, width))


def _padded(table: OwnedTable, found) -> tuple[jax.Array, jax.Array]:
    """Pads places and rows to the capacity of `_capacity`, which both branches return."""
    places, rows = found
    more = _capacity(table) - places.size
    rows = rows.reshape(places.size, -1).astype(table.grads.dtype)
    rows = jnp.pad(rows, ((0, more), (0, 0)))
    return jnp.pad(places, (0, more), constant_values=table.slots), rows
