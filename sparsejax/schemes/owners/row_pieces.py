"""Rows that are listed, to the ranks that hold their tables' shards: a push, and no pull.

On the wire, with n ranks and room for K rows on each:

    agree   one pmax of two numbers: the fullest part of any rank, and its rows in all
    push    all_to_all of slots and rows: to each rank those of its piece

Rank i has the i-th of n equal runs of the rows of each table: its piece. The ids decide how
even pieces are, and no hash. So a message has room for all rows that a rank lists, and one
of several sizes, down to an n-th of that; all ranks take the smallest that the fullest part
fits. Each row is added up in one place, which is the only one that needs it.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from sparsejax.schemes import base, row_lists
from sparsejax.schemes.owners.counts import imbalance
from sparsejax.schemes.owners.row_push import RowPush, RowsByOwner
from sparsejax.schemes.row_lists import Lists
from sparsejax.units.indices import check_numbered, in_range
from sparsejax.units.row_grads import RowGrads
from sparsejax.units.stacked import apart, stacked, starts_of
from sparsejax.wire.collectives import Wire
from sparsejax.wire.sizes import Sizes


def scatter(tables: Sequence[RowGrads], wire: Wire) -> base.SummedRows:
    """This rank's piece of the sums of listed rows, and what was sent for them.

    Args:
        tables: This rank's rows of each table, all of one width and dtype; ids may repeat.
            The ranks divide the rows of each.
        wire: The ranks, and the dtype in which rows travel.

    Returns:
        For each table rows of distinct ids, ascending, that count from the first row of
        the piece: all that any rank has listed of it.
    """
    if row_lists.is_trivial(tables, wire):
        done = row_lists.of_one_rank(tables, wire)
        return done._replace(totals=[_of_piece(x, wire.ranks) for x in done.totals])
    row_lists.check_listed(sum(table.capacity for table in tables), wire)
    exchange = _PieceExchange(tuple(tables), wire)
    heights = [table.shape[0] for table in tables]
    check_numbered(f"tables of {heights} rows", sum(heights))
    return exchange()


def _of_piece(grads, ranks):
    """A list without rows, of a piece."""
    if ranks == 1:
        return grads
    height = grads.shape[0] // ranks
    ids = jnp.full(grads.ids.shape, height, jnp.int32)
    return RowGrads(ids, grads.rows, (height, *grads.shape[1:]))


@dataclasses.dataclass(frozen=True)
class _PieceExchange:
    """The exchange: what is fixed when traced, and the lists."""

    tables: tuple[RowGrads, ...]
    wire: Wire

    @functools.cached_property
    def heights(self) -> list[int]:
        """Rows of a piece of each table."""
        return [table.shape[0] // self.wire.ranks for table in self.tables]

    def __call__(self) -> base.SummedRows:
        n, grads = self.wire.ranks, stacked(self.tables)
        starts = starts_of(self.heights)
        width, room = starts[-1], min(grads.capacity, starts[-1])
        sizes = Sizes.down_to_share(room, n)
        lists = Lists(self.wire, grads, sizes)
        listed = RowsByOwner.of(self._keys(starts), starts, n)
        in_part = jnp.sum(listed.counts, axis=1, dtype=jnp.int32)
        here = jnp.stack([jnp.max(in_part), jnp.sum(in_part)])
        (fullest, most), agreed = self.wire.maximum(here)
        push = RowPush(lists, width, room, held=min(n * room, width))
        keys = listed.keys, listed.of_row, listed.starts[:, 0]
        slots, sums, sent = push(*keys, grads.rows, fullest)
        payload = (n - 1) / n * lists.row_bytes * most
        # Rounded to what travels, as every other way has it.
        sums = sums.astype(lists.dtype).astype(grads.dtype)
        listed = jnp.sum(slots < width, dtype=jnp.int32)
        after = self.wire.maximum(listed)[0].astype(jnp.float32)
        traffic = base.traffic(
            base.stage(sent, payload, 1, imbalance(fullest, most, n)),
            base.stage(),
            scalars=agreed,
            dense=self.wire.dense_bytes(grads.size, grads.dtype) / 2,
            before=most.astype(jnp.float32) / grads.shape[0],
            after=after / width,
        )
        return base.SummedRows(self._cut(slots, sums), traffic)

    def _keys(self, starts):
        """The part and slot of each listed row, as one number; `n * width` for none."""
        width, keys = starts[-1], []
        for table, height, start in zip(
            self.tables, self.heights, starts[:-1], strict=True
        ):
            ids = in_range(table.ids, table.shape[0])
            key = ids // height * width + start + ids % height
            inside = ids < table.shape[0]
            keys.append(jnp.where(inside, key, self.wire.ranks * width))
        return jnp.concatenate(keys).astype(jnp.int32)

    def _cut(self, slots, sums):
        """The rows of each table's piece, from the list of all."""
        pairs = zip(self.tables, self.heights, strict=True)
        rooms = [min(self.wire.ranks * x.capacity, height) for x, height in pairs]
        found = apart(slots, sums, self.heights, rooms)
        return [
            RowGrads(ids, rows.reshape(-1, *x.shape[1:]), (height, *x.shape[1:]))
            for (ids, rows), x, height in zip(found, self.tables, self.heights, strict=True)
        ]
