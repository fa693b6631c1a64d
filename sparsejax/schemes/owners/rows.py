"""Rows that are listed, to their owners and back: nothing is of the order of the table.

On the wire, with n ranks and room for K rows on each:

    agree   one pmax of two numbers: the fullest part of any rank, and its rows in all
    push    all_to_all of slots and rows: to each rank those that it owns
    agree   one pmax: the rows of the owner that has most
    pull    all_gather of slots and sums, from each rank to all

A rank sorts the rows that it lists by owner and slot, which also brings equal ones
together, and writes each where it belongs in the messages, where equal ones add up. An
owner does the same with what arrives. A row counts as there because it is listed, whatever
is in it: an optimizer takes its step for a row that was read. Each row is added up in one
place and copied from there, so all ranks hold the same bits.

Messages have one of a few sizes (`row_lists`), and take the smallest that the fullest part
fits. A hash fills parts evenly (Zen, Theorem 2), so there is room for the mean and six
standard deviations; lists that are fuller, as of ids that somebody made to collide, go to
all ranks instead, as they are, and each adds them up in the order of the ranks. No row is
left out, and no array of the table's size is made on either way.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import axes
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.owners.counts import imbalance
from sparsejax.schemes.row_lists import Lists
from sparsejax.units.dtypes import wide
from sparsejax.units.ownership import Layout, Ownership, StripedHash
from sparsejax.units.row_grads import RowGrads, distinct
from sparsejax.wire.collectives import Wire


def add_up(
    grads: RowGrads, wire: Wire, ownership: Ownership = StripedHash()
) -> base.SummedRows:
    """The sum of listed rows over the ranks, the same on all, and what was sent for it.

    Args:
        grads: This rank's rows; ids may repeat.
        wire: The ranks, and the dtype in which rows travel.
        ownership: Who owns which row; one without tables.

    Returns:
        Rows of distinct ids, in the order of their owners, with room for all that ranks
        list: about as many on each.
    """
    if row_lists.is_trivial(grads, wire):
        return row_lists.of_one_rank(grads, wire)
    return _Exchange(grads, wire, ownership.over(grads.shape[0], wire.ranks))()


@dataclasses.dataclass(frozen=True)
class _Listed:
    """A rank's rows by owner.

    Attributes:
        keys: int32 [K], the distinct rows as part * width + slot, ascending; `nowhere`
            behind the last.
        of_row: int32 [K], where the key of each listed row is; K where there is none.
        starts: int32 [parts + 1], where the keys of each part begin.
    """

    keys: jax.Array
    of_row: jax.Array
    starts: jax.Array

    @property
    def counts(self) -> jax.Array:
        """int32 [parts]: how many rows each part has."""
        return self.starts[1:] - self.starts[:-1]


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The exchange of one list of rows: what is fixed when traced, and the list."""

    grads: RowGrads
    wire: Wire
    layout: Layout

    @property
    def nowhere(self) -> int:
        """The key of no row: behind all others."""
        return self.layout.ranks * self.layout.width

    @functools.cached_property
    def room(self) -> int:
        """Rows in a message, at most."""
        mean = self.grads.capacity / self.layout.ranks
        room = math.ceil(mean + 6 * math.sqrt(mean) + 8)
        return min(room, self.grads.capacity, self.layout.width)

    @property
    def owned(self) -> int:
        """Rows that an owner has room for: all that fit into its messages."""
        return min(self.layout.ranks * self.room, self.layout.width)

    @property
    def capacity(self) -> int:
        """Rows of the sum that there is room for."""
        return self.layout.ranks * max(
            self.owned, min(self.grads.capacity, self.layout.width)
        )

    @property
    def lists(self) -> Lists:
        """How lists travel."""
        return Lists(self.wire, self.grads)

    def __call__(self) -> base.SummedRows:
        grads, n, height = self.grads, self.layout.ranks, self.layout.size
        lists = self._listed()
        counts = lists.counts
        here = jnp.stack([jnp.max(counts), jnp.sum(counts)])
        (fullest, most), agreed = self.wire.maximum(here)
        (ids, rows), push, pull, more = axes.cond(
            fullest <= self.room,
            functools.partial(self._by_owners, fullest=fullest, most=most),
            functools.partial(self._to_all, most=most),
            lists.keys,
            lists.of_row,
            lists.starts,
            grads.rows,
        )
        total = RowGrads(ids, rows, grads.shape)
        after = jnp.sum(ids < height).astype(jnp.float32)
        pull = pull._replace(payload=pull.payload * after)
        traffic = base.traffic(
            push._replace(imbalance=imbalance(fullest, most, n)),
            pull,
            scalars=agreed + more,
            dense=self.wire.dense_bytes(grads.size, grads.dtype),
            before=most.astype(jnp.float32) / height,
            after=after / height,
        )
        return base.SummedRows(self.wire.assume_same(total), traffic)

    def _listed(self) -> _Listed:
        """The rows of this rank by owner, equal ones once."""
        ids, height = self.grads.ids, self.layout.size
        inside = (ids >= 0) & (ids < height)
        parts, slots = self.layout.assign(jnp.where(inside, ids, 0).astype(jnp.int32))
        keys = jnp.where(inside, parts * self.layout.width + slots, self.nowhere)
        listed, of_row = distinct(keys, keys.size, self.nowhere)
        bounds = jnp.arange(self.layout.ranks + 1, dtype=jnp.int32) * self.layout.width
        starts = jnp.searchsorted(listed, bounds).astype(jnp.int32)
        return _Listed(listed, of_row, starts)

    def _by_owners(self, keys, of_row, starts, rows, *, fullest, most):
        """Push, add up, pull."""
        n, room, width = self.layout.ranks, self.room, self.layout.width
        # Where each key is in the messages.
        parts = jnp.minimum(keys // width, n - 1)
        column = jnp.arange(keys.size, dtype=jnp.int32) - starts[parts]
        place = jnp.where(keys < self.nowhere, parts * room + column, n * room)
        slots = jnp.full(n * room, width, jnp.int32)
        slots = slots.at[place].set(keys % width, mode="drop")
        to = place.at[of_row].get(mode="fill", fill_value=n * room)
        values = jnp.zeros((n * room, *rows.shape[1:]), wide(rows.dtype))
        values = values.at[to].add(rows.astype(values.dtype), mode="drop")

        slots, values, pushed = self.lists.send(
            self.wire.all_to_all,
            slots.reshape(n, room),
            values.reshape(n, room, -1),
            fullest,
            width,
        )
        slots = slots.reshape(-1)
        owned, of_row = distinct(slots, self.owned, width)
        values = values.reshape(slots.size, -1).astype(wide(rows.dtype))
        sums = jnp.zeros((self.owned, values.shape[1]), values.dtype)
        sums = sums.at[of_row].add(values, mode="drop")
        count, agreed = self.wire.maximum(jnp.sum(owned < width, dtype=jnp.int32))
        gather = lambda message: self.wire.all_gather(message[0])
        slots, sums, pulled = self.lists.send(gather, owned[None], sums[None], count, width)
        part = lax.broadcasted_iota(jnp.int32, (n, 1), 0)
        ids = self.layout.invert(part, jnp.minimum(slots, width - 1))
        ids = jnp.where(slots < width, ids, self.layout.size).reshape(-1)
        push = base.stage(pushed, (n - 1) / n * self.lists.row_bytes * most, 1)
        pull = base.stage(pulled, (n - 1) / n * self.lists.row_bytes, 1)
        return self._padded(ids, sums.reshape(-1, *rows.shape[1:])), push, pull, agreed

    def _to_all(self, keys, of_row, starts, rows, *, most):
        """All lists to all ranks, each of which adds them up in the order of the ranks."""
        del starts
        n, size, dtype = self.layout.ranks, keys.size, self.lists.dtype
        merged = jnp.zeros(rows.shape, wide(rows.dtype))
        merged = merged.at[of_row].add(rows.astype(merged.dtype), mode="drop")
        keys, sent_keys = self.wire.all_gather(keys)
        merged, sent_rows = self.wire.all_gather(merged.astype(dtype))
        owned = min(n * size, self.capacity)
        listed, total = self.lists.add_up(keys, merged, self.nowhere, owned)
        width = self.layout.width
        real = listed < self.nowhere
        parts = jnp.where(real, listed // width, 0)
        ids = self.layout.invert(parts, jnp.where(real, listed % width, 0))
        ids = jnp.where(real, ids, self.layout.size)
        sent = sent_keys + sent_rows
        push = base.stage(sent, sent / size * most, 1)
        return self._padded(ids, total.astype(dtype)), push, base.stage(), 0.0

    def _padded(self, ids, rows):
        """Lists of the capacity that both ways have."""
        more = self.capacity - ids.size
        ids = jnp.pad(ids, (0, more), constant_values=self.layout.size)
        rows = jnp.pad(rows, [(0, more)] + [(0, 0)] * (rows.ndim - 1))
        return ids, rows.astype(self.grads.dtype)
