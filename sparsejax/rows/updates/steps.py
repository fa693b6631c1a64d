"""What a lazy optimizer does: its first state, a step, and catching all rows up.

A step (`update`) merges the ids that a gradient lists, with those that are due; gathers
these rows of the parameter and of the state; has them advance on the steps that they have
missed, which `catch_up` takes or adds up; calls the optimizer with them in place of the
table (`RowCall`); and scatters them back. Of lists that are short all of that is done at
once (`_OptimizerStep.at_once`), with all other leaves. Long lists go through it tile by
tile in a loop (`in_tiles`), while a row of zeros stands for each of them in the former.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax.axes import assume_same
from sparsejax.rows import tiles
from sparsejax.rows.updates import layout as layouts
from sparsejax.rows.updates.apply import Scatter, after
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.fading import first_kept
from sparsejax.rows.updates.catch_up.history import history
from sparsejax.rows.updates.catch_up.replay import added
from sparsejax.rows.updates.optimizer import RowOptimizer
from sparsejax.rows.updates.reader import LateRowReader, reader_of
from sparsejax.rows.updates.snapshot import Snapshot, before
from sparsejax.rows.updates.state import LazyState, find
from sparsejax.units.merging import Merge
from sparsejax.units.row_grads import LateRowGrads, RowGrads, is_row_grads


def init(optimizer: RowOptimizer, params: Any) -> LazyState:
    """The first state; raises if the optimizer can update no table by rows."""
    plan = optimizer.started(params)
    tables = plan.layout.tables.values()
    refused = [table for table in tables if optimizer.why_not(table)]
    if refused and len(refused) == len(tables):
        optimizer.check(refused[0])
    inner = optimizer.tx.init(params)
    _, leaves, structure = layouts.flatten(params)
    lagging, numbers = plan.lagging, jax.tree.leaves(inner)
    last = [
        jnp.zeros(leaf.shape[0], jnp.int32) if at in lagging else optax.MaskedNode()
        for at, leaf in enumerate(leaves)
    ]
    return LazyState(
        step=jnp.zeros((), jnp.int32),
        last=jax.tree.unflatten(structure, last),
        history=history([numbers[j] for j in plan.layout.held] if lagging else []),
        inner=inner,
        kept=tuple(map(first_kept, plan.sums)),
    )


def tables(optimizer: RowOptimizer, params: Any) -> list[str]:
    """The paths of the parameters that it can update by rows."""
    tables = optimizer.started(params).layout.tables.values()
    return [table.path for table in tables if not optimizer.why_not(table)]


def update(
    optimizer: RowOptimizer,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    read: LateRowReader | None = None,
    **extra: Any,
) -> tuple[Any, LazyState]:
    """A step: rows catch up, the optimizer updates them, and they go back.

    Where rows of the step before come along, they are updated first, as of that step.
    """
    read = reader_of(optimizer, read)
    paths, grads, structure = layouts.flatten(updates)
    state = find(state)
    is_late = lambda leaf: isinstance(leaf, LateRowGrads)
    early = {at: leaf.late for at, leaf in enumerate(grads) if is_late(leaf)}
    grads = [leaf.now if is_late(leaf) else leaf for leaf in grads]
    updates, moved = jax.tree.unflatten(structure, grads), {}
    if early:
        moved, state = _late(optimizer, early, updates, state, params)
    if read is not None:
        read.check_of(state)
    now = Snapshot(optimizer, updates, params, state, read and read.sums)
    lists = {}
    for at, (path, leaf) in enumerate(zip(paths, grads, strict=True)):
        if not is_row_grads(leaf):
            continue
        leaf.check(f"lazy: the update of {path!r}")
        if at in now.plan.layout.tables:
            optimizer.check(now.plan.layout.tables[at])
            # Of a step in two halves, rows that are due come with the late one: some of
            # them may be in it.
            reading = None if read is None or at in early else read.reading(leaf)
            due = None if reading or at in early else now.due(at)
            lists[at] = _listed(now, at, leaf, due, reading)
        else:  # there is nothing in it
            grads[at] = leaf.to_dense()
    step = _OptimizerStep(now, grads, structure, extra)
    made, inner, last = _taken(step, lists)
    for at, late in moved.items():
        made[at] = _both(late, made[at])
    return jax.tree.unflatten(structure, made), LazyState(
        step=now.step + 1,
        last=jax.tree.unflatten(structure, last),
        history=now.history,
        inner=jax.tree.unflatten(now.of_state, inner),
        kept=now.kept(),
    )


def caught_late(
    optimizer: RowOptimizer, late: Any, state: Any, params: Any
) -> tuple[Any, LazyState]:
    """What rows of the last step do that come now; no step is taken.

    Args:
        optimizer: The optimizer.
        late: A tree like the parameters: `RowGrads`, or `optax.MaskedNode` where none
            came.
        state: The state.
        params: The parameters.

    Returns:
        A tree like `late` with the updates, and the state.
    """
    ours = find(state)
    paths, rows, whole = layouts.flatten(late)
    by_path = dict(zip(paths, rows, strict=True))
    params = optimizer.those_of(params, ours.inner)
    paths, leaves, structure = layouts.flatten(params)
    early = {at: by_path[path] for at, path in enumerate(paths) if path in by_path}
    zeros = jax.tree.unflatten(structure, list(map(jnp.zeros_like, leaves)))
    moved, ours = _late(optimizer, early, zeros, ours, params)
    return whole.unflatten([moved[paths.index(path)] for path in by_path]), ours


def _late(optimizer, late, updates, state, params):
    """The update of rows that the last step has left out, as it would have been then.

    Of the state numbers of steps, and numbers by hand, are those of that step. Of what it
    makes only the rows are kept: for all else that step was whole.

    Returns:
        The updates, by table, and the state.
    """
    paths, leaves, structure = layouts.flatten(updates)
    plan = optimizer.plan(updates, params)
    then = Snapshot(optimizer, updates, params, before(plan, state))
    lists, grads = {}, [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for at, leaf in late.items():
        leaf.check(f"lazy: the late rows of {paths[at]!r}")
        if at not in plan.layout.tables:
            continue
        optimizer.check(plan.layout.tables[at])
        optimizer.check_late(plan, at)
        lists[at] = _listed(then, at, leaf, then.due(at, unseen=True))
        grads[at] = leaf
    step = _OptimizerStep(then, grads, structure, {})
    made, rows, last = _taken(step, lists, others=False)
    inner = jax.tree.leaves(state.inner)
    for at in lists:
        for j in plan.layout.tables[at].own:
            inner[j] = rows[j]
    return {at: made[at] for at in lists}, state._replace(
        last=jax.tree.unflatten(structure, last),
        inner=jax.tree.unflatten(then.of_state, inner),
    )


def _both(late: RowGrads, now: RowGrads) -> RowGrads:
    """The updates of two steps, of which no row is in both lists."""
    ids = jnp.concatenate([late.ids, now.ids])
    return RowGrads.marked(ids, jnp.concatenate([late.rows, now.rows]), now.shape)


def _taken(step: "_OptimizerStep", lists: dict[int, "_GradientRows"], others: bool = True):
    """Takes a step: the updates, the leaves of the state, and the steps that rows saw."""
    now = step.now
    long = {at: x for at, x in lists.items() if tiles.is_long(x.places)}
    number = tiles.tiles_of(sum(x.sums.size for x in long.values()))
    long = long if number > 1 else {}
    made, inner, last = step.at_once(lists, long, others)
    by_type: dict[frozenset[str], dict[int, _GradientRows]] = {}
    for at, x in long.items():
        # A loop has one type: what is the same on all ranks stays so beside shards.
        types = tiles.axes_of(x, now.leaves[at], now.all_of(at), now.step)
        by_type.setdefault(types, {})[at] = x
    for some in by_type.values():
        step.in_tiles(some, number, made, inner, last)
    for at, x in lists.items():
        made[at] = RowGrads.marked(x.merge.ids, made[at], step.grads[at].shape)
        # Which rows are listed decides it, whatever the rows vary over.
        of = tiles.axes_of(now.last[at], x.merge.ids, now.step)
        last[at] = jax.tree.map(functools.partial(_same_but_over, of), last[at])
    return made, inner, last


class _GradientRows(NamedTuple):
    """The rows that a gradient lists.

    Attributes:
        merge: The distinct rows.
        sums: Their gradients.
        caught: These rows as after the last step, where steps are taken one by one.
    """

    merge: Merge
    sums: jax.Array
    caught: Rows | None

    @property
    def places(self) -> int:
        """For how many rows there is room."""
        return self.merge.ids.shape[0]


def _listed(now, at, leaf, due, reading=None):
    """The rows of a gradient, and those that are due, or what was made to read them."""
    way = now.way(at)
    merge = reading.merge if reading else now.merged(at, leaf.ids, due)
    caught = None
    if way.moves and not way.is_cheap:
        caught = reading.rows if reading else now.caught_up(at, merge)
    return _GradientRows(merge, merge.sums(leaf.rows), caught)


class _OptimizerStep:
    """A step of the optimizer.

    Args:
        now: The state, and the parameters.
        grads: The gradients, `RowGrads` among them.
        structure: Of the parameters.
        extra: What the optimizer is given besides.
    """

    def __init__(self, now, grads, structure, extra):
        self.now, self.grads = now, grads
        self.structure, self.extra = structure, extra

    def at_once(self, lists, long, rest):
        """The step of all but the long lists, of which a row of zeros stands for all.

        Args:
            lists: Of each table the rows that its gradient lists.
            long: Those of them that are long.
            rest: Whether the step is one of tables that list no rows, too.

        Returns:
            The updates, the state, and the steps that rows have seen last.
        """
        now, short = self.now, {at: x for at, x in lists.items() if at not in long}
        grads, last = list(self.grads), list(now.last)
        before, rows = {}, {}
        for at, x in short.items():
            before[at] = now.gathered(now.all_of(at), x.merge.ids)
            rows[at] = self._caught(at, before[at], x.caught)
            grads[at] = x.sums
        # A table whose gradient is dense this time: all its rows are listed.
        unlisted = now.plan.lagging - lists.keys() if rest else set()
        before |= {at: now.all_of(at) for at in unlisted}
        rows |= now.replayed(unlisted)
        for at, x in long.items():
            zeros = lambda x: x if x is None else jnp.zeros((1, *x.shape[1:]), x.dtype)
            grads[at] = zeros(x.sums)
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
        """The step of long lists, into what `at_once` has returned."""
        now, tables = self.now, self.now.plan.layout.tables
        kept = {at: now.all_of(at)[1:] for at in long}  # what is carried on
        # An update has the place of the gradient, where it has its type.
        out = {at: jnp.zeros_like(x.sums, made[at].dtype) for at, x in long.items()}
        for at, x in long.items():
            out[at] = x.sums if x.sums.dtype == out[at].dtype else out[at]
        scalars = [made[at] for at in long]
        scalars += [inner[j] for at in long for j in tables[at].own]
        params = [now.leaves[at] for at in long]
        types = tiles.axes_of(kept, out, scalars, params, long, now.step)

        def read(tile, at, carry):
            """Rows of a table before the step, and their gradients."""
            kept, out = carry
            same = out[at].dtype == long[at].sums.dtype
            grads = tile.cut(at, out[at] if same else long[at].sums)
            ids = tile.cut(at, long[at].merge.ids)
            return now.gathered(Rows(now.leaves[at], *kept[at]), ids), grads

        def one(tile, carry):
            kept, out = carry
            # Nothing of what is not listed here is computed.
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
        """Rows as after the last step; `caught` if that has all of them."""
        return self.now.advanced(at, before) if caught is None else caught

    def _call(self, grads, rows):
        """Calls the optimizer, with some rows in place of tables."""
        now = self.now
        return now.call(grads, now.leaves, now.inner, rows, **self.extra)

    def _put(self, ids, at, whole, inner, before, made):
        """A table's state, and the steps that its rows have seen, with those of a step."""
        now = self.now
        put = Scatter(ids, self.grads[at].shape[0])
        own, last = now.plan.layout.tables[at].own, whole.last
        own = tuple(put(x, inner[j]) for x, j in zip(whole.own, own, strict=True))
        if now.way(at).lags:
            seen = after(before[at].last, made[at])
            last = put(last, jnp.maximum(now.step + 1, seen))
        return own, last


def settled(optimizer: RowOptimizer, params: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and state with all rows caught up."""
    ours = find(state)
    names, whole, of_whole = layouts.flatten(params)
    params = optimizer.those_of(params, ours.inner)
    paths, leaves, structure = layouts.flatten(params)
    tables = optimizer.plan(params, params).layout.tables
    last = structure.flatten_up_to(ours.last)
    inner, of_state = jax.tree.flatten(ours.inner)
    for at, rows in _caught_up(optimizer, params, ours).items():
        leaves[at], last[at] = rows.param, rows.last
        for j, own in zip(tables[at].own, rows.own, strict=True):
            inner[j] = own
    new = ours._replace(
        last=jax.tree.unflatten(structure, last), inner=jax.tree.unflatten(of_state, inner)
    )
    is_ours = lambda node: isinstance(node, LazyState)
    state = jax.tree.map(lambda x: new if is_ours(x) else x, state, is_leaf=is_ours)
    settled = dict(zip(names, whole, strict=True)) | dict(zip(paths, leaves, strict=True))
    return jax.tree.unflatten(of_whole, [settled[name] for name in names]), state


@functools.partial(jax.jit, static_argnums=0)
def _caught_up(optimizer, params, state):
    """All rows of the tables whose rows may be late, in one program.

    Operation by operation each would be compiled by itself, and none fused.
    """
    now = Snapshot(optimizer, params, params, state)
    settled = now.settled()
    of = {at: tiles.axes_of(now.last[at], now.step) for at in settled}
    return {
        at: rows._replace(last=_same_but_over(of[at], rows.last))
        for at, rows in settled.items()
    }


def _same_but_over(names, x):
    """An array that is known to differ over no other mesh axes than these."""
    return assume_same(x, tuple(sorted(tiles.axes_of(x) - names)))


def _whole_move(made: jax.Array, before: Rows, after: Rows) -> jax.Array:
    """From what the last step changes to what all steps change that a row has missed."""
    moved = before.param != after.param
    # Of what has missed none it is the optimizer's own number.
    then = added(after.param, made)
    return jnp.where(moved, then - before.param, made).astype(made.dtype)
