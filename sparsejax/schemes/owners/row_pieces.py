"""Reduce-scatters of listed rows to the ranks that hold shards of their tables.

On the wire, with n ranks and a capacity of K rows on each:

    agree   one pmax of two numbers: the rows of the fullest part of any rank, and the most
            rows of any rank
    push    all_to_all of slots and rows: to each rank those of its piece

Rank i has the i-th of n equal ranges of the rows of each table: its piece. Pieces are not
hashed, so they may be uneven. So a message has a capacity for all rows that a rank lists,
and one of several sizes, down to an n-th of that; all ranks take the smallest that holds
the fullest part. Each row is summed by the only rank that needs it.
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
from sparsejax.units.stacked import by_table, stacked, starts_of
from sparsejax.wire.collectives import Wire
from sparsejax.wire.sizes import Sizes


def scatter(tables: Sequence[RowGrads], wire: Wire) -> base.SummedRows:
    """Returns this rank's piece of the sums of listed rows, and the traffic.

    Args:
        tables: This rank's rows of each table, all of one width and dtype; ids may repeat.
            The number of ranks divides the number of rows of each table.
        wire: The ranks, and the dtype in which rows travel.

    Returns:
        For each table all rows of the piece that any rank has listed, with distinct,
        ascending ids, which count from the first row of the piece.
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
    """Returns an empty list of rows of a piece; with one rank, the list itself."""
    if ranks == 1:
        return grads
    height = grads.shape[0] // ranks
    ids = jnp.full(grads.ids.shape, height, jnp.int32)
    return RowGrads(ids, grads.rows, (height, *grads.shape[1:]))


@dataclasses.dataclass(frozen=True)
class _PieceExchange:
    """The exchange of listed rows by pieces: the lists, and its static properties."""

    tables: tuple[RowGrads, ...]
    wire: Wire

    @functools.cached_property
    def heights(self) -> list[int]:
        """The number of rows of a piece of each table."""
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
        # Rounded to the dtype of the wire, as the sums of other exchanges are.
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
        """Returns the key of each listed row, part * width + slot; n * width for none."""
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
        """Splits the list of all tables into the rows of each table's piece."""
        pairs = zip(self.tables, self.heights, strict=True)
        rooms = [min(self.wire.ranks * x.capacity, height) for x, height in pairs]
        found = by_table(slots, sums, self.heights, rooms)
        return [
            RowGrads(ids, rows.reshape(-1, *x.shape[1:]), (height, *x.shape[1:]))
            for (ids, rows), x, height in zip(found, self.tables, self.heights, strict=True)
        ]
