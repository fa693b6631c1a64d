"""One step of a lazy optimizer, of the rows that gradients list and of all other leaves.

Short lists are updated at once, with all other leaves (`at_once`); there, one row of zeros
takes the place of each long list. Long lists are updated tile by tile in a loop
(`in_tiles`).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.axes import assume_same
from sparsejax.rows import tiles
from sparsejax.rows.apply import after, written
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.replay import added
from sparsejax.rows.updates.shards import every_row
from sparsejax.rows.updates.snapshot import Snapshot
from sparsejax.units.merging import Merge
from sparsejax.units.row_grads import RowGrads


class GradientRows(NamedTuple):
    """The rows that a gradient lists.

    Attributes:
        merge: The distinct ids.
        sums: The gradient of each distinct row.
        caught: These rows caught up to the last step, if missed steps are taken one by one;
            else None, and the step catches them up.
    """

    merge: Merge
    sums: jax.Array
    caught: Rows | None

    @property
    def places(self) -> int:
        """The capacity in rows."""
        return self.merge.ids.shape[0]


def listed(now, at, leaf, due, reading=None):
    """Merges the rows of a gradient with those that are due, or takes those of a reader.

    Args:
        now: The snapshot.
        at: The number of the table.
        leaf: The gradient, `RowGrads`.
        due: int32 [n], the ids of rows that are due, or None.
        reading: The `ReadRows` of the reader, which replaces merging, or None.
    """
    way = now.way(at)
    merge = reading.merge if reading else now.merged(at, leaf.ids, due)
    caught = None
    if way.moves and not way.is_cheap:
        caught = reading.rows if reading else now.caught_up(at, merge)
    return GradientRows(merge, merge.sums(leaf.rows), caught)


def taken(
    step: "OptimizerStep",
    lists: dict[int, GradientRows],
    others: bool = True,
    by_shard: Mapping[int, RowGrads] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Takes a step.

    Args:
        step: The step.
        lists: The rows that gradients list, by the numbers of their tables.
        others: Whether tables that list no rows take the step, too.
        by_shard: Gradients of tables that are updated by shard, in `steps`, and not here.

    Returns:
        The updates, the leaves of the state, and the last steps that rows have seen.
    """
    now = step.now
    long = {at: x for at, x in lists.items() if tiles.is_long(x.places)}
    number = tiles.tiles_of(sum(x.sums.size for x in long.values()))
    long = long if number > 1 else {}
    made, inner, last = step.at_once(lists, long, others, by_shard or {})
    by_type: dict[frozenset[str], dict[int, GradientRows]] = {}
    for at, x in long.items():
        # The carry of a loop has one type. With one loop for each set of varying axes, a
        # table that is equal on all ranks is not typed as varying because of a shard.
        types = tiles.axes_of(x, now.leaves[at], now.all_of(at), now.step)
        by_type.setdefault(types, {})[at] = x
    for some in by_type.values():
        step.in_tiles(some, number, made, inner, last)
    for at, x in lists.items():
        made[at] = RowGrads.marked(x.merge.ids, made[at], step.grads[at].shape)
        # It depends on ids and the step alone, not on the axes that gradients vary over.
        of = tiles.axes_of(now.last[at], x.merge.ids, now.step)
        last[at] = jax.tree.map(functools.partial(same_but_over, of), last[at])
    return made, inner, last


class OptimizerStep:
    """A step of the optimizer.

    Args:
        now: The snapshot of the state and the parameters.
        grads: The leaves of the gradients, which may be `RowGrads`.
        extra: The extra arguments of the optimizer.
    """

    def __init__(self, now, grads, extra):
        self.now, self.grads, self.extra = now, grads, extra

    def at_once(self, lists, long, rest, by_shard):
        """Takes the step of all leaves but long lists, each replaced by a row of zeros.

        Args:
            lists: The rows that the gradient of each table lists.
            long: The long ones among these lists.
            rest: Whether tables that list no rows take the step, too.
            by_shard: See `taken`.

        Returns:
            The updates, the leaves of the state, and the last steps that rows have seen.
        """
        now, short = self.now, {at: x for at, x in lists.items() if at not in long}
        grads, last = list(self.grads), list(now.last)
        before, rows = {}, {}
        for at, x in short.items():
            before[at] = now.gathered(now.all_of(at), x.merge.ids)
            rows[at] = self._caught(at, before[at], x.caught)
            grads[at] = x.sums
        # A table whose gradient is dense in this step lists all its rows.
        listed = {*lists, *by_shard}
        unlisted = now.plan.lagging - listed if rest else set()
        before |= {at: now.all_of(at) for at in unlisted}
        rows |= every_row(now, unlisted, Snapshot.replayed)
        absent = {at: x.sums for at, x in long.items()}
        absent |= {at: x.rows for at, x in by_shard.items()}
        for at, x in absent.items():
            zeros = lambda x: x if x is None else jnp.zeros((1, *x.shape[1:]), x.dtype)
            grads[at] = zeros(x)
            rows[at] = jax.tree.map(zeros, now.all_of(at)._replace(last=()))
        made, inner = self._call(grads, rows)
        for at in now.plan.moving & before.keys():
            made[at] = _whole_move(made[at], before[at], rows[at])
        for at in unlisted:
            last[at] = jnp.full_like(last[at], now.step + 1)
        for at, x in short.items():
            own, last[at] = self._put(x.merge.ids, at, now.all_of(at), inner, before, made)
            for j, array in zip(now.plan.layout.tables[at].own, own, strict=True):
                inner[j] = array
        return made, inner, last

    def in_tiles(self, long, number, made, inner, last):
        """Takes the step of long lists, and writes it into the results of `at_once`."""
        now, tables = self.now, self.now.plan.layout.tables
        kept = {at: now.all_of(at)[1:] for at in long}  # state and last steps, carried
        # Updates overwrite the buffer of the gradients if they have its dtype.
        out = {at: jnp.zeros_like(x.sums, made[at].dtype) for at, x in long.items()}
        for at, x in long.items():
            out[at] = x.sums if x.sums.dtype == out[at].dtype else out[at]
        scalars = [made[at] for at in long]
        scalars += [inner[j] for at in long for j in tables[at].own]
        params = [now.leaves[at] for at in long]
        types = tiles.axes_of(kept, out, scalars, params, long, now.step)

        def read(tile, at, carry):
            """Gathers a tile: rows of a table before the step, and their gradients."""
            kept, out = carry
            same = out[at].dtype == long[at].sums.dtype
            grads = tile.cut(at, out[at] if same else long[at].sums)
            ids = tile.cut(at, long[at].merge.ids)
            return now.gathered(Rows(now.leaves[at], *kept[at]), ids), grads

        def one(tile, carry):
            kept, out = carry
            # Updates of all other leaves are not used, and XLA removes them.
            grads = [jnp.zeros(x.shape, x.dtype) for x in self.grads]
            before, rows, ids = {}, {}, {}
            for at, x in long.items():
                ids[at], caught = tile.cut(at, (x.merge.ids, x.caught))
                reading = functools.partial(read, tile, at, carry)
                before[at], grads[at] = tile.apart(reading)
                rows[at] = self._caught(at, before[at], caught)
            made, inner = self._call(grads, rows)
            for at in long:
                if now.way(at).moves:
                    made[at] = _whole_move(made[at], before[at], rows[at])
                whole = Rows(now.leaves[at], *kept[at])
                kept = {**kept, at: self._put(ids[at], at, whole, inner, before, made)}
                out = {**out, at: tile.put(at, out[at], made[at])}
            return kept, out

        lists = {at: (x.places, x.merge.found) for at, x in long.items()}
        kept, out = tiles.each(lists, number, one, (kept, out), types)
        for at in long:
            made[at], (own, last[at]) = out[at], kept[at]
            for j, array in zip(tables[at].own, own, strict=True):
                inner[j] = array

    def _caught(self, at, before, caught):
        """Returns rows caught up to the last step: `caught` if they already are."""
        return self.now.advanced(at, before) if caught is None else caught

    def _call(self, grads, rows):
        """Calls the optimizer, with some rows in place of tables."""
        now = self.now
        return now.call(grads, now.leaves, now.inner, rows, **self.extra)

    def _put(self, ids, at, whole, inner, before, made):
        """Writes the rows of a step into a table's state and its last steps."""
        now = self.now
        own, last = now.plan.layout.tables[at].own, whole.last
        pairs = zip(whole.own, own, strict=True)
        own = tuple(written(x, ids, inner[j]) for x, j in pairs)
        if now.way(at).lags:
            seen = after(before[at].last, made[at])
            last = written(last, ids, jnp.maximum(now.step + 1, seen))
        return own, last


def same_but_over(names, x):
    """Types an array as varying over `names` at most; it must be equal over other axes."""
    return assume_same(x, tuple(sorted(tiles.axes_of(x) - names)))


def _whole_move(made: jax.Array, before: Rows, after: Rows) -> jax.Array:
    """Returns the updates of a step with the changes of all missed steps included.

    Args:
        made: [n, ...], the updates of the step.
        before: The rows before they caught up.
        after: The rows after they caught up.
    """
    moved = before.param != after.param
    # Where catching up changed nothing, it is the optimizer's update, without rounding.
    then = added(after.param, made)
    return jnp.where(moved, then - before.param, made).astype(made.dtype)
