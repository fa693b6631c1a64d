"""Sums of listed rows on hosts of several ranks: inside each host, then across hosts.

On the wire, over the axes (outer, inner), with m ranks inside a host:

    agree   one pmax over both axes: the fullest part of any rank's list
    push    inside, all_to_all of slots and rows: to each rank those of its part
    across  the scheme's `rows` over the outer axis, for each part
    gather  inside, all_gather of slots and sums

So a row that several ranks of a host list is sent to other hosts once, each of a host's m
links carries an m-th, and no array has the size of a table. Parts are a striped hash of the
rows, the same on all hosts. A host's sums are float32 or wider, and are sent to other hosts
in the dtype of the rows.

Each row is summed by one rank of each host, then by the scheme, whose sums have the same
bits on all hosts, and is copied from there. So all ranks hold the same bits.

Lists that exceed the capacity of their parts are sent to all ranks of all hosts instead, by
`row_lists`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax import branches
from sparsejax.schemes import base, row_lists
from sparsejax.schemes.owners.row_parts import RowParts
from sparsejax.units.ownership.base import Ownership
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class HostRows:
    """The exchange of listed rows in two levels, with its static properties.

    Attributes:
        across: The scheme over the outer axis.
        inside: The ownership by which ranks of a host divide the rows of a table.
        wire: All ranks.
        outer: The ranks at the same place of all hosts.
        inner: The ranks of a host.
        mean: Whether sums are divided by the number of all ranks.
    """

    across: base.Scheme
    inside: Ownership
    wire: Wire
    outer: Wire
    inner: Wire
    mean: bool

    def __call__(self, tables: Sequence[RowGrads]) -> base.SummedRows | None:
        """Sums listed rows; returns None if the scheme sends no lists of rows."""
        if row_lists.is_trivial(tables, self.wire):
            return row_lists.of_one_rank(tables, self.wire)
        row_lists.check_listed(sum(table.capacity for table in tables), self.wire)
        parts = RowParts.of(tables, self.inner, self.inside)
        lists = parts.listed()
        fullest, agreed = self.wire.maximum(parts.need(lists.counts))
        operands = lists.keys, lists.of_row, lists.starts[:, 0], parts.grads.rows, fullest
        # Under jit it is traced once, for both its shapes and the branch.
        by_parts = jax.jit(functools.partial(self._by_parts, parts))
        like = jax.eval_shape(by_parts, *operands)
        if like is None:
            return None
        if parts.may_overflow:
            listed = [min(self.wire.ranks * x.capacity, x.shape[0]) for x in tables]
            rooms = list(map(max, listed, (x.capacity for x in like.totals)))
            done = branches.cond(
                fullest <= parts.room,
                lambda tables, *operands: _with_room(by_parts(*operands), rooms),
                lambda tables, *operands: _with_room(self._to_all(tables), rooms),
                list(tables),
                *operands,
            )
        else:
            done = by_parts(*operands)
        traffic = done.traffic._replace(scalars=done.traffic.scalars + agreed)
        return base.SummedRows(self.wire.assume_same(done.totals), traffic)

    def _by_parts(self, parts, keys, of_row, starts, rows, fullest):
        """Pushes rows inside the host, sums them across hosts, and gathers sums inside."""
        slots, sums, pushed = parts.push(keys, of_row, starts, rows, fullest)
        own = []
        for table, (part, values) in zip(parts.tables, parts.cut(slots, sums), strict=True):
            shape = table.layout.width, *table.grads.shape[1:]
            values = values.reshape(-1, *shape[1:]).astype(table.grads.dtype)
            own.append(RowGrads(part, values, shape))
        across = self.across.rows(own, self.outer)
        if across is None:
            return None
        totals, spread = [], 0.0
        for table, total in zip(parts.tables, across.totals, strict=True):
            slots, of_slots = self.inner.all_gather(total.ids)
            rows, of_rows = self.inner.all_gather(self.wire.mean_of(total.rows, self.mean))
            totals.append(table.total(table.places(slots), rows))
            spread += of_slots + of_rows
        counts = [jnp.sum(x.ids < x.shape[0], dtype=jnp.float32) for x in totals]
        traffic = across.traffic._replace(
            density_after=functools.reduce(jnp.add, counts) / parts.grads.shape[0],
            inside=pushed + spread,
        )
        return base.SummedRows(totals, traffic)

    def _to_all(self, tables):
        """Gathers all lists of all ranks."""
        wire = self.wire.narrowed(self.across.wire_dtype)
        return row_lists.gathered(tables, wire, mean=self.mean)


def _with_room(done: base.SummedRows, rooms: Sequence[int]) -> base.SummedRows:
    """Pads the sums to lists of the given capacities."""
    totals = []
    for total, room in zip(done.totals, rooms, strict=True):
        more = room - total.capacity
        ids = jnp.pad(total.ids, (0, more), constant_values=total.shape[0])
        rows = jnp.pad(total.rows, [(0, more)] + [(0, 0)] * (total.rows.ndim - 1))
        totals.append(RowGrads(ids, rows, total.shape))
    return done._replace(totals=totals)
